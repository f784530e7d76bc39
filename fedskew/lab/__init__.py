"""Instruments built on the library: sweeps, papers rerun, benchmarks, diagnosis. The library never imports them."""
