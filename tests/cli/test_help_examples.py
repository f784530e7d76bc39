"""The examples that `--help` shows work as shown."""

from __future__ import annotations

import shlex

import pytest

from fedskew.cli.app import EXAMPLES

OTHERWISE_TESTED = {"sweep", "reproduce", "results", "export", "report", "figures", "live"}
"""Their examples need files or runs, which the tests of these commands provide."""
CHECKED = [
    (command, example)
    for command, examples in EXAMPLES.items()
    for example in examples
    if command not in OTHERWISE_TESTED and not command.startswith("federate")
]
FEWER = {
    "demo": "--rounds 1",
    "run": "--rounds 1 --local-epochs 1",
    "compare": "--rounds 1 --local-epochs 1",
    "choose": "--methods fedprox --rounds 2 --clients 4 --local-epochs 1 --budget 30r --workers 1",
    "bench": "--clients 2 --methods fedavg",
}
"""What keeps an example short; the last value of a repeated option wins."""


@pytest.mark.parametrize(("command", "example"), CHECKED, ids=[example for _, example in CHECKED])
def test_an_example_is_in_the_help_and_works(command, example, cli):
    assert example in cli(command, "--help").out
    program, *arguments = shlex.split(example)
    assert program == "fedskew"
    assert arguments[0] == command
    assert cli(*arguments, *FEWER.get(command, "").split()).status == 0
