"""`flower-superlink`, in environments whose path has a space too.

    python -m fedskew.flower.superlink --host 127.0.0.1 ...      # the options of flower-superlink

Flower 1.41 joins the folders of its database migrations with spaces, and Alembic splits them there again. In an
environment such as `/home/a b/.venv` no migration is found, the database gets no tables, and every call to the
SuperLink ends with "Internal server error". Here the folders are joined by line breaks, which Alembic is told.
"""

from __future__ import annotations

import sys

from alembic.config import Config
from flwr.supercore.state.alembic import utils
from sqlalchemy import Engine

_flower_config = utils.build_alembic_config


def build_alembic_config(engine: Engine) -> Config:
    """Flower's configuration of Alembic, with migration folders that may contain spaces."""
    config = _flower_config(engine)
    folders = [utils.ALEMBIC_DIR / "versions", *utils._version_locations]
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(str(folder).replace("%", "%%") for folder in folders))
    return config


def main() -> None:
    from flwr.superlink.cli import flower_superlink

    utils.build_alembic_config = build_alembic_config
    sys.argv[0] = "flower-superlink"  # Flower looks at its own name when it ends
    flower_superlink()


if __name__ == "__main__":
    main()
