"""Parse command lines with the programs' own parsers, without running anything."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from fedskew.cli.app import app


def parse_fedskew(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments of `fedskew`. Options and commands that do not exist are refused."""
    return _parse(app, "fedskew", arguments)


def parse_flwr(arguments: Sequence[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flower's own use of typer
        from flwr.cli.app import app as flwr
    return _parse(flwr, "flwr", arguments)


def parse_superlink(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `python -m fedskew.flower.superlink`, which are those of `flower-superlink`."""
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    return _parse_args_run_superlink().parse_args(list(arguments))


def _parse(application: typer.Typer, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    command: Any = typer.main.get_command(application)
    left, context = list(arguments), None
    while hasattr(command, "get_command"):
        context = command.make_context(name, list(left), parent=context, resilient_parsing=True)
        name, *left = left
        command = command.get_command(context, name)
        assert command is not None, name
    parameters: dict[str, Any] = command.make_context(name, left, parent=context).params
    return parameters
