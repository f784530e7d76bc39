"""`fedskew reproduce`: cells of the papers' tables, rerun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.campaigns import NoFolders, TimeLimit, Workers, conclude, positive, run_campaign, whole
from fedskew.cli.flags import CONFIGURATION, DATA, MACHINE, TRAINING, Json, Quiet
from fedskew.cli.run import examples
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.papers.cells import Cell, Choice
    from fedskew.sweep.campaign import Campaign
    from fedskew.sweep.job import Job

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
_Show = Annotated[bool, typer.Option("--list", help="show tables, or one table's cells, and what they would cost here")]
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
    from fedskew.experiment.about import command
    from fedskew.experiment.config import assigned
    from fedskew.papers.cells import Choice
    from fedskew.sweep.campaign import Campaign
    from fedskew.sweep.records_file import RecordsFile, read_folder

    said = {"rounds": rounds, "data_dir": _absolute(data_dir), "device": device, "precision": precision}
    values = assigned(settings or ()) | {key: value for key, value in said.items() if value is not None}
    only = [_listed(text) for text in (dataset, split, condition, methods)]
    choice = Choice(only[0], only[1], only[2], only[3], variant, values)
    if show:
        _show(tables or [], choice, device or "auto", as_json)
        return
    wanted = _cells(tables or [], choice)
    numbers = range(whole("seeds", seeds) or 1)
    able = _able(wanted)
    jobs = _jobs(able, numbers, choice)
    papers = list(dict.fromkeys(cell.paper for cell in able))
    name = papers[0] if len(papers) == 1 else "several-papers"
    campaign = Campaign(
        RecordsFile(Path(results) / f"{name}.jsonl"), read_folder(results), Path(out), not no_folders,
        whole("workers", workers), positive("time_limit", time_limit), command(),
    )  # fmt: skip
    run_campaign(campaign, jobs, as_json or quiet)
    _report(able, numbers, campaign, choice, as_json)
    conclude(campaign)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _names(tables: Sequence[str]) -> list[tuple[str, str]]:
    """(paper, table) pairs; a paper alone stands for all of its tables."""
    from fedskew.papers.protocol import papers, protocol

    found = []
    for name in tables or papers():
        paper, slash, table = name.partition("/")
        known = protocol(paper).tables
        found += [(paper, table)] if slash else [(paper, each) for each in known]
    return found


def _cells(tables: Sequence[str], choice: Choice) -> list[Cell]:
    from fedskew.papers.cells import chosen, table_cells

    if not tables:
        raise UserError("no table; expected one such as fedlmd/table3: fedskew reproduce --list shows them all")
    cells = [cell for paper, table in _names(tables) for cell in table_cells(paper, table)]
    return chosen(cells, choice)


def _able(cells: Sequence[Cell]) -> list[Cell]:
    """Without those of methods that this version does not have, which are named."""
    from fedskew.cli.terminal import notice
    from fedskew.papers.cells import missing_method

    missing = {cell.method for cell in cells if missing_method(cell)}
    if missing:
        notice(f"left out, not in this version: {', '.join(sorted(missing))}")
    return [cell for cell in cells if cell.method not in missing]


def _jobs(cells: Sequence[Cell], seeds: Iterable[int], choice: Choice) -> list[Job]:
    """Each run once, all of the first seed first."""
    from fedskew.papers.cells import job

    jobs = [job(cell, seed, choice) for seed in seeds for cell in cells]
    return list({one.identity: one for one in jobs}.values())


def _report(cells: Sequence[Cell], seeds: Iterable[int], campaign: Campaign, choice: Choice, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.papers.rerun import columns, order, rerun
    from fedskew.papers.tables import json_of, rich_table

    found = columns([rerun(cell, seeds, campaign.known, choice) for cell in cells])
    if as_json:
        print_json([json_of(one) for column in found.values() for one in column])
        return
    console = stdout()
    for column in found.values():
        console.print(rich_table(column))
        if said := order(column):
            console.print(f"order: {said}", markup=False)
    console.print(f"results kept in {campaign.kept.path}", markup=False, soft_wrap=True)


def _show(tables: Sequence[str], choice: Choice, device: str, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.papers.listing import listed_cells, listed_tables

    one = len(tables) == 1 and "/" in tables[0]
    lines = (
        listed_cells(_cells(tables, choice), choice, device) if one else listed_tables(_names(tables), choice, device)
    )
    if as_json:
        print_json([line.to_json() for line in lines])
        return
    console = stdout()
    for line in lines:
        console.print(str(line), markup=False, soft_wrap=True)
