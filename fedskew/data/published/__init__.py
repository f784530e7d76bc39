"""Datasets by name: their publishers' files, where they lie, and how they get there."""
