"""The app with all commands, in the order of `fedskew --help`."""

from __future__ import annotations

from typing import Annotated

import typer

from fedskew import __version__
from fedskew.cli import (
    bench,
    catalogues,
    compare,
    demo,
    diagnose,
    export,
    federate,
    partition,
    report,
    reproduce,
    run,
    sweep,
)
from fedskew.cli.commands import EXAMPLES, Commands

__all__ = ["EXAMPLES", "app"]

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with:\n\nfedskew demo",
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"fedskew {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _fedskew(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning when clients' labels are skewed."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_PANELS = {
    "Experiments": (demo, run, compare, partition),
    "Results": (report, export),
    "Catalogues": (catalogues,),
    "Deployment": (federate,),
    "Lab": (sweep, reproduce, bench, diagnose),
}
for _panel, _modules in _PANELS.items():
    for _module in _modules:
        _module.add_to(app)
    for _command in app.registered_commands:
        _command.rich_help_panel = _command.rich_help_panel or _panel
    for _group in app.registered_groups:
        _group.rich_help_panel = _group.rich_help_panel or _panel
