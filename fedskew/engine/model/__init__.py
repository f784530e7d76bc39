"""Models as the engines run them."""
