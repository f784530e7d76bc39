"""Check that all methods still end with the same bits: compare digests of final models and rows, on both engines.

    OMP_NUM_THREADS=1 python tools/final_states.py write before.json  # at the commit to compare with
    OMP_NUM_THREADS=1 python tools/final_states.py check before.json  # after a change that must not change any number

The bits depend on the machine, on the version of torch and on the number of NumPy's threads, so a file is only valid
where it was written.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fedskew as fs
from fedskew.methods import METHODS

ENGINES = ("plain", "stacked")
COMBINATIONS = ("fedlmd+fedprox+fedavgm", "fedvls+fedsam+fedexp", "fedntd+scaffold", "moon+feddyn", "fedrs+fednova")
NOT_NUMBERS = ("seconds", "time")
LATER_MEASURES = ("kappa", "log_loss")
"""Keys of an evaluation that later versions added."""


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """List the method, model and settings of each run."""
    for method in (*sorted(set(METHODS)), *COMBINATIONS):
        yield method, "dnn", {}
    for method in ("fedavg", "fedvls", "scaffold", "pkd"):
        yield method, "resnet8", {"momentum": 0.0, "weight_decay": 1e-4, "lr_decay": 0.9, "clip_norm": 1.0}
        yield method, "dnn", {"precision": "float64", "eval_local": True, "average": "uniform", "eval_every": 2}


def digest(result: fs.Result) -> str:
    """Hash all numbers of a run."""
    sha = hashlib.sha256()
    for name, tensor in sorted(result.model.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else str(tensor).encode())
    for row in result.history:
        kept = {key: value for key, value in row.to_json().items() if key not in NOT_NUMBERS}
        if "evaluation" in kept:
            kept["evaluation"] = {key: v for key, v in kept["evaluation"].items() if key not in LATER_MEASURES}
        sha.update(json.dumps(kept, sort_keys=True, default=str).encode())
    return sha.hexdigest()


def final_states() -> dict[str, str]:
    """Compute the digest of every case on every engine."""
    torch.set_num_threads(1)
    federation = fs.federation("digits", fs.Dirichlet(beta=0.1, clients=6), seed=0)
    digests = {}
    for method, model, settings in cases():
        for engine in ENGINES:
            name = f"{method} {model} {engine} {settings}"
            try:
                result = fs.run(
                    federation,
                    method,
                    model,
                    engine=engine,
                    device="cpu",
                    rounds=4,
                    clients_per_round=4,
                    local_epochs=1,
                    batch_size=20,
                    **settings,
                )
                digests[name] = digest(result)
            except fs.UserError as error:
                digests[name] = f"refused: {error}"
    return digests


def main() -> int:
    """Write the digests, or compare them with a file."""
    command, path = sys.argv[1], Path(sys.argv[2])
    found = final_states()
    if command == "write":
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} final states written to {path}")
        return 0
    before = json.loads(path.read_text(encoding="utf-8"))
    differing = [name for name in before if before[name] != found.get(name)]
    for name in differing:
        print(f"differs: {name}\n  before {before[name]}\n  now    {found.get(name)}")
    print(f"{len(before) - len(differing)} of {len(before)} final states have the same bits")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
