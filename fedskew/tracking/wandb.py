"""Weights & Biases, offline: a `wandb` folder beside the runs; `wandb sync` sends it, if one wants that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import config_hash, run_name
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.tracking.tracker import FolderOf, Tracker


class WandB(Tracker):
    def __init__(self, folder_of: FolderOf) -> None:
        super().__init__(folder_of)
        try:
            import wandb
        except ImportError as error:
            raise UserError("--log wandb needs Weights & Biases: pip install wandb") from error
        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, prepared: Prepared, folder: Path, round: int) -> None:  # noqa: ARG002
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project="fedskew",
            name=run_name(prepared.config),
            id=config_hash(prepared.config),
            config=prepared.config.to_mapping(),
            dir=str(folder.parent),
            mode="offline",
            reinit="finish_previous",
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def tell(self, numbers: dict[str, float], round: int) -> None:
        self._run.log(numbers, step=round)

    def end(self, result: Result) -> None:
        self._run.summary["accuracy"] = result.accuracy
        self._run.finish()
