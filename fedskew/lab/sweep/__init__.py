"""Many runs at once: grids, worker processes that share a CPU or GPU, one tidy table of what came out."""
