"""`fedskew federate status`: show the state of a run and its sites."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import Json

if TYPE_CHECKING:
    from fedskew.flower.run_status import RunStatus


def status(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="the run's folder on the server (federation.folder)")],
    as_json: Json = False,
) -> None:
    """Show the state of a run and its sites: when each site was last seen, which are late, and why attempts ended."""
    from dataclasses import asdict

    from fedskew.cli.terminal import notice, print_json
    from fedskew.flower.run_status import read_status

    now = datetime.now(UTC)
    found = read_status(Path(folder), now)
    if as_json:
        print_json(asdict(found))
        return
    _show(found, now)
    if found.damage is not None:
        notice(f"warning: the audit log is damaged, so the status may be incomplete: {found.damage}")


def _show(found: RunStatus, now: datetime) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout
    from fedskew.flower.run_status import describe_age

    reason = f": {found.reason}" if found.reason else ""
    line = f"{found.folder}: {found.status}{reason}; {found.round} round{'s' * (found.round != 1)} completed"
    stdout().print(line, soft_wrap=True, markup=False)
    if found.privacy is not None:
        whose = "one sample of a site" if found.privacy["kind"] == "example" else "a site"
        spent = f"ε = {found.privacy['epsilon']:.3g} at δ = {found.privacy['delta']:g}"
        line = f"{found.privacy['kind']} privacy so far: {spent} for {whose} that took part in every round"
        stdout().print(line, soft_wrap=True, markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("site", "state", "last seen", "last round", "updates", "missed", "reason"):
        table.add_column(heading, justify="left")
    for site in found.sites:
        seen = describe_age(site.last_seen, now)
        last = "–" if site.round is None else str(site.round)
        cells = (site.name, site.state, seen, last, str(site.updates), str(site.missed), site.reason)
        table.add_row(*map(Text, cells))
    stdout().print(table)
    for attempt in found.attempts[:-1]:
        age = describe_age(attempt.ended or attempt.began, now)
        reason = f": {attempt.reason}" if attempt.reason else ""
        stdout().print(f"earlier attempt, {age}: {attempt.status}{reason}", soft_wrap=True, markup=False)
