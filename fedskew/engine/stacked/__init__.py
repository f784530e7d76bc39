"""All clients of a round as one tensor program."""
