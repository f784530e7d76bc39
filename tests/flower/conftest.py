"""Where Flower is not installed, there is nothing to test here."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["test_*.py"]
