"""`fedskew federate survey` and `evaluate` ask all sites without training, and `compare` tests a model at one site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedskew.cli.commands import Json, option

_App = Annotated[str, typer.Argument(metavar="APP", help="folder of the federation's app")]
_Connection = Annotated[
    str | None,
    option("--connection", "NAME", "the SuperLink's name in Flower's config.toml (default: Flower's default)"),
]


def survey(app: _App, connection: _Connection = None, as_json: Json = False) -> None:
    """Ask the sites for label counts and ranges of columns before any training.

    The app must declare the survey (`federation.survey`), and each site's policy decides whether and how it answers.
    Run this command on the server.
    """
    from fedskew.cli.terminal import notice, print_json
    from fedskew.flower.remote_survey import COUNTS, SURVEY

    folder = _ask(app, "survey", connection, {})
    found = json.loads((folder / SURVEY).read_text(encoding="utf-8"))
    if as_json:
        print_json(found)
        return
    show_survey(found)
    notice(f"all answers: {folder / SURVEY}; to measure the skew: fedskew diagnose {folder / COUNTS}")


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="folder of an exported model, or its weights")],
    app: _App,
    connection: _Connection = None,
    as_json: Json = False,
) -> None:
    """Test a finished model on every site's own data: accuracy, AUROC and calibration.

    The app must declare the test (`federation.evaluate_only`), and each site's policy decides whether it takes part
    and whether its own results are listed. Run this command on the server.
    """
    from fedskew.cli.terminal import notice, print_json
    from fedskew.flower.remote_scoring import EVALUATION, weights_file

    folder = _ask(app, "evaluate", connection, {"federation.tested_model": str(weights_file(model))})
    found = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
    if as_json:
        print_json(found)
        return
    show_evaluation(found)
    notice(f"all results: {folder / EVALUATION}")


def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="folder of an exported model, or its weights")],
    app: _App,
    file: Annotated[str, typer.Argument(metavar="SITE.yaml", help="the site's configuration")],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="write the comparison to this .md file", show_default=False),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="the weights that the federation's model started from, if the app has init; the local model starts "
            "from them, too",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """On a site's held-out samples, compare a finished model with one that the site trains alone.

    Run this command at the site. Nothing leaves the site.
    """
    from dataclasses import asdict

    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.errors import UserError
    from fedskew.experiment.storage.files import write_file
    from fedskew.flower.local_comparison import compare_with_local, write_page
    from fedskew.flower.site_config import load_site

    if out is not None and not out.endswith(".md"):
        raise UserError(f"--out is {out!r}; expected a file that ends in .md")
    found = compare_with_local(model, app, load_site(file), init)
    if out is not None:
        write_file(Path(out), write_page(found))
        notice(f"page written to {out}")
    if found.caveat and (as_json or out is not None):
        notice(f"warning: {found.caveat}")
    if as_json:
        print_json(asdict(found) | {"verdict": found.verdict})
    else:
        stdout().print(found.verdict if out is not None else write_page(found), soft_wrap=True, markup=False)


def _ask(app: str, purpose: str, connection: str | None, changed: dict[str, str]) -> Path:
    """Start the run on the SuperLink, wait for its end, and return the folder of the answers.

    `changed` has settings that replace those of the app in this run.
    """
    from fedskew.cli.terminal import notice
    from fedskew.flower.inquiry import inquiry_folder, require_declared_purpose
    from fedskew.flower.planning import read_app
    from fedskew.flower.supervised_run import FlowerRun, Progress, run_to_end
    from fedskew.platforms import require_posix

    require_posix(f"fedskew federate {purpose}")
    settings = read_app(app)[0]
    require_declared_purpose(settings, purpose)
    run_folder = Path(settings.folder).expanduser().resolve()
    folder = inquiry_folder(run_folder, purpose)
    log = folder.with_name(f"{folder.name}.log")
    notice(f"the answers will be in {folder}; the whole log is {log}")
    # The path is absolute, because the ServerApp may run in another folder.
    changed = {"federation.purpose": purpose, "federation.folder": str(run_folder), **changed}
    run = FlowerRun(Path(app), connection, log, {}, changed)
    run_to_end(run.start, Progress, notice)
    return folder


def show_survey(found: dict[str, Any]) -> None:
    """Show the label counts by site, the ranges of each column, and which sites are missing and why."""
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("site", *found["classes"]):
        table.add_column(Text(heading), justify="left" if heading == "site" else "right")
    for name, answer in found["sites"].items():
        table.add_row(Text(name), *(str(count) for count in answer["label_counts"]))
    stdout().print(table)
    for name, answer in found["sites"].items():
        for column in answer["columns"]:
            stdout().print(f"{name}, {describe_column(column)}", soft_wrap=True, markup=False, highlight=False)
    for name, reason in found["declined"].items():
        stdout().print(f"{name} gave no usable answer: {reason}", soft_wrap=True, markup=False, highlight=False)
    if found["absent"]:
        absent = ", ".join(found["absent"])
        stdout().print(f"not connected, so not asked: {absent}", soft_wrap=True, markup=False, highlight=False)


def describe_column(column: dict[str, Any]) -> str:
    """Describe a column of a survey in words."""
    missing = f"{100 * column['missing']:.0f} % missing"
    if column["kind"] == "category":
        return f"{column['name']}: {', '.join(column['values']) or 'no frequent value'}; {missing}"
    if column["low"] is None:
        return f"{column['name']}: too few values; {missing}"
    return f"{column['name']}: {column['low']:g} to {column['high']:g}, median {column['median']:g}; {missing}"


def show_evaluation(found: dict[str, Any]) -> None:
    """Show the results of all sites together, and of each site whose own results are listed."""
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "samples", "accuracy", "AUROC", "95 % interval", "Brier", "calibration error"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, scores in [*found["by_site"].items(), ("all", found["total"])]:
        low, high = scores["auroc_low"], scores["auroc_high"]
        interval = "–" if low is None else f"{low:.3f}–{high:.3f}"
        numbers = (_number(scores[key]) for key in ("accuracy", "auroc"))
        rest = (_number(scores[key]) for key in ("brier", "calibration_error"))
        table.add_row(Text(name), str(scores["samples"]), *numbers, interval, *rest)
    stdout().print(table)
    unlisted = [name for name in found["tested_by"] if name not in found["by_site"]]
    for text, names in (("in the total only", unlisted), ("without a usable answer", found["without_answer"])):
        if names:
            stdout().print(f"{text}: {', '.join(names)}", soft_wrap=True, markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
