"""The examples that `--help` shows work as shown."""

from __future__ import annotations

import importlib
import shlex

import pytest

COMMANDS = ("demo", "run", "compare", "partition", "methods", "models", "datasets", "partitions", "bench", "diagnose")
EXAMPLES = [
    (command, example) for command in COMMANDS for example in importlib.import_module(f"fedskew.cli.{command}").EXAMPLES
]
FEWER = {
    "demo": ("--rounds", "1"),
    "run": ("--rounds", "1"),
    "compare": ("--rounds", "1"),
    "bench": ("--clients", "2", "--methods", "fedavg"),
}
"""What keeps an example short; of an option given twice, the last counts."""


@pytest.mark.parametrize(("command", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_an_example_is_in_the_help_and_works(command, example, cli):
    assert example in cli(command, "--help").out
    program, *arguments = shlex.split(example)
    assert program == "fedskew"
    assert arguments[0] == command
    assert cli(*arguments, *FEWER.get(command, ())).status == 0
