"""Tools built on the library: sweeps, reruns of papers, benchmarks, diagnosis. The library never imports them."""
