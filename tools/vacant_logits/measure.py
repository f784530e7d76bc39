"""Measure what clients learn about the classes that they lack, and which classes the global model then confuses.

Two things are measured every few rounds. The first is log p(own class) − log p(vacant class) on the clients' own
samples: in the model that a client receives, in the model that it has trained, and in the aggregated model. The second
is the share of test samples that the global model takes for another class. Both are grouped by how often the two
classes meet on a client (contact.py).

    python tools/vacant_logits/measure.py                    # all 180 runs, on a CPU; repeat it to resume
    python tools/vacant_logits/measure.py mnist-shards       # one federation
    python tools/vacant_logits/page.py                       # the table and the figure
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contact import contact_groups, errors_by_group, vacant_log_odds

import fedskew as fs
from fedskew.engine import DeviceSamples, Evaluator, ModelState, Network
from fedskew.experiment.preparation import Prepared, data_shape
from fedskew.experiment.round.state import RunState
from fedskew.models.dnn import dnn
from fedskew.randomness import permutation

RECORDS = Path(__file__).parents[2] / "results" / "vacant-logits" / "runs.jsonl"
STAGES = ("received", "trained", "aggregated")


# -- the instrument ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepModels(fs.ServerRule):
    """FedAvg's mean. It keeps the models of the latest round for the instrument."""

    kept: dict[str, fs.Tensors] = field(default_factory=dict)

    def aggregate(self, sent: fs.Tensors, updates: fs.Updates, state: fs.Tensors) -> tuple[fs.Tensors, fs.Tensors]:
        mean = updates.mean()
        self.kept.update(received=sent, trained=updates.params, aggregated=mean)
        return mean, state

    def model(self, stage: str, participant: int) -> ModelState:
        """Return a model of the latest round: the trained one of this participant, or the one that all share."""
        params = self.kept[stage]
        return ModelState({n: t[participant] for n, t in params.items()} if stage == "trained" else params, {})


class Instrument(fs.Callback):
    """Measures after every `every` rounds. The model must have no buffers."""

    def __init__(self, models: KeepModels, every: int) -> None:
        self._models, self._every = models, every
        self.measured: list[dict[str, Any]] = []

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:  # noqa: ARG002
        self._federation = prepared.federation
        data = self._federation.dataset
        self._evaluator = Evaluator(Network(prepared.model), DeviceSamples(data, data.train, torch.device("cpu")))
        self._groups = contact_groups(self._federation.label_counts)

    def on_round(self, row: fs.RoundRow, rounds_ahead: int) -> None:  # noqa: ARG002
        if row.round == 0 or row.round % self._every:
            return
        if row.diverged:
            raise fs.UserError(f"clients {row.diverged} diverged in round {row.round}; expected finite updates")
        errors = errors_by_group(row.required_evaluation.confusion, self._groups)
        self.measured.append(
            {
                "round": row.round,
                "accuracy": round(100 * row.accuracy, 2),
                "log_odds": {stage: self._log_odds(stage, row.clients) for stage in STAGES},
                "errors": [round(value, 3) for value in errors.tolist()],
            }
        )

    def _log_odds(self, stage: str, clients: Sequence[int]) -> list[float | None]:
        """The mean over the participants' samples and vacant classes, by group of pairs."""
        sums, terms = np.zeros(3), np.zeros(3)
        for participant, client in enumerate(clients):
            model, samples = self._models.model(stage, participant), np.asarray(self._federation.indices[client])
            probabilities, labels = self._evaluator.probabilities(model, samples)
            vacant = self._federation.label_counts[client] == 0
            more, counted = vacant_log_odds(probabilities.numpy(), labels.numpy(), vacant, self._groups)
            sums, terms = sums + more, terms + counted
        return [round(s / n, 3) if n else None for s, n in zip(sums.tolist(), terms.tolist(), strict=True)]


# -- the runs ---------------------------------------------------------------------------------------------------------

CLIENTS, IMAGES, WIDTH, EVERY = 10, 2000, 32, 5
SETTINGS: dict[str, Any] = {
    "local_epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "device": "cpu",
    "engine": "stacked", "eval_every": EVERY,
}  # fmt: skip
ROUNDS = {CLIENTS: 30, 2: 45}
"""By clients per round."""
MAIN: dict[str, tuple[str, dict[str, float]]] = {
    "FedAvg": ("fedavg", {}),
    "FedRS": ("fedrs", {}),
    "FedLMD": ("fedlmd", {}),
    "L_cal": ("fedvls", {"distill_weight": 0, "suppress_weight": 0}),
    "FedVLS": ("fedvls", {}),
}
FEW = ("FedAvg", "L_cal", "FedVLS")
METHODS = {
    **MAIN,
    "L_cal+L_dis": ("fedvls", {"suppress_weight": 0}),
    "L_cal+L_logit": ("fedvls", {"distill_weight": 0}),
}
SPLITS: dict[str, fs.Partition] = {
    "shards": fs.Shards(clients=CLIENTS, shards=2),
    "0.05": fs.Dirichlet(clients=CLIENTS, beta=0.05),
    "0.1": fs.Dirichlet(clients=CLIENTS, beta=0.1),
}


