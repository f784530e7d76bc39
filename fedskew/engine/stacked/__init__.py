"""Trains many clients at a time, as one tensor program."""
