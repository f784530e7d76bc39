"""`flower-superlink` for many sites, and in environments whose path has a space.

    python -m fedskew.flower.superlink --host 127.0.0.1 ...      # the options of flower-superlink

Flower 1.41 joins the folders of its database migrations with spaces, and Alembic splits the text at spaces. So in an
environment such as `/home/a b/.venv`, no migration is found, the database gets no tables, and every call to the
SuperLink ends with "Internal server error". Here line breaks separate the folders.

Flower gives every thread a connection to its database, and almost every call writes to it. With a dozen sites on a busy
machine, a call may wait longer for SQLite's lock than the 5 seconds that Flower allows. It then fails with "database is
locked", and a message is lost. Here each database object has one connection, for which the threads queue.
"""

from __future__ import annotations

import sys
from typing import Any

from alembic.config import Config
from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.alembic import utils
from sqlalchemy import Engine, QueuePool

_LOCK_SECONDS = 120
"""The longest time that a call waits for the connection, and then for SQLite's lock."""

_flower_config = utils.build_alembic_config
_flower_initialize = SqlMixin.initialize


def build_alembic_config(engine: Engine) -> Config:
    """Make Flower's configuration of Alembic, with migration folders that may contain spaces."""
    config = _flower_config(engine)
    folders = [utils.ALEMBIC_DIR / "versions", *utils._version_locations]
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(str(folder).replace("%", "%%") for folder in folders))
    return config


def initialize_with_one_connection(state: SqlMixin, log_queries: bool = False, **options: Any) -> list[str]:
    """Call Flower's `initialize` with one connection per database object, unless the database is in memory."""
    if not state._is_in_memory_sqlite:
        options |= {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0, "pool_timeout": _LOCK_SECONDS}
    return _flower_initialize(state, log_queries, **options)


def main() -> None:
    from flwr.superlink.cli import flower_superlink

    waiting = ("busy_timeout", str(1000 * _LOCK_SECONDS))
    sql_mixin.SQLITE_PRAGMAS = (*SQLITE_PRAGMAS, waiting)  # type: ignore[attr-defined, assignment]
    SqlMixin.initialize = initialize_with_one_connection  # type: ignore[method-assign, assignment]
    utils.build_alembic_config = build_alembic_config
    sys.argv[0] = "flower-superlink"  # when Flower exits, it reads from this which program it is
    flower_superlink()


if __name__ == "__main__":
    main()
