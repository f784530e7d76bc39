"""The same methods across machines, as Flower apps."""
