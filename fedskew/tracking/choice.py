"""Trackers by name."""

from __future__ import annotations

from collections.abc import Callable

from fedskew.errors import unknown
from fedskew.tracking.mlflow import MLflow
from fedskew.tracking.tensorboard import TensorBoard
from fedskew.tracking.tracker import FolderOf, Tracker
from fedskew.tracking.wandb import WandB

TRACKERS: dict[str, Callable[[FolderOf], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def make_trackers(names: str, folder_of: FolderOf) -> list[Tracker]:
    """Of `tensorboard,mlflow`; each refuses at once if its package is not there."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return [TRACKERS[name](folder_of) for name in dict.fromkeys(wanted)]
