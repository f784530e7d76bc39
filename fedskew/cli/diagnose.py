"""`fedskew diagnose`: measure a federation's skew and suggest a method, before any training."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import CONFIGURATION, FLAGS, SPLIT, Json, Settings, add_command, option, takes_settings
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.data.label_counts import LabelCounts
    from fedskew.experiment.config import Config
    from fedskew.lab.diagnosis.diagnosis import Diagnosis
    from fedskew.report.charts.table import Table

MAX_ROWS = 12
"""The maximum number of rows of a table in the terminal. The HTML page and --json have all of them."""
HIDDEN_COLUMNS = ("sends", "numbers from", "source", "paper")
"""Columns that a terminal has no room for."""
_FLAGS = (*SPLIT, "clients_per_round")
_FOR_SEVERAL_LABELS = "fedavg,fedavgm,fedprox,scaffold"
"""Methods to compare if a sample may have several labels."""


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "diagnose", _command,
        "fedskew diagnose --data digits --partition dirichlet --beta 0.05 --clients 10",
        "fedskew diagnose --partition shards --save start.yaml -o diagnosis.html",
    )  # fmt: skip


@takes_settings(_FLAGS)
def _command(
    settings: Settings,
    counts: Annotated[
        str | None,
        typer.Argument(metavar="COUNTS", help="CSV file with a row per client and a column per class, or a folder with "
                       "one histogram per client (default: the split that the options describe)", show_default=False),
    ] = None,
    results: Annotated[
        str | None,
        option("--results", "FOLDER", "also use your records of `reproduce` or `sweep` in this folder",
               CONFIGURATION),
    ] = None,
    save: Annotated[
        str | None,
        option("--save", "FILE", "write a .yaml configuration to start from, and COUNTS beside it as .csv",
               CONFIGURATION),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="write an .html page",
                                 rich_help_panel=CONFIGURATION, show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure a federation's label skew, find similar settings that fedskew reran, and show what helped there."""
    from fedskew.cli.terminal import notice, print_json
    from fedskew.lab.diagnosis.diagnosis import Diagnosis
    from fedskew.lab.diagnosis.start import save_start, start_path
    from fedskew.report.writing import page_path

    if counts is not None:
        _require_one_split(settings, counts)
    page = None if out is None else page_path(out)
    target = None if save is None else start_path(save)
    label_counts, config = _label_counts(settings, counts)
    diagnosis = Diagnosis.from_counts(label_counts, results, settings.config().clients_per_round,
                                      config if counts is None else None)  # fmt: skip
    if page is not None:
        _write_page(page, diagnosis, counts, config)
    start = None if target is None else save_start(target, diagnosis.method, diagnosis.per_round, label_counts, config,
                                                   None if counts is None else Path(counts))  # fmt: skip
    command = _next_command(settings, counts, save, diagnosis)
    if as_json:
        print_json(diagnosis.to_json() | {"next": command})
    else:
        _print(diagnosis, command)
    if start is not None:
        stand_in = "; synthetic data stand in for yours" if config is None else ""
        written = f"configuration written to {target} (data: {start.data}{stand_in})"
        notice(f"{written}; to run it: fedskew run -c {quote(str(target))}")
    if page is not None:
        notice(f"page written to {page}")


def _require_one_split(settings: Settings, counts: str) -> None:
    """Refuse options of another split beside a file of counts."""
    given = [key for key in settings.values if key.partition(".")[0] == "partition"]
    if given:
        raise UserError(f"the split is that of {counts}; expected no setting of {', '.join(given)} besides it")


