"""Random changes to training images. Each sample has its own random key."""
