"""Measure the skew of a federation before any training, and find what is known to help against it."""
