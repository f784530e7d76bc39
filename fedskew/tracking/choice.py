"""Choose trackers by name."""

from __future__ import annotations

from collections.abc import Callable

from fedskew.errors import unknown
from fedskew.tracking.trackers import FolderOf, MLflow, TensorBoard, Tracker, WandB

TRACKERS: dict[str, Callable[[FolderOf], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def make_trackers(names: str, folder_of: FolderOf) -> list[Tracker]:
    """Make the trackers in a list such as `tensorboard,mlflow`.

    Raise a UserError if a name is unknown or a package is missing.
    """
    requested = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in requested:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return [TRACKERS[name](folder_of) for name in dict.fromkeys(requested)]
