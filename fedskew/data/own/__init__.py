"""A user's own data, by path."""
