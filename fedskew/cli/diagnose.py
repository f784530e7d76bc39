"""`fedskew diagnose`: measure a federation's skew and suggest a method, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import CONFIGURATION, SPLIT, Json, Settings, add_command, option, takes_settings

if TYPE_CHECKING:
    from fedskew.experiment.config import Config
    from fedskew.lab.diagnosis.diagnosis import Diagnosis
    from fedskew.lab.diagnosis.label_counts import LabelCounts
    from fedskew.report.charts.table import Table

MOST_ROWS = 12
"""Rows of a table in the terminal; the page and --json have them all."""
LEFT_OUT = ("sends", "numbers from", "rerun here", "seeds rerun")
"""Columns that are too wide for a terminal."""


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "diagnose", _command,
        "fedskew diagnose --data digits --partition dirichlet --beta 0.05 --clients 10",
        "fedskew diagnose --partition shards --save start.yaml -o diagnosis.html",
    )  # fmt: skip


@takes_settings((*SPLIT, "clients_per_round"))
def _command(
    settings: Settings,
    counts: Annotated[
        str | None,
        typer.Argument(metavar="COUNTS", help="CSV file with a row per client and a column per class, or a folder with "
                       "one histogram per client (default: the split that the options describe)", show_default=False),
    ] = None,
    results: Annotated[
        str, typer.Option("--results", metavar="FOLDER", help="folder with the records of `reproduce`",
                          rich_help_panel=CONFIGURATION)
    ] = "results",
    save: Annotated[
        str | None, option("--save", "FILE", "write a .yaml configuration to start from", CONFIGURATION)
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="write an .html page",
                                 rich_help_panel=CONFIGURATION, show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure a federation's label skew, find the most similar published settings, and show what helped there."""
    from fedskew.cli.terminal import notice, print_json
    from fedskew.lab.diagnosis.diagnosis import Diagnosis
    from fedskew.report.writing import page_path

    page = None if out is None else page_path(out)
    table, given = _federation(settings, counts)
    found = Diagnosis.of(table, results, settings.config().clients_per_round)
    if page is not None:
        _write_page(page, found, counts, given)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if save is not None:
        from fedskew.lab.diagnosis.start import save_start

        save_start(Path(save), found.method, found.per_round, table, given, split=counts is None)
        notice(f"configuration written to {save}; to run it: fedskew run -c {save}")
    if page is not None:
        notice(f"page written to {page}")


def _federation(settings: Settings, counts: str | None) -> tuple[LabelCounts, Config | None]:
    """The label counts, and the configuration of the data if there is one."""
    from fedskew.experiment.preparation import build_federation
    from fedskew.lab.diagnosis.label_counts import federation_counts, read_counts

    if counts is not None:
        return read_counts(counts), settings.config() if "data" in settings.values else None
    config = settings.config()
    return federation_counts(build_federation(config)), config


def _write_page(target: Path, found: Diagnosis, counts: str | None, given: Config | None) -> None:
    from fedskew.experiment.config import Config, with_values
    from fedskew.lab.diagnosis.diagnosis import diagnosis_document
    from fedskew.lab.diagnosis.start import starting_config, to_yaml
    from fedskew.report.page.render import page
    from fedskew.report.writing import write_text
    from fedskew.results.naming import split_name

    title = f"Diagnosis of {Path(counts).name if counts else split_name(given) if given else 'a federation'}"
    config = given if given is not None else with_values(Config(), {"data": "path/to/your/data"})
    start = starting_config(found.method, found.per_round, config, Path(counts) if counts else None)
    write_text(target, page(diagnosis_document(found, title, to_yaml(start))))


def _show(found: Diagnosis) -> None:
    from fedskew.cli.terminal import stdout
    from fedskew.report.partition_map import CountsMap

    console = stdout()
    for line in found.words():
        console.print(line, markup=False)
    counts = found.counts
    console.print(CountsMap(counts.counts, counts.clients, counts.classes))
    tables = [found.measures(), found.settings()]
    if found.candidates:
        tables += [found.methods(), found.evidence(found.method)]
    for table in tables:
        console.print(_rich(table))
    console.print(f"Start with {found.method}. Add --save start.yaml for a configuration, or -o FILE.html for a "
                  "page with all numbers.", markup=False)  # fmt: skip


def _rich(table: Table) -> object:
    from rich.table import Table as Rich
    from rich.text import Text

    hidden = len(table.rows) - MOST_ROWS
    shown = Rich(title=table.caption, title_justify="left", caption_justify="left",
                 caption=f"... and {hidden} more" if hidden > 0 else None)  # fmt: skip
    columns = [i for i, name in enumerate(table.columns) if name not in LEFT_OUT]
    for i in columns:
        shown.add_column(table.columns[i], justify="right" if table.is_numeric(i) else "left", overflow="fold")
    for row in table.rows[:MOST_ROWS]:
        shown.add_row(*(Text("" if row[i] is None else str(row[i])) for i in columns))
    return shown
