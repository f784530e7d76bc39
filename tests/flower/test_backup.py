"""`fedskew federate backup`: a server that is destroyed is restored elsewhere, and ends with the same model."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context
from in_process import Case, case, run_config_of, small_data
from real_federation import Real, until
from safetensors.torch import load_file

from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower.app_folder import write_app
from fedskew.flower.backup import _copy_folder, back_up, copy_database
from fedskew.flower.chained_log import head_path
from fedskew.flower.contract import Contract
from fedskew.flower.credentials import Credentials
from fedskew.flower.local_federation import LocalFederation
from fedskew.flower.server_app import run_federation
from fedskew.flower.supervised_run import read_progress

ROUNDS = 4


class Destroyed(Exception):
    """The server is gone."""


def database(path: Path) -> sqlite3.Connection:
    """A database like the SuperLink's, whose newest pages are in a second file. The connection stays open."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE node (name TEXT)")
    connection.execute("INSERT INTO node VALUES ('north')")
    return connection


def federated(folder: Path, rounds: int = ROUNDS) -> Case:
    data = small_data(folder)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "scaffold", "rounds": rounds, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    here = case(folder, split, data, with_values(Config(), values))
    write_app(folder / "app", here.settings, Contract.from_dataset(split.dataset), here.config)
    assert run_config_of(here.settings, Contract.from_dataset(split.dataset), here.config) == here.context.run_config
    return here


def back_up_in_round(here: Case, round: int, destroyed_in: int) -> Path:
    """Run the federation. Take a backup while the sites train one round, and lose the server in another."""
    backup = here.folder / "backup"
    connection = database(here.folder / "superlink.db")

    def take_or_lose(name: str, asked: Any, facts: Any, payload: bytes) -> Any:
        if name == "site-2" and asked["kind"] == "train" and asked["key"]["round"] + 1 == round and not backup.exists():
            back_up(backup, here.folder / "run", here.folder / "app", here.folder / "superlink.db")
        if asked["kind"] == "train" and asked["key"]["round"] + 1 == destroyed_in:
            raise Destroyed
        return facts, payload

    here.grid.meddle = take_or_lose
    with closing(connection), pytest.raises(Destroyed):
        run_federation(here.grid, here.context)
    here.grid.meddle = None
    shutil.rmtree(here.folder / "run")
    return backup


def restored(here: Case, backup: Path) -> dict[str, torch.Tensor]:
    """The final model of the run that resumes in another folder."""
    folder = here.folder / "elsewhere"
    shutil.copytree(backup / "run", folder)
    run_config = {**here.context.run_config, "federation.folder": str(folder)}
    context = Context(run_id=2, node_id=0, node_config={}, state=here.context.state, run_config=run_config)
    return dict(run_federation(here.grid, context).model.state_dict())


def test_a_server_that_was_killed_before_its_audit_log_had_a_head_can_be_backed_up(tmp_path: Path) -> None:
    here = federated(tmp_path, rounds=1)
    run_federation(here.grid, here.context)
    audit = tmp_path / "run" / "audit.jsonl"
    audit.write_bytes(audit.read_bytes().splitlines(keepends=True)[0])
    head_path(audit).unlink()
    database(tmp_path / "superlink.db").close()
    backup = tmp_path / "backup"
    back_up(backup, tmp_path / "run", tmp_path / "app", tmp_path / "superlink.db")
    assert (backup / "run" / "audit.jsonl").read_bytes() == audit.read_bytes()
    assert not head_path(backup / "run" / "audit.jsonl").exists()


def test_a_log_whose_head_was_removed_is_not_backed_up(tmp_path: Path) -> None:
    here = federated(tmp_path, rounds=1)
    run_federation(here.grid, here.context)
    head_path(tmp_path / "run" / "audit.jsonl").unlink()
    database(tmp_path / "superlink.db").close()
    with pytest.raises(UserError, match=r"the audit log of the run was changed: audit\.head is missing"):
        back_up(tmp_path / "backup", tmp_path / "run", tmp_path / "app", tmp_path / "superlink.db")


def test_a_restored_run_ends_with_the_same_model(tmp_path: Path) -> None:
    """The backup is taken while round 3 is trained. The server is lost in round 4, which it repeats elsewhere."""
    here = federated(tmp_path)
    expected = run_federation(here.grid, here.context).model.state_dict()
    for path in (tmp_path / "run", *(tmp_path / name / "state" for name in here.names)):
        shutil.rmtree(path)
    backup = back_up_in_round(here, round=3, destroyed_in=4)
    assert stat.S_IMODE(backup.stat().st_mode) == 0o700
    assert {path.name for path in backup.iterdir()} == {"app", "run", "superlink.db"}
    assert not list((backup / "run").rglob(".*"))
    found = restored(here, backup)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_a_site_says_that_it_no_longer_has_the_state_of_an_old_backup(tmp_path: Path) -> None:
    """Sites keep the states of the last rounds only. With an older backup, they go on with the nearest state."""
    here = federated(tmp_path, rounds=7)
    logged: list[str] = []
    for _, site in here.grid._sites.values():
        site._log = logged.append
    backup = back_up_in_round(here, round=2, destroyed_in=7)
    assert logged == []
    model = restored(here, backup)
    assert all(bool(tensor.isfinite().all()) for tensor in model.values())
    line = "warning: the server continues after round 1, but this site has no state of it and uses that of round "
    assert [text.startswith(line) for text in logged] == [True] * len(here.names)


