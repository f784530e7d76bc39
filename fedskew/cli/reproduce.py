"""`fedskew reproduce` and `results`: rerun cells of the papers' tables, and write a page of all reruns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import (
    CONFIGURATION,
    DATA,
    TRAINING,
    Json,
    NoFolders,
    Quiet,
    Settings,
    TimeLimit,
    Workers,
    add_command,
    option,
    split_names,
    takes_settings,
)
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.lab.papers.selection import Selection
    from fedskew.lab.sweep.campaign import Campaign

RESULTS = "results"


def add_to(app: typer.Typer) -> None:
    add_command(
        app, "reproduce", _reproduce, "fedskew reproduce --list", "fedskew reproduce fedlmd/table3 --list"
    )  # fmt: skip
    add_command(app, "results", _results, "fedskew results --results results --out RESULTS.md")


@takes_settings(
    ("data_dir", "rounds", "device", "precision"),
    help={"rounds": "run fewer rounds than the paper; the results say so"},
    config_file=False,
)
def _reproduce(
    settings: Settings,
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PAPER/TABLE]...", show_default=False,
                       help="a table such as fedlmd/table3, or a paper for all of its tables"),
    ] = None,
    show: Annotated[
        bool,
        typer.Option("--list", help="list tables, a table's cells or a plan, with the estimated cost on this machine"),
    ] = False,
    dataset: Annotated[str | None, option("--dataset", "A,B", "only these datasets", DATA)] = None,
    split: Annotated[
        str | None, option("--split", "RULE:X,...", "only these splits, such as dirichlet:0.05", DATA)
    ] = None,
    condition: Annotated[
        str | None, option("--condition", "NAME=X,...", "only these conditions, such as rounds=40", DATA)
    ] = None,
    methods: Annotated[str | None, option("--methods", "A,B", "only these methods", TRAINING)] = None,
    variant: Annotated[
        str | None,
        option("--variant", "NAME",
               "a named deviation from the paper's protocol; `fedskew reproduce PAPER --list` lists them", TRAINING),
    ] = None,
    plan: Annotated[
        str | None,
        option("--plan", "FILE", "YAML file with several selections, which start in the order of the file",
               CONFIGURATION),
    ] = None,
    seeds: Annotated[str | None, option("--seeds", "N", "runs per cell (default: 1)", TRAINING)] = None,
    workers: Workers = None,
    time_limit: TimeLimit = None,
    no_folders: NoFolders = False,
    results: Annotated[
        str,
        typer.Option("--results", metavar="FOLDER", help="folder with the records of all reruns",
                     rich_help_panel=CONFIGURATION),
    ] = RESULTS,
    out: Annotated[
        str,
        typer.Option("--out", metavar="FOLDER", help="parent of the run folders", rich_help_panel=CONFIGURATION),
    ] = "runs/reproduce",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Rerun cells of the papers' tables and show paper and rerun side by side. Finished cells are not repeated."""
    from fedskew.cli.campaigns import conclude, job_values, parse_count, parse_seconds, run_campaign
    from fedskew.experiment.storage.about import command
    from fedskew.lab.papers.cells import CellChoice
    from fedskew.lab.papers.selection import Selection, plan_jobs
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.records import RecordsFile, read_folder

    datasets, splits, conditions, chosen = (tuple(split_names(text)) for text in (dataset, split, condition, methods))
    choice = CellChoice(datasets, splits, conditions, chosen, variant, job_values(settings))
    selections = _selections(plan, Selection(tuple(tables or ()), choice, parse_count("seeds", seeds) or 1))
    if show:
        _list(selections, plan is not None, settings.values.get("device", "auto"), as_json)
        return
    if not selections[0].tables:
        raise UserError("no table given; expected one such as fedlmd/table3; `fedskew reproduce --list` lists them")
    jobs = plan_jobs(selections)
    _note_missing_methods(selections)
    campaign = Campaign(
        lambda job: RecordsFile(Path(results) / f"{job.label.partition('/')[0]}.jsonl"),
        read_folder(results),
        Path(out),
        not no_folders,
        parse_count("workers", workers),
        parse_seconds("time_limit", time_limit),
        command(),
    )
    with closing(campaign):
        run_campaign(campaign, jobs, as_json or quiet)
    _report(selections, campaign, as_json)
    conclude(campaign)


