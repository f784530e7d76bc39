"""Sweeps: grids and searches, worker processes that share a CPU or GPU, one tidy table of results."""
