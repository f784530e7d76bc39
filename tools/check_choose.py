"""Check `fedskew choose`: is what it chooses nearly the best of all methods, on splits that it has not seen?

For each federation, a race on seeds 100 and above chooses a method. Then all methods with their default settings, the
chosen candidate and tuned FedAvg train on the splits of seeds 0 and above. They are tested on the test set, which the
race never used. Runs that results/fedskew.jsonl has already are not repeated. Repeat the command to resume.

    python tools/check_choose.py digits-0.1-8 --workers 2                                # one federation
    python tools/check_choose.py digits --workers 2 --budget 3m                          # all on digits, on a CPU
    python tools/check_choose.py fashion-mnist mnist cifar10 --device cuda --precision bf16 --workers 8 --budget 5m
    python tools/check_choose.py --table                                                 # write the tables only
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedskew.choose.choice import choose
from fedskew.choose.field import DEFAULT_FIELD
from fedskew.cli.race_display import racing
from fedskew.experiment.config import Config, with_values
from fedskew.lab.sweep.campaign import Campaign
from fedskew.lab.sweep.job import Job
from fedskew.lab.sweep.pool import Watcher
from fedskew.lab.sweep.records import Outcome, Records, RecordsFile, read_folder, until
from fedskew.metrics.summary import mean_of_last

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "choose"
"""One JSON file per federation, from which the tables are written."""
RACE_SEED = 100
LAST = 10
"""Accuracy is the mean over so many last rounds, as in the map."""

_MAP = {
    "partition.rule": "dirichlet", "partition.clients": 20, "rounds": 40, "batch_size": 50, "momentum": 0.9,
    "weight_decay": 1e-5,
}  # fmt: skip
_DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits", "model": "dnn", "lr": 0.05, "local_epochs": 5},
    "mnist": {"data": "mnist", "model": "dnn", "lr": 0.01, "local_epochs": 2},
    "fashion-mnist": {"data": "fashion-mnist", "model": "cnn", "lr": 0.01, "local_epochs": 2},
    "cifar10": {"data": "cifar10", "model": "cnn", "lr": 0.01, "local_epochs": 2, "augment": ["crop", "flip"]},
}


def _federation(dataset: str, beta: float, per_round: int) -> dict[str, Any]:
    return {**_MAP, **_DATASETS[dataset], "partition.beta": beta, "clients_per_round": per_round}


PLACES = (
    ("digits", 0.05, 2), ("digits", 0.1, 2), ("digits", 0.1, 8), ("digits", 0.5, 20),
    ("fashion-mnist", 0.05, 20), ("fashion-mnist", 0.1, 2), ("fashion-mnist", 0.5, 8),
    ("mnist", 0.05, 2), ("cifar10", 0.1, 2), ("cifar10", 0.5, 20),
)  # fmt: skip
FEDERATIONS = {f"{d}-{beta:g}-{n}": _federation(d, beta, n) for d, beta, n in PLACES}
"""By name: dataset, Dirichlet β and clients per round of 20, under the protocol of the map in RESULTS.md."""


def test_seeds(name: str) -> range:
    """The splits of the test. The fewer clients per round and the fewer data, the more splits differ."""
    dataset, _, per_round = name.rsplit("-", 2)
    few = {"2": 12, "8": 6} if dataset == "digits" else {"2": 5}
    return range(few.get(per_round, 3))


_NO_TERMS = {"name": "fedvls", "distill_weight": 0, "suppress_weight": 0}
METHODS: dict[str, Any] = {
    **{name: name for name in DEFAULT_FIELD},
    "moon": "moon",
    "fedgr": "fedgr",
    "L_cal": _NO_TERMS,
}
"""All methods with their default settings: those of the race and of the map."""


class _Lines(Watcher):
    """Prints a line when a run ends."""

    def on_outcome(self, job: Job, outcome: Outcome) -> None:
        print(f"  {job.label}: {outcome.status} {outcome.reason}", flush=True)


def check(name: str, arguments: argparse.Namespace) -> None:
    """Race, test, and write the result of one federation."""
    machine = {key: value for key in ("device", "precision") if (value := getattr(arguments, key)) is not None}
    base = with_values(Config(), {**FEDERATIONS[name], **machine})
    print(f"{name}: racing", flush=True)
    race_config = replace(base, seed=RACE_SEED)
    with racing(race_config, "accuracy", quiet=False) as watcher:
        choice = choose(
            config=race_config, budget=arguments.budget, out=arguments.out / "races" / name, workers=arguments.workers,
            watcher=watcher,
        )  # fmt: skip
    print("\n".join(choice.answer), flush=True)
    baseline = next(one.standing for one in choice.race.final if one.standing.method == "fedavg")
    tuned = {"method": "fedavg", "lr": baseline.lr}
    winner = choice.race.winner.standing
    runs: dict[str, dict[str, Any]] = {label: {"method": method} for label, method in METHODS.items()}
    runs |= {"tuned fedavg": tuned, "chosen": {"method": {"name": winner.method, **winner.params}, "lr": winner.lr}}
    accuracy = _tested(name, base, runs, arguments)
    result = {
        "federation": {key: FEDERATIONS[name][key] for key in ("data", "model", "partition.beta", "clients_per_round")},
        "chosen": {"label": winner.label, "lr": winner.lr},
        "answer": list(choice.answer),
        "budget": arguments.budget,
        "seconds": choice.race.seconds,
        "device": base.device,
        "accuracy": accuracy,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _tested(
    name: str, base: Config, runs: dict[str, dict[str, Any]], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Test accuracy in percent by label, one number per seed."""
    records = RecordsFile(arguments.out / f"{name}.jsonl")
    known = Records([*read_folder(ROOT / "results"), *records.read()])
    jobs = {
        (label, seed): Job(with_values(base, {**values, "seed": seed}), f"{label} seed {seed}")
        for seed in test_seeds(name)
        for label, values in runs.items()
    }
    campaign = Campaign(lambda _: records, known, arguments.out / name, False, arguments.workers)
    print(f"{name}: {len(campaign.todo(list(jobs.values())))} runs to test", flush=True)
    with closing(campaign):
        campaign.run(list(jobs.values()), _Lines())
    found: dict[str, list[float]] = {}
    for (label, _), job in jobs.items():
        record = campaign.known.get(job)
        if record is not None:
            curve = until(record.curve, job.config.rounds)
            found.setdefault(label, []).append(round(100 * mean_of_last(curve, LAST).accuracy, 3))
    return {label: values for label, values in found.items() if len(values) == len(test_seeds(name))}


