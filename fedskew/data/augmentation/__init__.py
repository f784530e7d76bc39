"""Random changes to training images, keyed sample by sample."""