def _next_command(settings: Settings, counts: str | None, save: str | None, diagnosis: Diagnosis) -> str:
    """Return the command that measures which method is best for this federation.

    If classes differ much in size, the command ranks by macro F1, because accuracy hides small classes. It also does so
    if a sample may have several labels, because accuracy is then high if labels are rare. A method and its
    parameters in `--set` are left out, because the command tries several methods.
    """
    from fedskew.lab.diagnosis.skew import UNEQUAL

    words = ["fedskew", diagnosis.command_that_measures]
    if save is not None:
        words += ["-c", save]
    else:
        words += ["-c", settings.file] if settings.file else []
        given = {key: value for key, value in settings.values.items() if key.partition(".")[0] != "method"}
        if counts is not None:
            stand_in = {} if settings.sets("data") else {"data": "synthetic", "data.classes": diagnosis.skew.classes}
            split: dict[str, object] = {"partition": "counts", "partition.path": counts}
            if settings.sets("partition"):  # a mapping replaces the whole split of the file, with its number of clients
                split = {"partition": {"rule": "counts", "path": counts}}
            given |= {**stand_in, **split}
        flags = {FLAGS[name].key: FLAGS[name].name for name in _FLAGS}
        for key, value in given.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            has_flag = key in flags and not isinstance(value, dict | None)
            words += [flags[key], text] if has_flag else ["--set", f"{key}={text}"]
    several_labels = diagnosis.counts.several_labels
    ranking = ["--rank-by", "macro-f1"] if several_labels or diagnosis.skew.class_ratio > UNEQUAL else []
    effort = ["--methods", _FOR_SEVERAL_LABELS, "--seeds", "3"] if several_labels else ["--budget", "5m"]
    return " ".join([*map(quote, words), *ranking, *effort])


def _label_counts(settings: Settings, counts: str | None) -> tuple[LabelCounts, Config | None]:
    """Return the label counts and the configuration, which is None if COUNTS are given without data."""
    from fedskew.data.label_counts import federation_counts, read_counts
    from fedskew.experiment.preparation import build_federation

    if counts is not None:
        return read_counts(counts), settings.config() if settings.sets("data") else None
    config = settings.config()
    return federation_counts(build_federation(config)), config


def _write_page(target: Path, diagnosis: Diagnosis, counts: str | None, given: Config | None) -> None:
    from fedskew.experiment.config import Config, with_values
    from fedskew.lab.diagnosis.diagnosis import diagnosis_document
    from fedskew.lab.diagnosis.start import starting_config, to_yaml
    from fedskew.report.page.render import page
    from fedskew.report.writing import write_text
    from fedskew.results.naming import split_name

    title = f"Diagnosis of {Path(counts).name if counts else split_name(given) if given else 'a federation'}"
    config = given if given is not None else with_values(Config(), {"data": "path/to/your/data"})
    start = starting_config(diagnosis.method, diagnosis.per_round, config, Path(counts) if counts else None)
    write_text(target, page(diagnosis_document(diagnosis, title, to_yaml(start))))


def _print(diagnosis: Diagnosis, command: str) -> None:
    from fedskew.cli.terminal import stdout
    from fedskew.report.partition_map import CountsMap

    console = stdout()
    for line in diagnosis.sentences():
        console.print(line, markup=False)
    counts = diagnosis.counts
    console.print(CountsMap(counts.counts, counts.clients, counts.classes))
    tables = [diagnosis.measures(), diagnosis.settings()]
    if diagnosis.candidates:
        tables.append(diagnosis.methods())
    if diagnosis.method != "fedavg":
        tables.append(diagnosis.evidence(diagnosis.method))
    refuted = diagnosis.printed_table(["refuted"])
    if refuted.rows:
        tables.append(refuted)
    for table in tables:
        console.print(_rich_table(table))
    if others := len(diagnosis.printed) - len(refuted.rows):
        console.print(f"Other gains printed in papers ({others}) were confirmed, were smaller in the rerun, or were "
                      "not rerun; -o FILE.html and --json list them.",
                      soft_wrap=True)  # fmt: skip
    nothing = "no suitable method in a similar setting" if diagnosis.near_reruns else "no similar setting"
    start = f"Start with {diagnosis.method}." if diagnosis.candidates else f"fedskew has rerun {nothing}."
    console.print(f"{start} To measure which method is best here: {command}", markup=False, soft_wrap=True)


def _rich_table(table: Table) -> object:
    from rich.table import Table as Rich
    from rich.text import Text

    hidden = len(table.rows) - MAX_ROWS
    shown = Rich(title=table.caption, title_justify="left", caption_justify="left",
                 caption=f"... and {hidden} more" if hidden > 0 else None)  # fmt: skip
    columns = [i for i, name in enumerate(table.columns) if name not in HIDDEN_COLUMNS]
    for i in columns:
        shown.add_column(table.columns[i], justify="right" if table.is_numeric(i) else "left", overflow="fold",
                         no_wrap=table.columns[i] in ("method", "from, to"))  # fmt: skip
    for row in table.rows[:MAX_ROWS]:
        shown.add_row(*(Text("" if row[i] is None else str(row[i])) for i in columns))
    return shown
