"""The commands put together."""

from __future__ import annotations

from typing import Annotated

import typer

from fedskew import __version__
from fedskew.cli import (
    bench,
    compare,
    datasets,
    demo,
    diagnose,
    export,
    federate,
    figures,
    live,
    methods,
    models,
    partition,
    partitions,
    report,
    reproduce,
    results,
    run,
    sweep,
)
from fedskew.cli.groups import Commands

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with:\n\nfedskew demo",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedskew {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _fedskew(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback has done the work
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning when clients' labels are skewed."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _module in (
    demo,
    run,
    compare,
    partition,
    methods,
    models,
    datasets,
    partitions,
    bench,
    sweep,
    reproduce,
    results,
    export,
    federate,
    report,
    diagnose,
    figures,
    live,
):
    _module.add_to(app)
