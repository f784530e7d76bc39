"""The examples that `--help` shows work as shown."""

from __future__ import annotations

import importlib
import shlex

import pytest

COMMANDS = ("demo", "run", "compare", "partition", "methods", "models", "datasets", "partitions", "bench", "diagnose")
EXAMPLES = [
    (command, example) for command in COMMANDS for example in importlib.import_module(f"fedskew.cli.{command}").EXAMPLES
]


@pytest.mark.parametrize(("command", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_an_example_is_in_the_help_and_works(command, example, cli):
    assert example in cli(command, "--help").out
    program, *arguments = shlex.split(example)
    assert program == "fedskew"
    assert arguments[0] == command
    assert cli(*arguments).status == 0
