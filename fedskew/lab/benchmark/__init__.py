"""Compare the speed of rounds with a plain PyTorch loop and with the device's practical limit (see `limit`)."""