def table() -> str:
    """The evidence as Markdown."""
    headings = ("federation", "clients per round", "chosen", "its test accuracy", "best of all methods", "FedAvg",
                "tuned FedAvg", "chosen − best", "chosen − FedAvg", "splits", "race")  # fmt: skip
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    results = [path for name in FEDERATIONS if (path := RESULTS / f"{name}.json").is_file()]
    for path in results:
        lines.append(_row(json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(lines) + "\n"


def _row(result: dict[str, Any]) -> str:
    where, mean = result["federation"], {label: fmean(values) for label, values in result["accuracy"].items()}
    best = max((label for label in mean if label in METHODS), key=lambda label: mean[label])
    chosen = f"`{result['chosen']['label']}`, lr {result['chosen']['lr']:g}"
    cells = (
        f"{where['data']}, β {where['partition.beta']:g}", f"{where['clients_per_round']} of 20", chosen,
        f"{mean['chosen']:.1f}", f"{mean[best]:.1f} (`{best}`)", f"{mean['fedavg']:.1f}",
        f"{mean['tuned fedavg']:.1f}", f"{mean['chosen'] - mean[best]:+.1f}", f"{mean['chosen'] - mean['fedavg']:+.1f}",
        str(len(result["accuracy"]["chosen"])), f"{result['seconds']:.0f} s",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def write_tables() -> None:
    """Replace the table in docs/choose.md. `fedskew results` puts it into RESULTS.md."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "table.md").write_text(table(), encoding="utf-8")
    page = ROOT / "docs" / "choose.md"
    before, mark, rest = page.read_text(encoding="utf-8").partition("<!-- evidence -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if mark and end:
        page.write_text(before + mark + table() + end + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="federations, or beginnings of their names")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/check-choose"))
    parser.add_argument("--table", action="store_true", help="write the tables and run nothing")
    arguments = parser.parse_args()
    if not arguments.table:
        for name in FEDERATIONS:
            if any(name.startswith(wanted) for wanted in arguments.names):
                check(name, arguments)
    write_tables()
    print(table())


if __name__ == "__main__":
    main()
