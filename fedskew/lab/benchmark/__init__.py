"""The benchmark: rounds compared with a plain PyTorch loop and with the device's practical limit."""
