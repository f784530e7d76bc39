"""A SuperLink works in an environment whose path has a space, and a refusal shows what Flower said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import flwr
import pytest

from fedskew.flower.credentials import make_credentials
from fedskew.flower.local_federation import LocalFederation
from fedskew.flower.processes import last_message


@pytest.mark.slow  # `.ci/run` runs the other tests of real federations in such a path
def test_a_superlink_registers_keys_where_flower_lies_in_a_path_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "a b" / "lib"
    shutil.copytree(Path(flwr.__file__).parent, library / "flwr", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", os.getcwd())]))
    folder = tmp_path / "a b" / "trial"
    keys = make_credentials(folder / "keys", ["north"])
    with LocalFederation(folder, folder / "app", keys, ["north"]) as local:
        local.start_superlink()
        local.register()
        local.register()
        assert "the key of north is already registered" in (folder / "logs" / "register.log").read_text()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("one\ntwo\n", "two"),
        ("\x1b[91mERROR \x1b[0m:  broken\n\n", "ERROR :  broken"),
        ("before\n╭─ Error ─────╮\n│ no table    │\n│ named node  │\n╰─────────────╯\n", "no table named node"),
        ("", "it wrote nothing"),
    ],
)
def test_the_last_message_of_a_program(output: str, message: str) -> None:
    assert last_message(output) == message
