"""Methods and their hyper-parameters for tests in which engines must agree."""

from __future__ import annotations

from typing import Any

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}

PARAMS: dict[str, dict[str, Any]] = {
    "pkd": {"groups": [[0, 1], [1, 2, 3]], "expert_rounds": 2},
    "pfedme": {"personal_lr": 0.02},
}
"""pFedMe's default, five steps of 0.05 on one small batch through BatchNorm, makes a start that is off by 1e-7 a model
that is off by 6e-3, in float64 and by either engine: rounding that no two programs share. As many steps of the run's
own size make it 1e-6."""

JOINED = ("fedlmd+scaffold", "fedvls+fedprox+fedavgm", "fpl+fedvls", "moon+fedcurv")

KEEP_MOVES = ("scaffold", "fedadagrad", "fedyogi", "fedadam")
"""Methods whose state is a move, or a move over lr: the smaller lr, the larger is rounding beside it."""
