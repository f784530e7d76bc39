"""Sweeps: grids and searches, worker processes that share a CPU or a GPU, and a table of the results."""
