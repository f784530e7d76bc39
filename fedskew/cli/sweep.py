"""`fedskew sweep`: run every combination of some values, or search for the best one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import (
    CONFIGURATION,
    MACHINE,
    TRAINING,
    Json,
    NoFolders,
    Quiet,
    RankBy,
    Settings,
    TimeLimit,
    Workers,
    add_command,
    option,
    takes_settings,
)
from fedskew.errors import UserError, plural, unknown

if TYPE_CHECKING:
    from fedskew.experiment.config import Config
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.grid import Point
    from fedskew.lab.sweep.job import Job
    from fedskew.lab.sweep.records import Outcome
    from fedskew.lab.sweep.search import Search
    from fedskew.lab.sweep.table import Row
    from fedskew.results.ranking import RankingMetric

RECORDS = "runs.jsonl"
TRIALS = 20


def add_to(app: typer.Typer) -> None:
    add_command(app, "sweep", _command, "fedskew sweep grid.yaml --workers 2 --rounds 2")


@takes_settings(("data_dir", "rounds", "device", "precision"), config_file=False)
def _command(
    settings: Settings,
    grid: Annotated[
        str, typer.Argument(metavar="FILE.YAML", help="configuration with `grid` or `search`, and optionally `seeds`")
    ],
    seeds: Annotated[
        str | None, option("--seeds", "N", "number of seeds (default: the file's, or 1)", TRAINING)
    ] = None,
    search: Annotated[
        str | None,
        option(
            "--search", "optuna", "search the file's `search` space for the best values on validation data", TRAINING
        ),
    ] = None,
    trials: Annotated[
        str | None, option("--trials", "N", f"number of combinations that a search tries (default: {TRIALS})", TRAINING)
    ] = None,
    out: Annotated[
        str | None, option("--out", "FOLDER", "folder for runs and tables (default: runs/FILE)", CONFIGURATION)
    ] = None,
    workers: Workers = None,
    time_limit: TimeLimit = None,
    no_folders: NoFolders = False,
    ray: Annotated[
        str | None, option("--ray", "ADDRESS", "run on this Ray cluster (`local`: start one on this machine)", MACHINE)
    ] = None,
    rank_by: RankBy = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run every combination of a grid's values, or search for the best. Repeat the command to resume.

    Finished runs are not repeated.
    """
    from fedskew.cli.campaigns import conclude, job_values, parse_count, parse_seconds, run_campaign
    from fedskew.experiment.storage.about import command
    from fedskew.experiment.storage.files import reporting_os_errors
    from fedskew.lab.sweep.campaign import Campaign
    from fedskew.lab.sweep.grid import read_grid
    from fedskew.lab.sweep.records import Records, RecordsFile
    from fedskew.lab.sweep.search import Search, read_search
    from fedskew.results.ranking import DEFAULT_METRIC, find_metric

    metric = find_metric(rank_by or DEFAULT_METRIC)
    if search not in (None, "optuna"):
        raise unknown("search", str(search), ("optuna",))
    if trials is not None and search is None:
        raise UserError("--trials is for --search; expected --search optuna, too")
    values = job_values(settings)
    requested = read_search(grid, values, seeds, metric) if search else read_grid(grid, values, seeds).points()
    folder = Path(out) if out else Path("runs") / Path(grid).stem
    records = RecordsFile(folder / RECORDS)
    campaign = Campaign(
        lambda _: records, Records(records.read()), folder, not no_folders, parse_count("workers", workers),
        parse_seconds("time_limit", time_limit), command(), ray,
    )  # fmt: skip
    with reporting_os_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    with closing(campaign):
        if isinstance(requested, Search):
            _search(requested, parse_count("trials", trials) or TRIALS, campaign, as_json, quiet)
        else:
            run_campaign(campaign, [point.job for point in requested], as_json or quiet)
            _report(requested, campaign, folder, metric, as_json)
    conclude(campaign)


def _report(points: Sequence[Point], campaign: Campaign, folder: Path, metric: RankingMetric, as_json: bool) -> None:
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.sweep.table import write_csv, write_parquet

    rows = [_row(point, campaign) for point in points]
    write_csv(rows, folder / "table.csv")
    has_parquet = write_parquet(rows, folder / "table.parquet")
    if as_json:
        print_json(rows)
        return
    console = stdout()
    console.print(_table(rows, [point.config for point in points], metric))
    tables = "table.csv and table.parquet" if has_parquet else "table.csv"
    console.print(f"{tables} written to {folder}", markup=False, soft_wrap=True)


