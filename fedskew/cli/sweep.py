"""`fedskew sweep`: every combination of some values."""

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
    in_percent,
    positive,
    run_campaign,
    whole,
)
from fedskew.cli.flags import CONFIGURATION, DATA, MACHINE, TRAINING, Json, Quiet
from fedskew.cli.run import examples
from fedskew.cli.sweep_search import TRIALS, searched
from fedskew.errors import unknown

if TYPE_CHECKING:
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.grid import Point
    from fedskew.lab.sweep.table import Line

EXAMPLES = ("fedskew sweep grid.yaml --workers 2 --rounds 2",)
RECORDS = "runs.jsonl"


def add_to(app: typer.Typer) -> None:
    app.command("sweep", epilog=examples(EXAMPLES))(_command)


def _option(flag: str, metavar: str, help: str, panel: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


_Grid = Annotated[
    str, typer.Argument(metavar="FILE.YAML", help="a configuration with `grid`, or with `search`, and `seeds`")
]
_Settings = Annotated[
    list[str] | None, _option("--set", "KEY=VALUE", "any key, instead of the file's; repeatable", CONFIGURATION)
]
_Rounds = Annotated[str | None, _option("--rounds", "N", "communication rounds", TRAINING)]
_Seeds = Annotated[str | None, _option("--seeds", "N", "instead of the file's", TRAINING)]
_Search = Annotated[
    str | None,
    _option("--search", "optuna", "search the file's `search` on a validation part of the training data", TRAINING),
]
_Trials = Annotated[str | None, _option("--trials", "N", "points that a search tries (default: 20)", TRAINING)]
_Out = Annotated[
    str | None, _option("--out", "FOLDER", "where runs and table are kept (default: runs/FILE)", CONFIGURATION)
]
_DataDir = Annotated[str | None, _option("--data-dir", "FOLDER", "folder with the publishers' files", DATA)]
_Device = Annotated[str | None, _option("--device", "NAME", "auto, cpu, cuda or cuda:N", MACHINE)]
_Precision = Annotated[str | None, _option("--precision", "NAME", "such as bf16", MACHINE)]
_Ray = Annotated[
    str | None, _option("--ray", "ADDRESS", "run on that Ray cluster; local: a trial one on this machine", MACHINE)
]


def _command(
    grid: _Grid,
    settings: _Settings = None,
    rounds: _Rounds = None,
    seeds: _Seeds = None,
    search: _Search = None,
    trials: _Trials = None,
    data_dir: _DataDir = None,
    device: _Device = None,
    precision: _Precision = None,
    out: _Out = None,
    workers: Workers = None,
    time_limit: TimeLimit = None,
    no_folders: NoFolders = False,
    ray: _Ray = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run every combination of a grid's values. The same command again continues; finished runs are not run again."""
    from fedskew.experiment.config import assigned
    from fedskew.experiment.storage.about import command
    from fedskew.experiment.storage.atomic import reporting_os_errors
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.grid import read_grid
    from fedskew.lab.sweep.records_file import Records, RecordsFile
    from fedskew.lab.sweep.search import Search, read_search

    if search not in (None, "optuna"):
        raise unknown("search", str(search), ("optuna",))
    said = {"rounds": rounds, "data_dir": absolute(data_dir), "device": device, "precision": precision}
    values = assigned(settings or ()) | {key: value for key, value in said.items() if value is not None}
    asked = read_search(grid, values, seeds) if search else read_grid(grid, values, seeds).points()
    folder = Path(out) if out else Path("runs") / Path(grid).stem
    kept = RecordsFile(folder / RECORDS)
    campaign = Campaign(
        lambda _: kept, Records(kept.read()), folder, not no_folders, whole("workers", workers),
        positive("time_limit", time_limit), command(), ray,
    )  # fmt: skip
    with reporting_os_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    if isinstance(asked, Search):
        searched(asked, whole("trials", trials) or TRIALS, campaign, as_json, quiet)
        return
    run_campaign(campaign, [point.job for point in asked], as_json or quiet)
    _report(asked, campaign, folder, as_json)
    conclude(campaign)


def _report(points: Sequence[Point], campaign: Campaign, folder: Path, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.sweep.table import write_csv, write_parquet

    lines = [_line(point, campaign) for point in points]
    write_csv(lines, folder / "table.csv")
    has_parquet = write_parquet(lines, folder / "table.parquet")
    if as_json:
        print_json(lines)
        return
    console = stdout()
    console.print(_table(lines))
    tables = "table.csv and table.parquet" if has_parquet else "table.csv"
    console.print(f"{tables} in {folder}", markup=False, soft_wrap=True)


def _line(point: Point, campaign: Campaign) -> Line:
    from fedskew.lab.sweep.table import line

    record = campaign.known.get(point.job)
    rounds = point.config.rounds
    status = "failed" if point.job.label in campaign.failures else "unfinished"
    return line(point.place, rounds, record, "finished" if record and record.rounds >= rounds else status)


def _table(lines: Sequence[Line]) -> object:
    """Means over the seeds, as the eye wants them; the files have every run."""
    from rich.table import Table

    measured = ("accuracy", "best", "worst_class")
    places: dict[tuple[str, ...], list[Line]] = {}
    keys = list(lines[0])[: list(lines[0]).index("seed")]
    for line in lines:
        places.setdefault(tuple(str(line[key]) for key in keys), []).append(line)
    table = Table()
    for heading in (*keys, "runs", *(name.replace("_", " ") for name in measured)):
        table.add_column(heading, overflow="fold")
    for place, found in places.items():
        done = [line for line in found if line["accuracy"] is not None]
        cells = [in_percent([line[name] for line in done]) if done else "–" for name in measured]
        table.add_row(*place, f"{len(done)}/{len(found)}", *cells)
    return table
