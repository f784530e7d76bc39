"""The result of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedskew.experiment.config import Config
from fedskew.experiment.round.row import RoundRow
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.summary import CurveSummary

STATUS = "finished"


@dataclass(frozen=True)
class Result:
    """What came out of a run."""

    config: Config
    history: list[RoundRow]
    """One row a round; row 0 is the initial model."""
    evaluation: Evaluation
    """Of the final global model."""
    curve: CurveSummary
    """Best, last and mean-of-last accuracy."""
    model: nn.Module
    seconds: float
    engine: str
    """What executed the local training: what `auto` came to, if that was asked for."""
    folder: Path | None = None

    @property
    def accuracy(self) -> float:
        """Of the final global model on the test set."""
        return self.evaluation.accuracy

    @property
    def class_accuracy(self) -> tuple[float | None, ...]:
        return self.evaluation.class_accuracy

    @property
    def accuracy_curve(self) -> list[tuple[int, float]]:
        """The evaluated rounds of the global model and the accuracy after each."""
        return accuracy_curve(evaluated_rows(self.history))

    @property
    def domain_accuracy(self) -> dict[str, float | None]:
        """Of the final global model on each domain's test samples, where the data have domains."""
        return evaluated_rows(self.history)[-1].domain_accuracy or {}

    @property
    def diverged(self) -> int:
        """How many client updates were not finite and were left out."""
        return sum(len(row.diverged) for row in self.history)

    @property
    def compute(self) -> float:
        """Local computation in units of one plain local round of each participant."""
        return float(sum(row.compute for row in self.history))

    def summary(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "status": STATUS,
            "method": self.config.method,
            "seed": self.config.seed,
            "rounds": len(self.history) - 1,
            "accuracy": self.accuracy,
            **self.curve.to_json(),
            "final": self.evaluation.to_json(),
            **({"domain_accuracy": self.domain_accuracy} if self.domain_accuracy else {}),
            "diverged": self.diverged,
            "compute": self.compute,
            "notes": self.history[-1].notes,
            "seconds": self.seconds,
            "engine": self.engine,
        }


def evaluated_rows(rows: Sequence[RoundRow]) -> list[RoundRow]:
    """The rows with an evaluation of the global model."""
    return [row for row in rows if row.is_evaluated]


def accuracy_curve(evaluated: Sequence[RoundRow]) -> list[tuple[int, float]]:
    """By round of the global model: experts' rounds in between do not count, as the papers count."""
    return [(row.model_round, row.accuracy) for row in evaluated]
