"""Federations across machines: the methods of the simulation, run as Flower apps."""
