"""`fedskew demo`: watch FedAvg lose classes, and see which methods keep them, in under two minutes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import Json, Quiet, Settings, add_command, option
from fedskew.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from fedskew.experiment.preparation import Prepared
    from fedskew.results import Comparison

SETTINGS = "demo.yaml"
FIGURE = "demo.png"


def add_to(app: typer.Typer) -> None:
    add_command(app, "demo", _command, "fedskew demo --seeds 1 --rounds 5")


def _command(
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="folder for the demo's files")] = "runs/demo",
    seeds: Annotated[
        str | None, option("--seeds", "N", "number of seeds; each makes its own split (default: 3)")
    ] = None,
    rounds: Annotated[str | None, option("--rounds", "N", "communication rounds (default: 60)")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="delete earlier runs with the same settings")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare five methods on 20 clients with few classes each. Repeat the command to show the results again."""
    from fedskew.cli.compare import read_plan
    from fedskew.cli.running import print_comparison, run_all
    from fedskew.cli.terminal import stdout
    from fedskew.experiment.compare import prepare_comparison

    folder = Path(out)
    settings = _write_settings(folder)
    flags = {} if rounds is None else {"rounds": rounds}
    plan = read_plan(Settings(str(settings), flags), seeds=seeds)
    runs = prepare_comparison(plan.base, plan.methods, plan.seeds)
    if fresh:
        _delete_runs(runs, folder)
    console = stdout()
    if not as_json:
        _introduce(console, runs)
    comparison = run_all(runs, folder, as_json or quiet)
    print_comparison(comparison, as_json)
    figure = _draw(comparison, folder / FIGURE)
    if not as_json:
        _conclude(console, comparison, figure, settings, flags | ({} if seeds is None else {"seeds": seeds}))


def _write_settings(folder: Path) -> Path:
    """Write the demo's settings to a file that the user can read, change and run. Never overwrite a changed file."""
    from fedskew.experiment.storage.files import reporting_os_errors

    target, settings = folder / SETTINGS, (files("fedskew.cli") / SETTINGS).read_text(encoding="utf-8")
    with reporting_os_errors("write", target):
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists() and target.read_text(encoding="utf-8", errors="replace") != settings:
            raise UserError(
                f"{target} was changed, or is of another version of fedskew; to run it: "
                f"fedskew compare -c {shlex.quote(str(target))}; for the demo, choose another --out"
            )
        target.write_text(settings, encoding="utf-8")
    return target


def _delete_runs(runs: list[Prepared], folder: Path) -> None:
    """Delete the folders of these runs, and nothing else in `folder`."""
    from fedskew.experiment.config import run_folder

    for prepared in runs:
        shutil.rmtree(run_folder(folder, prepared.config), ignore_errors=True)


def _introduce(console: Console, runs: list[Prepared]) -> None:
    from fedskew.report.partition_map import PartitionMap

    config, federation = runs[0].config, runs[0].federation
    console.print(
        f"{len(federation.dataset.train)} of scikit-learn's handwritten digits are divided among {federation.clients} "
        f"clients, so that each has only a few classes. In each of {config.rounds} rounds, "
        f"{config.clients_per_round} clients train the global model on their digits for {config.local_epochs} epochs, "
        "and the server averages their models."
    )
    console.print(f"\nClasses per client (split with seed {federation.seed}):")
    console.print(PartitionMap(federation))
    console.print()


def _draw(comparison: Comparison, figure: Path) -> Path | None:
    """Draw the comparison and return the path of the figure. None if that fails, for example without matplotlib."""
    from fedskew.cli.terminal import notice
    from fedskew.report.comparison_figure import save_comparison

    try:
        save_comparison(comparison, figure)
    except UserError as error:
        notice(f"no figure: {error}")
        return None
    return figure


def _conclude(
    console: Console, comparison: Comparison, figure: Path | None, settings: Path, flags: Mapping[str, str]
) -> None:
    if figure is not None:
        console.print(f"figure: {figure}", markup=False, soft_wrap=True)
    changed = "".join(f", --{name} {value}" for name, value in flags.items())
    console.print(f"settings: {settings}{changed}", markup=False, soft_wrap=True)
    console.print(f"\n{_lesson(comparison)}\n", markup=False)
    console.print(
        "The demo uses a high learning rate so that forgetting is visible. At 0.05 FedAvg keeps all classes, and with "
        "all clients in every round none of these methods beats it on this easy dataset. See for yourself:"
    )
    *checks, another_split = next_commands(settings)
    for command in checks:
        console.print(f"  {command}", markup=False, soft_wrap=True, style="bold")
    console.print("Look at another split, with two classes per client:")
    console.print(f"  {another_split}", markup=False, soft_wrap=True, style="bold")


def _lesson(comparison: Comparison) -> str:
    """Say how many classes the first method lost, and which methods lost none."""
    from fedskew.metrics.confusion import lost_classes

    lost = {
        m.label: sum(len(lost_classes(run.class_accuracy)) for run in m.runs) / len(m.runs) for m in comparison.methods
    }
    first, keeping = comparison.methods[0].label, [name for name, number in lost.items() if number == 0]
    if not lost[first]:
        return f"{first} lost no class this time."
    named = " and ".join([", ".join(keeping[:-1]), keeping[-1]] if len(keeping) > 1 else keeping)
    kept = f" {named} lost none." if keeping else ""
    why = "clients that lack a class make the model unlearn it"
    return f"{first} lost {lost[first]:.1f} classes per run on average: {why}.{kept}"


def next_commands(settings: Path) -> tuple[str, ...]:
    file = shlex.quote(str(settings))
    return (
        f"fedskew compare -c {file} --seeds 1 --lr 0.05",
        f"fedskew compare -c {file} --seeds 1 --clients-per-round 20",
        "fedskew partition --partition labels --labels-per-client 2 --clients 20",
    )
