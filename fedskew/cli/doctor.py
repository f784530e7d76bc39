"""`fedskew doctor`: check the installation, for the user and for bug reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.commands import Json, add_command, option

if TYPE_CHECKING:
    from fedskew.doctor import Report

_BROKEN = 1
"""Exit status if something needed is broken."""


def add_to(app: typer.Typer) -> None:
    add_command(app, "doctor", _doctor, "fedskew doctor", "fedskew doctor --json", "fedskew doctor --port 9093")


def _doctor(
    data_dir: Annotated[str | None, option("--data-dir", "FOLDER", "also search this folder for datasets")] = None,
    keys: Annotated[
        str | None, option("--keys", "DIR", "check the certificates and keys of `federate certs` in this folder")
    ] = None,
    port: Annotated[
        list[int] | None,
        option(
            "--port",
            "N",
            "check that a federation's server can use this port; repeatable (default: 9092 and 9093; if one of them is "
            "in use, that is only noted)",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the installation: versions, devices, extras, data folders, ports and certificates.

    The exit status is 1 if something needed is broken. Put the output into bug reports.
    """  # fmt: skip
    from fedskew.cli.terminal import print_json
    from fedskew.doctor import examine, is_healthy

    report = examine(data_dir, keys, port or ())
    if as_json:
        print_json(_to_json(report) | {"healthy": is_healthy(report)})
    else:
        _show(report)
    if not is_healthy(report):
        raise typer.Exit(_BROKEN)


def _to_json(report: Report) -> dict[str, Any]:
    return {
        section: {check.name: {"status": check.status, "detail": check.detail} for check in checks}
        for section, checks in report.items()
    }


def _show(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    styles = {"ok": "green", "note": "dim", "broken": "bold red"}
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, checks in report.items():
        table.add_row(Text(section, style="bold"))
        for check in checks:
            style = styles[check.status]
            table.add_row(Text(f"  {check.name}"), Text(check.status, style=style), Text(check.detail))
    console = stdout()
    console.print(table)
    broken = [check.name for checks in report.values() for check in checks if check.status == "broken"]
    console.print(f"broken: {', '.join(broken)}" if broken else "everything needed works", style="bold")
