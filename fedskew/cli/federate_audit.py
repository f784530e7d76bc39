"""`fedskew federate audit`: check and show the audit logs of sites and servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.commands import Commands, Json, add_command, option
from fedskew.errors import UserError

_Log = Annotated[
    str, typer.Argument(metavar="PATH", help="a run's folder, a site's folder or site.yaml, or the log's file")
]


def add_to(group: typer.Typer, with_flower: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    audit = typer.Typer(cls=Commands, help="Check and show the audit logs of sites and servers.", no_args_is_help=True)
    add_command(
        audit, "verify", with_flower(_verify),
        "fedskew federate audit verify runs/first",
        "fedskew federate audit verify site.yaml",
        group="federate audit",
    )  # fmt: skip
    add_command(
        audit, "show", with_flower(_show),
        "fedskew federate audit show runs/first",
        "fedskew federate audit show site.yaml --json",
        group="federate audit",
    )  # fmt: skip
    group.add_typer(audit, name="audit")


def _verify(
    path: _Log,
    contains: Annotated[
        str | None, option("--contains", "HASH", "also check that the log has the entry with this hash")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that no entry of a log was changed, removed or moved.

    If there is a sign of such a change, name it and end with status 2.
    """
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.flower.audit import find_log
    from fedskew.flower.chained_log import read_chain

    log = find_log(Path(path))
    chain = read_chain(log)
    if chain.problem is not None:
        raise UserError(f"{log}: {chain.problem}")
    if contains is not None and contains not in [entry["hash"] for entry in chain.entries]:
        raise UserError(f"{log} has no entry with the hash {contains!r}; expected one that `verify` printed earlier")
    if as_json:
        print_json({"log": str(log), "entries": len(chain.entries), "repaired": chain.repairs, "head": chain.head})
        return
    entries = f"{len(chain.entries)} entr{'y' if len(chain.entries) == 1 else 'ies'}"
    repaired = f"; killed processes left incomplete lines ({chain.repairs}), which is harmless" if chain.repairs else ""
    line = f"{log} is intact: {entries}{repaired}; last hash {chain.head}"
    stdout().print(line, soft_wrap=True, markup=False)


def _show(path: _Log, as_json: Json = False) -> None:
    """Show the entries of a log, one per line. If a line breaks the chain, the log is shown up to that line."""
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.flower.audit import describe_entry, find_log
    from fedskew.flower.chained_log import read_chain

    log = find_log(Path(path))
    chain = read_chain(log)
    if as_json:
        print_json({"log": str(log), "entries": list(chain.entries), "problem": chain.problem})
        return
    for entry in chain.entries:
        stdout().print(describe_entry(entry), soft_wrap=True, markup=False)
    if chain.problem is not None:
        left_out = "; the entries from there on are not shown" if chain.is_cut else ""
        notice(f"warning: {chain.problem}{left_out}")
