"""MLflow: a database `mlflow.db` beside the runs; `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import run_name
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.tracking.tracker import FolderOf, Tracker, flat

EXPERIMENT = "fedskew"


class MLflow(Tracker):
    def __init__(self, folder_of: FolderOf) -> None:
        super().__init__(folder_of)
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UserError("--log mlflow needs MLflow: pip install mlflow") from error
        self._make: Any = MlflowClient
        self._client: Any = None
        self._run = ""

    def begin(self, prepared: Prepared, folder: Path, round: int) -> None:  # noqa: ARG002
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._client = self._make(f"sqlite:///{(folder.parent / 'mlflow.db').absolute()}")
        known = self._client.get_experiment_by_name(EXPERIMENT)
        place = (folder.parent / "mlruns").absolute().as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT, place)
        name = run_name(prepared.config)
        before = self._client.search_runs([experiment], f"attributes.run_name = '{name}'")
        if before:
            self._run = before[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in flat(prepared).items():
            self._client.log_param(self._run, key, value)

    def tell(self, numbers: dict[str, float], round: int) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=round)

    def end(self, result: Result) -> None:  # noqa: ARG002
        self._client.set_terminated(self._run)
