"""Whole commands on a GPU, timed from the start of the process to its end, as a user waits for them.

In each round, 10 of 100 clients train the CNN on 600 images of 28×28 each, for 5 local epochs in batches of 50.
"""

from __future__ import annotations

from fedskew.lab.benchmark.commands import Command

ROUNDS = 100
_METHODS = "fedavg", "fedvls", "fedlmd", "fedrs"
_SEEDS = 3
_WORK = (
    "--data synthetic --set data.image=[28,28] --set data.samples=75000 --partition iid --clients 100 "
    "--clients-per-round 10 --model cnn --local-epochs 5 --batch-size 50 --lr 0.01"
)
_GRID = f"""\
data: {{name: synthetic, image: [28, 28], samples: 75000}}
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
IMPORTS = "fedskew run, imports only"
FIRST, SECOND = "fedskew run, 1 round, nothing cached", "fedskew run, 1 round, second time"
FORMATS = {precision: f"fedskew run, {ROUNDS} rounds, {precision}" for precision in ("bf16", "tf32", "float32")}
COMPARE = f"fedskew compare, {len(_METHODS)} methods × {_SEEDS} seeds × {ROUNDS} rounds"
SWEEP = COMPARE.replace("compare", "sweep")

FIRST_ROUND = 8.0
"""The most seconds of a first round after the imports, if no kernel was compiled on this machine before."""
SECOND_TIME = 3.0
"""The most seconds of a first round after the imports, if the same command has run before."""
FLOAT32_ROUND = 0.070
"""The most seconds of a round in float32."""


def whole_runs(device: str) -> tuple[Command, ...]:
    """List the commands. Each finds the kernels that earlier ones compiled, unless its caches are empty."""
    run = ("run", *_WORK.split(), "--method", "fedavg", "--device", device)
    one = (*run, "--rounds", "1", "--precision", "bf16", "--out", "run")
    many = (*run, "--rounds", str(ROUNDS), "--out", "run")
    several = ("--methods", ",".join(_METHODS), "--seeds", str(_SEEDS), "--rounds", str(ROUNDS), "--out", "runs")
    compare = ("compare", *_WORK.split(), "--device", device, "--precision", "bf16", *several)
    sweep = ("sweep", "grid.yaml", "--device", device, "--precision", "bf16", "--out", "runs")
    return (
        Command((), "end", name=IMPORTS, python=("-c", "import fedskew.cli.running")),
        Command(one, "end", name=FIRST, empty_caches=True),
        Command(one, "end", name=f"{SECOND}, to fill the caches"),
        Command(one, "end", name=SECOND),
        *(Command((*many, "--precision", precision), "end", 9.0 if precision == "bf16" else None, name)
          for precision, name in FORMATS.items()),
        Command(compare, "end", 60.0, COMPARE),
        Command(sweep, "end", 60.0, SWEEP, files=(("grid.yaml", _GRID),)),
    )  # fmt: skip
