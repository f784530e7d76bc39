"""`fedskew reproduce`: cells of the papers' tables, rerun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.campaigns import (
    NoFolders,
    TimeLimit,
    Workers,
    absolute,
    conclude,
    positive,
    run_campaign,
    whole,
)
from fedskew.cli.flags import CONFIGURATION, DATA, MACHINE, TRAINING, Json, Quiet
from fedskew.cli.run import examples
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.lab.papers.selection import Selection
    from fedskew.lab.sweep.campaign import Campaign

EXAMPLES = ("fedskew reproduce --list", "fedskew reproduce fedlmd/table3 --list")
RESULTS = "results"


def add_to(app: typer.Typer) -> None:
    app.command("reproduce", epilog=examples(EXAMPLES))(_command)


def _option(flag: str, metavar: str, help: str, panel: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


_Tables = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PAPER/TABLE]...",
        help="such as fedlmd/table3; a paper alone: all of its tables",
        show_default=False,
    ),
]
_Show = Annotated[
    bool, typer.Option("--list", help="show tables, one table's cells, or a plan, and what they would cost here")
]
_Dataset = Annotated[str | None, _option("--dataset", "A,B", "only these", DATA)]
_Split = Annotated[str | None, _option("--split", "RULE:X,...", "only these, such as dirichlet:0.05", DATA)]
_Condition = Annotated[str | None, _option("--condition", "NAME=X,...", "only these, such as rounds=40", DATA)]
_DataDir = Annotated[str | None, _option("--data-dir", "FOLDER", "folder with the publishers' files", DATA)]
_Methods = Annotated[str | None, _option("--methods", "A,B", "only these", TRAINING)]
_Variant = Annotated[str | None, _option("--variant", "NAME", "a deviation from the protocol (--list)", TRAINING)]
_Seeds = Annotated[str | None, _option("--seeds", "N", "runs of each cell (default: 1)", TRAINING)]
_Rounds = Annotated[str | None, _option("--rounds", "N", "fewer than the paper's; the result says so", TRAINING)]
_Device = Annotated[str | None, _option("--device", "NAME", "auto, cpu, cuda or cuda:N (default: auto)", MACHINE)]
_Precision = Annotated[str | None, _option("--precision", "NAME", "such as bf16 (default: float32)", MACHINE)]
_Settings = Annotated[
    list[str] | None, _option("--set", "KEY=VALUE", "any key, over the protocol; repeatable", CONFIGURATION)
]
_Plan = Annotated[
    str | None, _option("--plan", "FILE", "YAML with several selections, run as one in that order", CONFIGURATION)
]
_Results = Annotated[
    str,
    typer.Option(
        "--results", metavar="FOLDER", help="where results are kept and looked for", rich_help_panel=CONFIGURATION
    ),
]
_Out = Annotated[
    str,
    typer.Option("--out", metavar="FOLDER", help="the folder of the runs' folders", rich_help_panel=CONFIGURATION),
]


def _command(
    tables: _Tables = None,
    show: _Show = False,
    dataset: _Dataset = None,
    split: _Split = None,
    condition: _Condition = None,
    methods: _Methods = None,
    variant: _Variant = None,
    plan: _Plan = None,
    seeds: _Seeds = None,
    rounds: _Rounds = None,
    settings: _Settings = None,
    data_dir: _DataDir = None,
    device: _Device = None,
    precision: _Precision = None,
    workers: Workers = None,
    time_limit: TimeLimit = None,
    no_folders: NoFolders = False,
    results: _Results = RESULTS,
    out: _Out = "runs/reproduce",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rerun cells of the papers' tables and show paper and rerun side by side. Finished cells are not run again."""
    from fedskew.experiment.config import assigned
    from fedskew.experiment.storage.about import command
    from fedskew.lab.papers.cells import Choice
    from fedskew.lab.papers.selection import Selection, jobs_of
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.records_file import RecordsFile, read_folder

    said = {"rounds": rounds, "data_dir": absolute(data_dir), "device": device, "precision": precision}
    values = assigned(settings or ()) | {key: value for key, value in said.items() if value is not None}
    choice = Choice(_listed(dataset), _listed(split), _listed(condition), _listed(methods), variant, values)
    selections = _selections(plan, Selection(tuple(tables or ()), choice, whole("seeds", seeds) or 1))
    if show:
        _show(selections, plan is not None, device or "auto", as_json)
        return
    if not selections[0].tables:
        raise UserError("no table; expected one such as fedlmd/table3: fedskew reproduce --list shows them all")
    jobs = jobs_of(selections)
    _say_what_is_missing(selections)
    campaign = Campaign(
        lambda job: RecordsFile(Path(results) / f"{job.label.partition('/')[0]}.jsonl"),
        read_folder(results),
        Path(out),
        not no_folders,
        whole("workers", workers),
        positive("time_limit", time_limit),
        command(),
    )
    run_campaign(campaign, jobs, as_json or quiet)
    _report(selections, campaign, as_json)
    conclude(campaign)


def _selections(plan: str | None, said: Selection) -> list[Selection]:
    """The plan's entries, or what was said on the command line instead of a plan."""
    from fedskew.lab.papers.cells import Choice
    from fedskew.lab.papers.selection import Selection, read_plan

    if plan is None:
        return [said]
    only_values = Selection((), Choice(values=said.choice.values))
    if said != only_values:
        raise UserError(f"--plan with a choice beside it; expected tables, cells and seeds in {plan} alone")
    return read_plan(plan, said.choice.values)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _say_what_is_missing(selections: Sequence[Selection]) -> None:
    from fedskew.cli.terminal import notice

    missing = {method for selection in selections for method in selection.missing()}
    if missing:
        notice(f"left out, not in this version: {', '.join(sorted(missing))}")


def _report(selections: Sequence[Selection], campaign: Campaign, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.papers.rerun import columns, order, rerun
    from fedskew.lab.papers.tables import json_of, rich_table

    reruns = [rerun(cell, range(s.seeds), campaign.known, s.choice) for s in selections for cell in s.cells()]
    if as_json:
        print_json([json_of(one) for one in reruns])
        return
    console = stdout()
    for selection in selections:
        if changed := selection.changed:
            console.print(f"not the paper's: {changed}", markup=False, soft_wrap=True)
    for column in columns(reruns).values():
        console.print(rich_table(column))
        if said := order(column):
            console.print(f"order: {said}", markup=False, soft_wrap=True)


def _show(selections: Sequence[Selection], is_plan: bool, device: str, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.papers.cells import chosen, table_cells
    from fedskew.lab.papers.listing import listed_cells, listed_plan, listed_tables
    from fedskew.lab.papers.selection import all_tables, table_names

    if is_plan:
        lines = listed_plan(selections, device)
    else:
        tables, choice = selections[0].tables, selections[0].choice
        names = table_names(tables) or all_tables()
        cells = chosen([cell for name in names for cell in table_cells(*name)], choice)
        lines = (listed_cells if len(tables) == 1 and "/" in tables[0] else listed_tables)(cells, choice, device)
    if as_json:
        print_json([line.to_json() for line in lines])
        return
    console = stdout()
    for line in lines:
        console.print(str(line), markup=False, soft_wrap=True)
