"""Datasets by name: their publishers' files, where to find them, and how to download them."""
