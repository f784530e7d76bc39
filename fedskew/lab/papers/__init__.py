"""The papers' protocols and printed tables as data, and comparisons with reruns."""
