"""Check whether TF32 and bf16 change final accuracies by more than float32's own rounding does.

    python benchmarks/precision.py --device cuda --out benchmarks/precision-h200

Three datasets × four methods × three seeds, each trained four times: in float32, in float32 with other rounding, in
TF32 and in bf16. For the other rounding, the learning rate is larger by one part in a million. The first round then
differs in the last digits, and later rounds enlarge the difference. It is the difference that a user cannot avoid,
because another GPU or another version of PyTorch also rounds differently.

The four sweeps run at the same time. Repeat the command with the same --work to resume.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DATA = ("mnist", "fashion-mnist", "cifar10")
METHODS = ("fedavg", "fedvls", "fedlmd", "scaffold")
LR = 0.01
REFERENCE, OTHER_ROUNDING = "float32", "float32, other rounding"
VARIANTS: Mapping[str, tuple[str, float]] = {
    REFERENCE: ("float32", LR),
    OTHER_ROUNDING: ("float32", LR * (1 + 1e-6)),
    "TF32": ("tf32", LR),
    "bf16": ("bf16", LR),
}
"""The precision and the learning rate of each variant."""
GRID = """\
model: {model}
partition: {{rule: dirichlet, clients: {clients}, beta: 0.1}}
clients_per_round: 10
local_epochs: {epochs}
batch_size: 50
lr: {lr!r}
rounds: {rounds}
grid:
  data: [{data}]
  method: [{methods}]
seeds: {seeds}
"""

Accuracies = Mapping[str, float]
"""Final accuracies in percent, by data/method/seed."""


@dataclass(frozen=True)
class Difference:
    """A variant's accuracies minus float32's, in percentage points. There is one number per compared run."""

    points: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.points)

    @property
    def standard_error(self) -> float:
        return statistics.stdev(self.points) / len(self.points) ** 0.5

    @property
    def size(self) -> float:
        """The root of the mean square: the usual size of the difference."""
        return statistics.fmean(point**2 for point in self.points) ** 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    flags = _read_flags(arguments)
    if flags.render:
        print(_page(json.loads(Path(flags.render).read_text(encoding="utf-8"))), end="")
        return
    work = Path(flags.work)
    _run_sweeps(flags, work)
    accuracies = {name: _read_accuracies(work / _folder(name) / "table.csv") for name in VARIANTS}
    content = {
        "command": shlex.join(["python", "benchmarks/precision.py", *(arguments or sys.argv[1:])]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": _device(work),
        "accuracies": accuracies,
    }
    if flags.out:
        Path(f"{flags.out}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        Path(f"{flags.out}.md").write_text(_page(content), encoding="utf-8")
    print(_page(content), end="")


def _read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each of the four sweeps")
    parser.add_argument("--work", default="runs/precision", help="folder of the sweeps")
    parser.add_argument("--render", metavar="FILE.json", help="print the page of an earlier check")
    parser.add_argument("--out", metavar="FILE", help="write FILE.json and FILE.md")
    return parser.parse_args(arguments)


def _folder(variant: str) -> str:
    return variant.replace(", ", "-").replace(" ", "-")


def _run_sweeps(flags: argparse.Namespace, work: Path) -> None:
    """Run one sweep per variant, all at the same time."""
    work.mkdir(parents=True, exist_ok=True)
    sweeps = {}
    for name, (precision, lr) in VARIANTS.items():
        grid = work / f"{_folder(name)}.yaml"
        text = GRID.format(
            model=flags.model, clients=flags.clients, epochs=flags.epochs, lr=lr, rounds=flags.rounds,
            seeds=flags.seeds, data=flags.data.replace(",", ", "), methods=flags.methods.replace(",", ", "),
        )  # fmt: skip
        grid.write_text(text, encoding="utf-8")
        command = [
            sys.executable, "-m", "fedskew", "sweep", str(grid), "--device", flags.device, "--precision", precision,
            "--workers", str(flags.workers), "--no-folders", "--out", str(work / _folder(name)),
        ]  # fmt: skip
        sweeps[name] = subprocess.Popen(command)
    failed = [name for name, sweep in sweeps.items() if sweep.wait()]
    if failed:
        sys.exit(f"the sweep of {', '.join(failed)} failed; its reason is above")


def _read_accuracies(table: Path) -> Accuracies:
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {f"{row['data']}/{row['method']}/{row['seed']}": 100 * float(row["accuracy"]) for row in rows}


def _device(work: Path) -> str:
    with (work / _folder(REFERENCE) / "table.csv").open(newline="", encoding="utf-8") as file:
        return next(csv.DictReader(file))["device"]


def _page(content: Mapping[str, Any]) -> str:
    accuracies: Mapping[str, Accuracies] = content["accuracies"]
    datasets, methods = (list(dict.fromkeys(run.split("/")[part] for run in accuracies[REFERENCE])) for part in (0, 1))
    lines = [
        "# Number formats and final accuracy",
        "",
        f"{content['device']}; {content['date']}; `{content['command']}`.",
        "",
        f"Each of {len(accuracies[REFERENCE])} runs (data × method × seed) was trained in each variant. The tables "
        "compare the accuracy after the last round with float32's. The second variant is float32 again, with a "
        "learning rate that is larger by one part in a million, so that every sum is rounded differently. A format "
        "leaves results unchanged as far as one can tell if its differences are about as large as that variant's, and "
        "if their mean is zero up to its standard error.",
        "",
        "## Difference to float32, in percentage points",
        "",
        "The usual size is the root of the mean square.",
        "",
        "| | mean ± standard error | usual size | largest |",
        "|---|---|---|---|",
    ]
    others = [name for name in VARIANTS if name != REFERENCE]
    for name in others:
        difference = _difference(accuracies, name)
        lines.append(
            f"| {name} | {difference.mean:+.2f} ± {difference.standard_error:.2f} | {difference.size:.2f} "
            f"| {max(difference.points, key=abs):+.1f} |"
        )
    lines += _sizes(accuracies, others, "data", datasets) + _sizes(accuracies, others, "method", methods)
    lines += [
        "",
        "## Mean accuracy over the seeds, in percent",
        "",
        f"| data | method | {' | '.join(VARIANTS)} |",
        "|---|---|" + "---|" * len(VARIANTS),
    ]
    for data in datasets:
        for method in methods:
            means = [_mean(accuracies[name], data, method) for name in VARIANTS]
            lines.append(f"| {data} | {method} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    return "\n".join(lines) + "\n"


def _sizes(accuracies: Mapping[str, Accuracies], variants: Sequence[str], by: str, values: Sequence[str]) -> list[str]:
    lines = ["", f"Usual size by {by}:", "", f"| | {' | '.join(values)} |", "|---|" + "---|" * len(values)]
    for name in variants:
        sizes = [_difference(accuracies, name, value).size for value in values]
        lines.append(f"| {name} | {' | '.join(f'{size:.2f}' for size in sizes)} |")
    return lines


def _mean(accuracies: Accuracies, data: str, method: str) -> float:
    return statistics.fmean(value for run, value in accuracies.items() if run.startswith(f"{data}/{method}/"))


def _difference(accuracies: Mapping[str, Accuracies], variant: str, only: str | None = None) -> Difference:
    """The differences of all runs, or only of those on some data or with some method."""
    reference = accuracies[REFERENCE]
    return Difference(
        tuple(
            value - reference[run]
            for run, value in accuracies[variant].items()
            if only is None or only in run.split("/")[:2]
        )
    )


if __name__ == "__main__":
    main()