def test_the_copy_of_a_database_in_use_has_all_that_was_committed(tmp_path: Path) -> None:
    with closing(database(tmp_path / "superlink.db")) as live:
        live.execute("BEGIN")
        live.execute("INSERT INTO node VALUES ('not committed')")
        copy_database(tmp_path / "superlink.db", tmp_path / "copy.db")
        shutil.copyfile(tmp_path / "superlink.db", tmp_path / "plain.db")
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert copy.execute("SELECT name FROM node").fetchall() == [("north",)]
    with closing(sqlite3.connect(tmp_path / "plain.db")) as plain, pytest.raises(sqlite3.Error):
        plain.execute("SELECT name FROM node")  # its pages are still in the second file
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = tmp_path / "app"
    run = f"folder={tmp_path / 'run'}"
    assert main(["federate", "init", str(app), "--sites", "a,b", "--data", "digits", "--federation", run]) == 0
    assert main(["federate", "backup", str(app), str(tmp_path / "backup")]) == 2
    assert f"{tmp_path / 'run'} is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "text.db").write_text("no database" * 100)
    with pytest.raises(UserError, match=r"cannot copy .*; expected the SuperLink's --database"):
        copy_database(tmp_path / "text.db", tmp_path / "copy.db")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "server.key").symlink_to(tmp_path / "gone.key")
    with pytest.raises(UserError, match=r"^cannot copy \S+/keys/server\.key: \[Errno 2\] No such file or directory"):
        _copy_folder(tmp_path / "keys", tmp_path / "copied")
    with pytest.raises(UserError, match=r"missing\.db does not exist; expected the SuperLink's --database"):
        copy_database(tmp_path / "missing.db", tmp_path / "copy.db")
    database(tmp_path / "superlink.db").close()
    with pytest.raises(UserError, match=r"cannot copy .*superlink\.db to .*none/copy\.db: unable to open .* file$"):
        copy_database(tmp_path / "superlink.db", tmp_path / "none" / "copy.db")


def test_a_mistake_leaves_no_part_of_a_backup(tmp_path: Path) -> None:
    """So the corrected command can use the same folder. A folder that is copied cannot hold its own copy."""
    here = federated(tmp_path, rounds=1)
    run_federation(here.grid, here.context)
    database(tmp_path / "superlink.db").close()
    run, app, live, backup = (tmp_path / name for name in ("run", "app", "superlink.db", "backup"))
    with pytest.raises(UserError, match=r"missing\.db does not exist"):
        back_up(backup, run, app, tmp_path / "missing.db")
    for given in ((app, tmp_path / "keys"), (app / "pyproject.toml", None)):
        with pytest.raises(UserError, match=r"(keys|pyproject\.toml) is not a folder; expected the app's folder, or"):
            back_up(backup, run, given[0], live, given[1])
    for inside, keys in ((run / "backup", None), (app / "backup", None), (backup, tmp_path)):
        with pytest.raises(UserError, match=r"backup is inside .*, which is copied; choose a folder outside it"):
            back_up(inside, run, app, live, keys)
        assert not inside.exists()
    assert back_up(backup, run, app, live).is_finished


@pytest.mark.slow
def test_a_server_of_real_processes_is_restored_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Database, keys, app and run move to another folder. The sites reconnect by themselves, and keep their state."""
    (tmp_path / "first").mkdir()
    real = Real(tmp_path / "first", ("site-1", "site-2"))
    local, folder = real.local, real.run_folder("app")
    config = real.config("scaffold", rounds=5)
    backup, new = tmp_path / "backup", tmp_path / "second"
    with local:
        for name, value in local.environment.items():
            monkeypatch.setenv(name, value)
        local.start()
        app = real.app("app", config)
        local.start_run(app)
        until(lambda: read_progress(folder).rounds >= 1, "the first round", local)
        database, keys = str(local.folder / "superlink.db"), str(local.keys.folder)
        capsys.readouterr()
        assert main(["federate", "backup", str(app), str(backup), "--database", database, "--keys", keys]) == 0
        assert f"{backup}: the copy would resume after round " in capsys.readouterr().out
        assert local.superlink is not None
        local.superlink.kill()
        for path in (folder, Path(database), local.keys.folder, app):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

        shutil.copytree(backup, new)
        other = LocalFederation(new, new / "app", Credentials(new / "keys"), real.sites)
        other.port = local.port  # the server's name and port stay, so that the sites find it
        with other:
            monkeypatch.setenv("FLWR_HOME", other.environment["FLWR_HOME"])
            other.start_superlink()
            command = ["federate", "run", str(new / "app"), "--connection", "federation"]
            assert main([*command, "--folder", str(new / "run")]) == 0
    assert read_progress(new / "run").rounds == 5
    expected = run_prepared(prepare(config, real.split)).model.state_dict()
    found = load_file(new / "run" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
