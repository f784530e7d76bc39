"""Flower works in paths with a space or an emoji, and a refusal shows what Flower said."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import flwr
import pytest

from fedskew.flower.credentials import make_credentials
from fedskew.flower.local_federation import LocalFederation
from fedskew.flower.processes import last_message
from fedskew.flower.supervised_run import FlowerRun


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


def test_flower_reads_paths_with_any_character(tmp_path: Path) -> None:
    """TOML has no escapes for halves of a character, which JSON has for an emoji."""
    folder = (tmp_path / "🏥 Zürich").resolve()
    local = LocalFederation(folder, folder / "app", make_credentials(folder / "keys", ["north"]), ["north"])
    local._write_connection(local.keys.authority)
    written = tomllib.loads((folder / "flower" / "config.toml").read_text(encoding="utf-8"))
    assert written["superlink"]["federation"]["root-certificates"] == str(local.keys.authority)
    assert tomllib.loads(local.node_config("north")) == {"site": str(local.site_file("north"))}
    run = FlowerRun(folder, None, folder / "run.log", {}, {"federation.folder": str(folder)})
    assert tomllib.loads(run._options[1]) == {"federation": {"folder": str(folder)}}


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
