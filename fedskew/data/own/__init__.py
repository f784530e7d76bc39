"""A user's own data, by path or as Python objects."""
