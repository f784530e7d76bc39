"""`fedskew sweep`: every combination of some values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.campaigns import NoFolders, TimeLimit, Workers, conclude, positive, run_campaign, whole
from fedskew.cli.flags import CONFIGURATION, TRAINING, Json, Quiet
from fedskew.cli.run import examples

if TYPE_CHECKING:
    from fedskew.sweep.campaign import Campaign
    from fedskew.sweep.grid import Point
    from fedskew.sweep.table import Line

EXAMPLES = ("fedskew sweep grid.yaml --workers 2 --rounds 2",)
RECORDS = "runs.jsonl"


def add_to(app: typer.Typer) -> None:
    app.command("sweep", epilog=examples(EXAMPLES))(_command)


def _command(
    grid: Annotated[str, typer.Argument(metavar="GRID.YAML", help="a configuration with `grid` and `seeds`")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="any key, instead of the file's; repeatable",
                     rich_help_panel=CONFIGURATION, show_default=False),
    ] = None,
    rounds: Annotated[
        str | None, typer.Option("--rounds", metavar="N", help="communication rounds", rich_help_panel=TRAINING,
                                 show_default=False),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N", help="instead of the file's", rich_help_panel=TRAINING,
                                 show_default=False),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FOLDER", help="where runs and table are kept (default: runs/GRID)",
                                 rich_help_panel=CONFIGURATION, show_default=False),
    ] = None,
    workers: Workers = None,
    time_limit: TimeLimit = None,
    no_folders: NoFolders = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run every combination of a grid's values. The same command again continues; finished runs are not run again."""
    from fedskew.experiment.about import command
    from fedskew.experiment.config import assigned
    from fedskew.experiment.durable import reporting_os_errors
    from fedskew.sweep.campaign import Campaign
    from fedskew.sweep.grid import read_grid
    from fedskew.sweep.records_file import Records, RecordsFile

    values = assigned(settings or ()) | ({} if rounds is None else {"rounds": rounds})
    points = read_grid(grid, values, seeds).points()
    folder = Path(out) if out else Path("runs") / Path(grid).stem
    kept = RecordsFile(folder / RECORDS)
    campaign = Campaign(
        lambda _: kept, Records(kept.read()), folder, not no_folders, whole("workers", workers),
        positive("time_limit", time_limit), command(),
    )  # fmt: skip
    with reporting_os_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    run_campaign(campaign, [point.job for point in points], as_json or quiet)
    _report(points, campaign, folder, as_json)
    conclude(campaign)


def _report(points: Sequence[Point], campaign: Campaign, folder: Path, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.sweep.table import write_csv, write_parquet

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
    from fedskew.sweep.table import line

    record = campaign.known.get(point.job)
    rounds = point.config.rounds
    status = "failed" if point.job.label in campaign.failures else "unfinished"
    return line(point.place, rounds, record, "finished" if record and record.rounds >= rounds else status)


def _table(lines: Sequence[Line]) -> object:
    """Means over the seeds, as the eye wants them; the files have every run."""
    from rich.table import Table

    from fedskew.metrics.summary import mean_std

    measured = ("accuracy", "best", "worst_class")
    places: dict[tuple[str, ...], list[Line]] = {}
    keys = list(lines[0])[: list(lines[0]).index("seed")]
    for line in lines:
        places.setdefault(tuple(str(line[key]) for key in keys), []).append(line)
    table = Table(*keys, "runs", *(name.replace("_", " ") for name in measured))
    for place, found in places.items():
        done = [line for line in found if line["accuracy"] is not None]
        cells = [str(mean_std([line[name] for line in done])) if done else "–" for name in measured]
        table.add_row(*place, f"{len(done)}/{len(found)}", *cells)
    return table
