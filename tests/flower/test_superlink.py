"""The SuperLink's database, with several threads that write."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from flwr.supercore import sql_mixin
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.alembic import utils

from fedskew.flower import superlink

LONG_ENOUGH_TO_FAIL = 0.5


def _two_writers(store: SqlObjectStore) -> str:
    """Write while another thread holds SQLite's lock; returns the second writer's error."""
    error = ""

    def write() -> None:
        nonlocal error
        try:
            store.query("CREATE TABLE second (number INTEGER)")
        except Exception as problem:
            error = str(problem)

    second = threading.Thread(target=write)
    with store.session():
        store.query("CREATE TABLE first (number INTEGER)")
        store.query("INSERT INTO first VALUES (1)")
        second.start()
        second.join(LONG_ENOUGH_TO_FAIL)
    second.join()
    return error


def test_calls_queue_for_the_database_instead_of_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own waiting is switched off here, so that Flower's way fails at once."""
    monkeypatch.setattr(utils, "build_alembic_config", superlink.build_alembic_config)
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", "0")))
    theirs = SqlObjectStore(str(tmp_path / "theirs.db"))
    theirs.initialize()
    assert "database is locked" in _two_writers(theirs)

    monkeypatch.setattr(SqlMixin, "initialize", superlink.initialize_with_one_connection)
    ours = SqlObjectStore(str(tmp_path / "ours.db"))
    ours.initialize()
    assert _two_writers(ours) == ""
