"""How fast a round is: against a plain PyTorch loop, and against the fastest that the device could do."""
