"""Training data on a device, and the batches drawn from it."""
