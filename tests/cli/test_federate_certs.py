"""`fedskew federate certs`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedskew.cli import federate
from fedskew.cli.app import EXAMPLES

COMMAND = ("federate", "certs", "keys", "--sites", "north, south", "--host", "fl.example.org")


@pytest.mark.parametrize("example", EXAMPLES["federate certs"])
def test_the_example_is_in_the_help_and_works(example, cli):
    assert example in cli("federate", "certs", "--help").out
    assert cli(*shlex.split(example)[1:]).status == 0


def test_every_path_is_told_and_what_to_use_in_earnest(cli):
    outcome = cli(*COMMAND)
    assert outcome.status == 0
    for path in ("keys/ca.pem", "keys/ca.key", "keys/server.pem", "keys/sites/north/", "keys/sites/south/"):
        assert path in outcome.out
    assert "ssh-keygen" in outcome.err


def test_a_key_that_is_stored_offline_is_not_listed_and_a_renewal_asks_for_it(cli):
    keys = Path("keys")
    for days, warning in (("20", True), ("365", False)):
        cli(*COMMAND, "--days", days)
        offline = (keys / "ca.key").rename("ca.key")
        outcome = cli(*COMMAND)
        assert outcome.status == 0
        assert "keys/ca.key" not in outcome.out
        line = (
            "warning: keys/server.pem expires within a month; to renew it, put keys/ca.key back and repeat this command"
        )
        assert (line in outcome.err) == warning
        offline.rename(keys / "ca.key")


def test_json_names_files_that_are_there(cli):
    told = cli(*COMMAND, "--json").json
    paths = [*told["server"].values(), *(path for site in told["sites"].values() for path in site.values())]
    assert len(paths) == 9
    assert all(Path(path).is_file() for path in paths)


def test_a_mistake_is_one_line(cli):
    outcome = cli(*COMMAND, "--host", "fl:9092")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1


def test_an_unknown_command_of_the_group_has_its_nearest(cli):
    outcome = cli("federate", "cert")
    assert outcome.status == 2
    assert "did you mean 'certs'?" in outcome.err


def test_without_flower_the_extra_is_named(cli, monkeypatch):
    monkeypatch.setattr(federate, "find_spec", lambda name: None)
    outcome = cli(*COMMAND)
    assert outcome.status == 2
    assert "fedskew[flower]" in outcome.err
