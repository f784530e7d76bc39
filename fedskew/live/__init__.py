"""A live report of running experiments, which only this machine can open."""