def _selections(plan: str | None, given: Selection) -> list[Selection]:
    """Read the selections of the plan. Without a plan, use `given`, the selection on the command line."""
    from fedskew.lab.papers.cells import CellChoice
    from fedskew.lab.papers.selection import Selection, read_plan

    if plan is None:
        return [given]
    only_values = Selection((), CellChoice(values=given.choice.values))
    if given != only_values:
        raise UserError(f"a selection was given besides --plan; expected tables, cells and seeds only in {plan}")
    return read_plan(plan, given.choice.values)


def _note_missing_methods(selections: Sequence[Selection]) -> None:
    from fedskew.cli.terminal import notice

    missing = {method for selection in selections for method in selection.missing()}
    if missing:
        notice(f"skipped methods that this version does not have: {', '.join(sorted(missing))}")


def _report(selections: Sequence[Selection], campaign: Campaign, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.papers.rerun import collect_rerun, columns, compare_order, rerun_json, rich_table

    reruns = [
        collect_rerun(cell, range(selection.seeds), campaign.known, selection.choice)
        for selection in selections
        for cell in selection.cells()
    ]
    if as_json:
        print_json([rerun_json(rerun) for rerun in reruns])
        return
    console = stdout()
    for selection in selections:
        if changed := selection.changed:
            console.print(f"changed from the paper: {changed}", markup=False, soft_wrap=True)
    for column in columns(reruns).values():
        console.print(rich_table(column))
        if ranking := compare_order(column):
            console.print(f"order: {ranking}", markup=False, soft_wrap=True)


def _list(selections: Sequence[Selection], is_plan: bool, device: str, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.papers.cells import select_cells, table_cells
    from fedskew.lab.papers.listing import list_cells, list_plan, list_tables
    from fedskew.lab.papers.selection import all_tables, table_names

    if is_plan:
        lines = list_plan(selections, device)
    else:
        tables, choice = selections[0].tables, selections[0].choice
        names = table_names(tables) or all_tables()
        cells = select_cells([cell for name in names for cell in table_cells(*name)], choice)
        lines = (list_cells if len(tables) == 1 and "/" in tables[0] else list_tables)(cells, choice, device)
    if as_json:
        print_json([line.to_json() for line in lines])
        return
    console = stdout()
    for line in lines:
        console.print(str(line), markup=False, soft_wrap=True)


def _results(
    results: Annotated[
        str, typer.Option("--results", metavar="FOLDER", help="folder with the records of `reproduce`")
    ] = RESULTS,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Markdown file to write")] = "RESULTS.md",
) -> None:
    """Write a page that shows paper and rerun side by side, table by table, from the records of all reruns.

    The pictures of the page are written to the folder of the records.
    """
    from fedskew.cli.terminal import stdout
    from fedskew.experiment.storage.files import reporting_os_errors
    from fedskew.lab.papers.map import draw_maps
    from fedskew.lab.papers.pretrained import draw_pretrained
    from fedskew.lab.papers.results_page import results_page

    if not any(Path(results).rglob("*.jsonl")):
        raise UserError(f"no records in {results!r}; expected PAPER.jsonl files, as `fedskew reproduce` writes them")
    page = results_page(results)
    with reporting_os_errors("write", Path(out)):
        Path(out).write_text(page, encoding="utf-8")
    for path in (out, *draw_maps(results), *draw_pretrained(results)):
        stdout().print(f"{path} written", markup=False, soft_wrap=True)
