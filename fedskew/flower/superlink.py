"""`flower-superlink` for many sites, and for environments whose path has a space.

    python -m fedskew.flower.superlink --host 127.0.0.1 ...      # the options of flower-superlink

This module changes Flower 1.41 in five ways.

Spaces in paths. Flower joins the folders of its database migrations with spaces, and Alembic splits the text at spaces.
So in an environment such as `/home/a b/.venv`, no migration is found, the database gets no tables, and every call to
the SuperLink ends with "Internal server error". Here line breaks separate the folders.

Database locks. Flower gives every thread a connection to its database, and almost every call writes to the database.
With a dozen sites on a busy machine, a call may wait longer for SQLite's lock than the 5 seconds that Flower allows.
The call then fails with "database is locked", and a message is lost. Here the timeout is longer, and each of Flower's
Python objects that use the database has a single connection, for which its threads queue.

Incomplete replies. A site announces a reply before it uploads it. Flower passes an announced reply to the ServerApp at
once. The ServerApp then waits for the upload before it reads any other reply. So a single site whose connection breaks
during an upload can stop the whole federation for minutes or longer. Here only complete replies are passed on. If an
upload breaks off, the round goes on without that site after fedskew's own time-outs.

Slow starts. Flower starts a ServerApp anew if it has not reported within 30 seconds, and refuses the one that reports
later. On a busy machine, no ServerApp would ever begin. Here it has four minutes.

Shutdown. A SuperLink that is told to end waits for all open connections. `flwr run --stream` keeps a connection open as
long as the run lasts, so a restart would hang. Here the SuperLink waits for only a few seconds.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any, cast

import uvicorn
from alembic.config import Config
from flwr.app import Message
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.alembic import utils
from flwr.supercore.state.schema.corestate_models import Task
from flwr.supercore.state.schema.linkstate_models import MessageRes
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.supercore.utils import uint64_to_int64
from sqlalchemy import Engine, QueuePool, select, update

_LOCK_SECONDS = 120
"""The longest time that a call waits for the connection, and then again for SQLite's lock."""
_START_SECONDS = 240
"""The longest time between the start of a ServerApp's process and its first report."""
_CLOSE_SECONDS = 5
"""The longest time that a SuperLink which is told to end waits for open connections."""

_flower_config = utils.build_alembic_config
_flower_initialize = SqlMixin.initialize
_flower_replies = SqlLinkState.get_message_res
_flower_claim = SqlCoreState.claim_task


def build_alembic_config(engine: Engine) -> Config:
    """Make Flower's configuration of Alembic, with migration folders that may contain spaces."""
    config = _flower_config(engine)
    folders = [str(folder) for folder in (utils.ALEMBIC_DIR / "versions", *utils._version_locations)]
    config.set_main_option("path_separator", "newline")
    escaped = [folder.replace("%", "%%") for folder in folders]  # Alembic's configuration interpolates %
    config.set_main_option("version_locations", "\n".join(escaped))
    return config


def initialize_with_one_connection(state: SqlMixin, log_queries: bool = False, **options: Any) -> list[str]:
    """Call Flower's `initialize` with one connection per object, unless the database is in memory."""
    if not state._is_in_memory_sqlite:
        options |= {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0, "pool_timeout": _LOCK_SECONDS}
    return _flower_initialize(state, log_queries, **options)


def get_complete_replies(state: SqlLinkState, message_ids: set[str], run_id: int) -> list[Message]:
    """Return the replies to these messages, except those that are still being uploaded.

    Flower marks all these replies as delivered. So this function then marks the incomplete ones as not delivered. A
    check before Flower's call would miss a reply that is announced between the check and the call.
    """
    store = cast(SqlObjectStore, state.object_store)  # Flower keeps a SqlLinkState's objects in the same database
    replies = _flower_replies(state, message_ids, run_id)
    reply_ids = [reply.metadata.message_id for reply in replies]
    incomplete = [reply_id for reply_id in reply_ids if not _is_complete(store, reply_id)]
    if incomplete:
        with state.session() as session:
            session.execute(update(MessageRes).where(MessageRes.message_id.in_(incomplete)).values(delivered_at=""))
    return [reply for reply in replies if reply.metadata.message_id not in incomplete]


def _is_complete(store: SqlObjectStore, reply_id: str) -> bool:
    """Whether all objects of a reply have arrived."""
    try:
        objects = [node.object_id for node in iterate_object_tree(store.get_object_tree(reply_id))]
    except NoObjectInStoreError:  # the objects were deleted, so there is no upload to wait for; Flower drops the reply
        return True
    missing = select(StoredObject.object_id).where(StoredObject.object_id.in_(objects), StoredObject.is_available == 0)
    with store.session() as session:
        return session.scalar(missing.limit(1)) is None


def claim_task_for_longer(state: SqlCoreState, task_id: int) -> str | None:
    """Claim a task as Flower does, but for `_START_SECONDS`. Return its token, or None if another process has it."""
    token = _flower_claim(state, task_id)
    if token is not None:
        until = now() + timedelta(seconds=_START_SECONDS)
        with state.session() as session:
            session.execute(update(Task).where(Task.task_id == uint64_to_int64(task_id)).values(active_until=until))
    return token


def main() -> None:
    from flwr.superlink.cli import flower_superlink

    busy_timeout = ("busy_timeout", str(1000 * _LOCK_SECONDS))
    sql_mixin.SQLITE_PRAGMAS = (*SQLITE_PRAGMAS, busy_timeout)  # type: ignore[attr-defined, assignment]
    SqlMixin.initialize = initialize_with_one_connection  # type: ignore[method-assign, assignment]
    SqlLinkState.get_message_res = get_complete_replies  # type: ignore[method-assign, assignment]
    SqlCoreState.claim_task = claim_task_for_longer  # type: ignore[method-assign, assignment]
    utils.build_alembic_config = build_alembic_config
    uvicorn.run = functools.partial(uvicorn.run, timeout_graceful_shutdown=_CLOSE_SECONDS)
    sys.argv[0] = "flower-superlink"  # Flower reads the program's name from here when it exits
    flower_superlink()


if __name__ == "__main__":
    main()