DISTANCES = {"ring": (1, 1, 1, 1), "all-pairs": (1, 2, 3, 4)}
"""Two federations of 40 clients with two classes each. The classes stand in a circle, and each of these distances gives
ten clients, one for each two classes at that distance. So on a ring ten pairs of classes meet, and else forty."""


@dataclass(frozen=True)
class Run:
    """One run. `per_round` is 10 if all clients take part."""

    dataset: str
    split: str
    per_round: int
    method: str
    seed: int


def all_runs() -> list[Run]:
    """List the runs, the most telling federations first."""
    places: list[tuple[str, str, int, Iterable[str]]] = [
        ("mnist", "shards", CLIENTS, METHODS),
        ("mnist", "shards", 2, MAIN),
        ("mnist", "0.05", CLIENTS, METHODS),
        ("mnist", "0.05", 2, MAIN),
        ("mnist", "ring", CLIENTS, ("FedAvg", "FedVLS")),
        ("mnist", "all-pairs", CLIENTS, ("FedAvg", "FedVLS")),
        *(("fashion-mnist", split, n, MAIN) for split in ("shards", "0.05") for n in ROUNDS),
        *((dataset, "0.1", n, FEW) for dataset in ("mnist", "fashion-mnist") for n in ROUNDS),
    ]
    return [
        Run(dataset, split, per_round, method, seed)
        for dataset, split, per_round, methods in places
        for seed in range(3)
        for method in methods
    ]


def make_federation(dataset: str, split: str, seed: int) -> fs.Federation:
    data = few_images(dataset)
    if split in DISTANCES:
        return circular_federation(data, DISTANCES[split], seed)
    return fs.federation(data, SPLITS[split], seed)


@cache
def few_images(dataset: str) -> fs.Dataset:
    """Load the dataset with a few of its training images, the same for all splits."""
    data = fs.load(dataset)
    chosen = np.sort(permutation(len(data.train), 0, "vacant logits")[:IMAGES])
    return replace(data, train=data.train.select(chosen))


def circular_federation(data: fs.Dataset, distances: Sequence[int], seed: int) -> fs.Federation:
    """Put the classes in a circle, in random order. For each distance, a client has each two classes that far apart."""
    classes = len(data.classes)
    order = permutation(classes, seed, "circle").tolist()
    pairs = [(order[i], order[(i + distance) % classes]) for distance in distances for i in range(classes)]
    rows: list[list[Any]] = [[] for _ in pairs]
    for label in range(classes):
        owners = [client for client, pair in enumerate(pairs) if label in pair]
        shares = np.array_split(np.flatnonzero(data.train.y == label), len(owners))
        for client, share in zip(owners, shares, strict=True):
            rows[client].append(share)
    return fs.Federation(data, [np.concatenate(one) for one in rows], {"name": "circle"}, seed)


def small_network(federation: fs.Federation) -> torch.nn.Module:
    """Make FedVLS's network for MNIST with narrower layers, from the federation's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(federation.seed)
        return dnn(data_shape(federation.dataset), WIDTH)


def measure(run: Run) -> dict[str, Any]:
    """Train, measure, and return the record of the run."""
    started = time.perf_counter()
    federation, models = make_federation(run.dataset, run.split, run.seed), KeepModels()
    instrument = Instrument(models, EVERY)
    fs.run(
        federation,
        replace(fs.make_method(*METHODS[run.method]), server=models),
        small_network(federation),
        rounds=ROUNDS[run.per_round],
        clients_per_round=federation.clients if run.per_round == CLIENTS else run.per_round,
        callbacks=[instrument],
        progress=False,
        **SETTINGS,
    )
    pairs = contact_groups(federation.label_counts).sum(axis=(1, 2)) // 2
    seconds = round(time.perf_counter() - started, 1)
    return {**asdict(run), "pairs": pairs.tolist(), "measured": instrument.measured, "seconds": seconds}


def read_records(path: Path = RECORDS) -> dict[Run, dict[str, Any]]:
    """Read the records by run."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines]
    return {Run(**{name: record[name] for name in Run.__dataclass_fields__}): record for record in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("federations", nargs="*", help="for example mnist-shards; default: all")
    parser.add_argument("--records", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    path, known = arguments.records, read_records(arguments.records)
    path.parent.mkdir(parents=True, exist_ok=True)
    for run in all_runs():
        name = f"{run.dataset}-{run.split}"
        if run in known or name not in (arguments.federations or [name]):
            continue
        record = measure(run)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(run, record["measured"][-1], f"{record['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
