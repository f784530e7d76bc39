"""Data on a device, and the batches drawn from it."""
