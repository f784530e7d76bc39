"""The command line: one thin module per command, and `app` with all of them."""

from fedskew.cli.app import main

__all__ = ["main"]
