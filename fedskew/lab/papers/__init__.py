"""The papers' protocols and printed tables as data, and comparisons of the tables with reruns."""
