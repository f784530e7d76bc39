"""Clients spread over processes or devices."""
