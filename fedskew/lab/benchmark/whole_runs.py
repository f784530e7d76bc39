"""Whole commands on a GPU, timed as a user waits for them: from the start of the process to its end.

In each round, 10 of 100 clients train the CNN, each on its own 600 images of 28×28 pixels, for 5 local epochs in
batches of 50.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedskew.data.published.idx import PARTS
from fedskew.lab.benchmark.commands import Command

ROUNDS = 100
_METHODS = "fedavg", "fedvls", "fedlmd", "fedrs"
_SEEDS = 3
_IMAGES = 60_000, 10_000
"""Numbers of training and of test images."""
_WORK = (
    "--data mnist --data-dir . --partition iid --clients 100 --clients-per-round 10 --model cnn --local-epochs 5 "
    "--batch-size 50 --lr 0.01"
)
"""The training described above, as options of `fedskew run` and `fedskew compare`."""
_GRID = f"""\
data: mnist
data_dir: .
partition: {{rule: iid, clients: 100}}
clients_per_round: 10
model: cnn
local_epochs: 5
batch_size: 50
lr: 0.01
rounds: {ROUNDS}
grid:
  method: [{", ".join(_METHODS)}]
seeds: {_SEEDS}
"""
"""The same training with all methods and seeds, for `fedskew sweep`."""
PRECISIONS = "bf16", "tf32", "float32"

# The names of the commands in the results. A run is of FedAvg, unless its name says otherwise.
IMPORTS = "imports of fedskew run"
FIRST = "fedskew run, 1 round, bf16, no kernel cached"
ONE_ROUND = {precision: f"fedskew run, 1 round, {precision}, second time" for precision in PRECISIONS}
FIRST_FEDVLS = FIRST.replace("1 round", "1 round of FedVLS")
ONE_ROUND_FEDVLS = ONE_ROUND["bf16"].replace("1 round", "1 round of FedVLS")
ALL_ROUNDS = {precision: f"fedskew run, {ROUNDS} rounds, {precision}" for precision in PRECISIONS}
COMPARE = f"fedskew compare, {len(_METHODS)} methods × {_SEEDS} seeds × {ROUNDS} rounds, bf16"
SWEEP = COMPARE.replace("compare", "sweep")

MAX_FIRST_SECONDS = 8.0
"""The maximum seconds that a run of one round may take after the imports, if no compiled kernel is in the caches."""
MAX_SECOND_SECONDS = 3.0
"""The maximum seconds that a run of one round may take after the imports, if the same command has run before."""
MAX_RUN_SECONDS = 9.0
"""The maximum seconds that a run of `ROUNDS` rounds in bf16 may take."""
MAX_SEVERAL_SECONDS = 60.0
"""The maximum seconds that a comparison or a sweep may take."""


@dataclass(frozen=True)
class WholeRuns:
    """The commands, in the order in which they are measured."""

    fill_caches: tuple[Command, ...]
    """Commands that run before the others, untimed. They compile the kernels, as a user's first runs do."""
    single: tuple[Command, ...]
    """The imports of `fedskew run`, and single runs."""
    several: tuple[Command, ...]
    """A comparison and a sweep."""


def whole_runs(device: str) -> WholeRuns:
    files = _mnist_files()
    options = "--device", device, "--out", "run"
    run = ("run", *_WORK.split(), "--method", "fedavg", *options)
    imports = Command((), "end", name=IMPORTS, python=("-c", "import fedskew.cli.running"))
    one_round = {
        precision: Command((*run, "--rounds", "1", "--precision", precision), "end", None, name, files=files)
        for precision, name in ONE_ROUND.items()
    }
    first = replace(one_round["bf16"], name=FIRST, empty_caches=True)
    fedvls = replace(
        one_round["bf16"], name=ONE_ROUND_FEDVLS,
        arguments=("run", *_WORK.split(), "--method", "fedvls", *options, "--rounds", "1", "--precision", "bf16"),
    )  # fmt: skip
    first_fedvls = replace(fedvls, name=FIRST_FEDVLS, empty_caches=True)
    all_rounds = tuple(
        Command((*run, "--rounds", str(ROUNDS), "--precision", precision), "end",
                MAX_RUN_SECONDS if precision == "bf16" else None, name, files=files)
        for precision, name in ALL_ROUNDS.items()
    )  # fmt: skip
    several = ("--methods", ",".join(_METHODS), "--seeds", str(_SEEDS), "--rounds", str(ROUNDS))
    machine = ("--device", device, "--precision", "bf16", "--out", "runs")
    compare = Command(("compare", *_WORK.split(), *several, *machine), "end", MAX_SEVERAL_SECONDS, COMPARE, files=files)
    grid = (*files, ("grid.yaml", _GRID.encode()))
    sweep = Command(("sweep", "grid.yaml", *machine), "end", MAX_SEVERAL_SECONDS, SWEEP, files=grid)
    return WholeRuns(
        (imports, *one_round.values(), fedvls),
        (imports, first, *one_round.values(), *all_rounds, first_fedvls, fedvls),
        (compare, sweep),
    )


def _mnist_files() -> tuple[tuple[str, bytes], ...]:
    """Make random images in the form of MNIST's files. Images of higher classes are brighter, so a model can learn."""
    rng = np.random.default_rng(0)
    contents = []
    for count in _IMAGES:
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        images = rng.integers(0, 128, (count, 28, 28), dtype=np.uint8) + 12 * labels[:, None, None]
        contents += [_idx(images), _idx(labels)]
    return tuple(zip(PARTS, contents, strict=True))


def _idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Write an array in IDX, the format of MNIST's files."""
    sides = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sides + array.tobytes()
