"""What skew a federation has, and what is known to help against it, before any training."""
