"""Callbacks that log runs to TensorBoard, MLflow and Weights & Biases, without a network connection.

All of them log the same metrics per round (`scalars`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import config_hash, run_name
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.metrics.confusion import MEASURES
from fedskew.metrics.multi_label import MultiLabelEvaluation
from fedskew.results.ranking import METRICS

FolderOf = Callable[[Prepared], Path]
"""Returns the folder of a run."""
EXPERIMENT = "fedskew"
EVERY_ROUND = "cost/seconds"
"""A metric that every round has. Its history in MLflow shows which rounds have been logged."""


def scalars(row: RoundRow) -> dict[str, float]:
    """Return the metrics of a round. Their prefixes group them in the tools."""
    found: dict[str, Any] = {
        "train/loss": row.loss,
        "train/lr": row.lr,
        "train/diverged": len(row.diverged),
        "cost/compute": row.compute,
        "cost/seconds": row.seconds,
        "cost/bytes": row.bytes_moved,
        "local/drift_diversity": row.drift_diversity,
    }
    found |= {f"tally/{name.replace(' ', '_')}": number for name, number in row.tally.items()}
    if row.is_evaluated:
        left_out = () if isinstance(row.evaluation, MultiLabelEvaluation) else ("micro_f1",)  # it is the accuracy
        found |= {f"test/{name}": getattr(row.evaluation, name) for name in MEASURES if name not in left_out}
        found |= {f"class/{c}": a for c, a in enumerate(row.required_evaluation.class_accuracy)}
    return {name: float(value) for name, value in found.items() if value is not None and value == value}


def final_scalars(result: Result) -> dict[str, float]:
    """Return the metrics that need the final model's probabilities, such as AUROC."""
    names = [metric.score for metric in METRICS.values() if metric.score is not None]
    found = {f"test/{name}": getattr(result.scores, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


class Tracker(Callback):
    """Logs one run after another. Each subclass writes to one tool."""

    def __init__(self, folder_of: FolderOf) -> None:
        self._folder_of = folder_of
        self._is_open = False
        self.skipped = 0
        """Number of runs that were not logged, because they were finished before."""

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:  # noqa: ARG002
        self.begin(prepared, self._folder_of(prepared), state.round)
        self._is_open = True

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:  # noqa: ARG002
        self.log(scalars(row), row.round)

    def on_end(self, result: Result) -> None:
        if self._is_open:  # a run that was already finished is not logged again
            if numbers := final_scalars(result):
                self.log(numbers, result.rounds)
            self.end(result)
            self._is_open = False
        else:
            self.skipped += 1

    def begin(self, prepared: Prepared, folder: Path, round: int) -> None:
        """Open the log of a run. The run resumes after `round`, or starts if `round` is 0."""
        raise NotImplementedError

    def log(self, numbers: dict[str, float], round: int) -> None:
        raise NotImplementedError

    def end(self, result: Result) -> None:
        raise NotImplementedError


class TensorBoard(Tracker):
    """Writes a `tensorboard` folder into each run folder. `tensorboard --logdir runs` shows them."""

    def __init__(self, folder_of: FolderOf) -> None:
        super().__init__(folder_of)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("--log tensorboard needs tensorboard: pip install 'fedskew[tracking]'") from error
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def begin(self, prepared: Prepared, folder: Path, round: int) -> None:
        self._writer = self._make(str(folder / "tensorboard"), purge_step=round + 1)  # hides rounds that are run again
        text = "\n".join(f"| {key} | {value} |" for key, value in _flat(prepared).items())
        self._writer.add_text("configuration", f"| key | value |\n|---|---|\n{text}")

    def log(self, numbers: dict[str, float], round: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)

    def end(self, result: Result) -> None:  # noqa: ARG002
        self._writer.close()


class MLflow(Tracker):
    """Writes `mlflow.db` beside the runs. `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows it."""

    def __init__(self, folder_of: FolderOf) -> None:
        super().__init__(folder_of)
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UserError("--log mlflow needs MLflow: pip install mlflow") from error
        self._make: Any = MlflowClient
        self._client: Any = None
        self._run = ""
        self._logged = 0
        """The last round that was logged before the run resumed. A round that is logged again would be shown twice."""

    def begin(self, prepared: Prepared, folder: Path, round: int) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._client = self._make(f"sqlite:///{(folder.parent / 'mlflow.db').absolute()}")
        known = self._client.get_experiment_by_name(EXPERIMENT)
        artifacts = (folder.parent / "mlruns").absolute().as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(EXPERIMENT, artifacts)
        name = run_name(prepared.config)
        attempts = self._client.search_runs([experiment], f"attributes.run_name = '{name}'")  # the newest first
        if attempts and round:
            self._run = attempts[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            history = self._client.get_metric_history(self._run, EVERY_ROUND)
            self._logged = max((metric.step for metric in history), default=0)
            return
        for run in attempts:  # the run starts again from the beginning, so earlier attempts have ended
            if run.info.status == "RUNNING":
                self._client.set_terminated(run.info.run_id, "KILLED")
        self._logged = 0
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in _flat(prepared).items():
            self._client.log_param(self._run, key, value)

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        if row.round > self._logged:
            super().on_round(row, rounds_ahead)

    def log(self, numbers: dict[str, float], round: int) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=round)

    def end(self, result: Result) -> None:  # noqa: ARG002
        self._client.set_terminated(self._run)


class WandB(Tracker):
    """Writes a `wandb` folder beside the runs, offline. `wandb sync` uploads it."""

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
            project=EXPERIMENT,
            name=run_name(prepared.config),
            id=config_hash(prepared.config),
            config=prepared.config.to_mapping(),
            dir=str(folder.parent),
            mode="offline",
            reinit="finish_previous",
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def log(self, numbers: dict[str, float], round: int) -> None:
        self._run.log(numbers, step=round)

    def end(self, result: Result) -> None:
        self._run.summary["accuracy"] = result.accuracy
        self._run.finish()


def _flat(prepared: Prepared) -> dict[str, str]:
    """Flatten the configuration to dotted keys. Values are cut to 250 characters, which all tools accept."""
    values: dict[str, str] = {}
    for key, value in prepared.config.to_mapping().items():
        if isinstance(value, dict):
            values |= {f"{key}.{inner}": str(v)[:250] for inner, v in value.items()}
        else:
            values[key] = str(value)[:250]
    return values
