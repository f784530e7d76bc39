"""Training data and batches on their device."""
