"""Metrics, computed from predictions, updates and learning curves."""
