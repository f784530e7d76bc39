"""Sites with node keys, for tests of secure aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from in_process import Case, case

from fedskew.data import Federation
from fedskew.experiment.config import Config
from fedskew.flower.credentials import Credentials, make_credentials
from fedskew.flower.secure.identity import NodeIdentity, read_roster


@cache
def credentials(names: tuple[str, ...]) -> Credentials:
    """Keys that all tests share."""
    return make_credentials(Path(mkdtemp(prefix="fedskew-keys-")), names)


def roster(names: Sequence[str]) -> dict[str, str]:
    return read_roster(credentials(tuple(names)).folder / "sites", names)


def identity(names: Sequence[str], name: str) -> NodeIdentity:
    return NodeIdentity(credentials(tuple(names)).node(name).private)


def secure_case(
    folder: Path, federation: Federation, data: Path, config: Config, site: dict[str, Any] | None = None, **own: Any
) -> Case:
    """As `case`, with secure aggregation."""
    names = [f"site-{client}" for client in range(federation.clients)]
    here = case(folder, federation, data, config, site=site, secure_aggregation=True, node_keys=roster(names), **own)
    for name, found in here.grid._sites.values():
        found.config = replace(found.config, keys=str(credentials(tuple(names)).node(name).folder))
    return here