def _row(point: Point, campaign: Campaign) -> Row:
    from fedskew.lab.sweep.table import FINISHED, make_row

    job = point.job
    outcome = campaign.outcomes.get(job.identity)  # points that differ only in `rounds` share a run
    status = "failed" if outcome is not None and outcome.status == "failed" else "unfinished"
    status = FINISHED if campaign.is_done(job) else status
    return make_row(point.grid_values, point.config, campaign.known.get(job), status)


def _table(rows: Sequence[Row], configs: Sequence[Config], metric: RankingMetric) -> object:
    """Make a table of the finished runs: means over the seeds, with the best of each federation and participation."""
    from rich.table import Table

    from fedskew.lab.sweep.table import FINISHED, best_points, by_point, grid_keys, measured_name
    from fedskew.results.ranking import METRICS

    best = best_points(rows, configs, metric)
    several = any(len(found) > 1 for found in by_point(rows).values())
    shown = [METRICS[name] for name in dict.fromkeys((metric.name, "accuracy", "macro-f1", "worst-class"))]
    table = Table()
    for heading in (*grid_keys(rows), "runs", *(one.heading.replace(" ", "\n", 1) for one in shown)):
        table.add_column(heading, overflow="fold")
    for grid_values, found in by_point(rows).items():
        done = [row for row in found if row["status"] == FINISHED]
        columns = [[row[measured_name(one)] for row in done] for one in shown]
        cells = [_cell(column, one) for column, one in zip(columns, shown, strict=True)]
        marked = " *" if grid_values in best else ""
        table.add_row(*grid_values, f"{len(done)}/{len(found)}{marked}", *cells, style="bold" if marked else None)
    where = " of each federation and participation" if len(best) > 1 else ""
    notes = [f"* {metric.best_word} {metric.label}{where}"] if best else []
    table.caption = "; ".join([*notes, *(["mean ± sample standard deviation over seeds"] if several else [])])
    table.caption_justify = "left"
    return table


def _cell(values: Sequence[float | None], metric: RankingMetric) -> str:
    """Mean and deviation over the seeds, or a dash if a value is missing."""
    from fedskew.metrics.summary import mean_std

    known = [value for value in values if value is not None]
    return metric.cell(mean_std(known), 2) if known and len(known) == len(values) else "–"


def _search(search: Search, trials: int, campaign: Campaign, as_json: bool, quiet: bool) -> None:
    """Search, then train the best point on all training data and test it."""
    from fedskew.cli.campaigns import run_campaign
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.lab.sweep.job import planned_rounds
    from fedskew.lab.sweep.search import search_with_optuna
    from fedskew.lab.sweep.table import measured_name
    from fedskew.workers import default_workers

    at_once = campaign.workers or default_workers(search.base.device, trials)

    def run(jobs: Sequence[Job]) -> Mapping[str, Outcome]:
        run_campaign(campaign, jobs, as_json or quiet)
        return campaign.outcomes

    found = search_with_optuna(search, trials, at_once, campaign.folder, run)
    final = search.final_jobs(found)
    run_campaign(campaign, final, as_json or quiet)
    tested = [campaign.known.get(job) if campaign.is_done(job) else None for job in final]
    measured = [
        record.mean_of_last(measured_name(search.metric), job.config)
        for record, job in zip(tested, final, strict=True)
        if record is not None
    ]
    scores = [score for score in measured if score is not None]
    if as_json:
        summary = {
            "best": found.values,
            "best_trial": found.number,
            "rank_by": search.metric.name,
            f"validation_{measured_name(search.metric)}": found.score,
            "trials": found.trials,
            "failed": found.failed,
            f"test_{measured_name(search.metric)}": scores,
        }
        print_json(summary)
        return
    console = stdout()
    listed = ", ".join(f"{key} {value}" for key, value in found.values.items())
    trials_done = plural(found.trials, "trial")
    console.print(f"best of {trials_done}: trial {found.number}, {listed}", markup=False, soft_wrap=True)
    label = search.metric.label
    unit = " %" if search.metric.percent else ""
    last = min(final[0].config.mean_last, planned_rounds(final[0].config))
    mean = f"mean {label} of the last {plural(last, 'round')}"
    console.print(f"{label} after the last round" if search.metric.measure is None else mean, soft_wrap=True)
    validated = _cell([found.score], search.metric)
    console.print(f"  on the validation data, by which the trial was chosen: {validated}{unit}")
    if scores:
        console.print(f"  on the test set, trained on all training data: {_cell(scores, search.metric)}{unit}")
