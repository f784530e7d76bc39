"""The report of runs that are still going on, served to this machine only."""
