"""The SuperLink's database, with several threads that write."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from flwr.app import Message, MessageType
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.corestate import sql_corestate
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.alembic import utils
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager

from fedskew.flower import superlink
from fedskew.flower.wire import to_records

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


def test_a_reply_is_passed_on_once_all_of_it_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower passes it on when it is announced, and the ServerApp then waits for the rest and reads no other reply."""
    monkeypatch.setattr(utils, "build_alembic_config", superlink.build_alembic_config)
    monkeypatch.setattr(SqlMixin, "initialize", superlink.initialize_with_one_connection)
    store = SqlObjectStore(str(tmp_path / "link.db"))
    state = SqlLinkState(str(tmp_path / "link.db"), NoOpFederationManager(), store)
    for database in (store, state):
        database.initialize()
    run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
    node = state.create_node("owner", "owner", b"key", 30)
    assert state.activate_node(node, 30)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SUPERLINK_NODE_ID, 1
    asked = Message(to_records({"a": 1}, b""), node, MessageType.TRAIN)
    asked.metadata.__dict__["_message_id"] = asked.object_id
    assert state.store_message_ins(asked) is not None
    reply = Message(to_records({"a": 2}, b"tensors"), reply_to=asked)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    objects = get_all_nested_objects(reply)
    is_stored, _ = state.store_message_and_object_tree(reply, get_object_tree(reply), state.start_session(run))
    assert is_stored

    def received() -> list[str]:
        replies = superlink.get_complete_replies(state, {asked.metadata.message_id}, run)
        return [message.metadata.message_id for message in replies]

    for number, content in objects.items():
        assert received() == []
        store.put(number, content.deflate())
    assert len(objects) > 1
    assert received() == [reply.metadata.message_id]


def test_a_server_app_that_starts_slowly_keeps_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's claim ends after 30 seconds."""
    monkeypatch.setattr(utils, "build_alembic_config", superlink.build_alembic_config)
    for claim, keeps in ((SqlCoreState.claim_task, False), (superlink.claim_task_for_longer, True)):
        path = str(tmp_path / f"{keeps}.db")
        store = SqlObjectStore(path)
        state = SqlLinkState(path, NoOpFederationManager(), store)
        for database in (store, state):
            database.initialize()
        state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP)
        (task,) = state.get_tasks()
        token = claim(state, task.task_id)
        assert token is not None
        with monkeypatch.context() as later:
            later.setattr(sql_corestate, "now", lambda: now() + timedelta(seconds=60))
            assert (state.get_task_by_token(token) is not None) is keeps
