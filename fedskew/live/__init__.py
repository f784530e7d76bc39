"""A live report of running experiments, served to this machine only."""
