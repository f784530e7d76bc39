"""The confusion matrix, and the metrics that it determines.

Rows are true classes, and columns are predictions. The matrices of batches, sites and clients can be added, so nobody
has to store predictions. The matrix does not determine the log loss, which is stored beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Confusion = npt.NDArray[np.int64]


def accuracy(confusion: Confusion) -> float:
    """Return the share of correct predictions. With several labels per sample, each label is a prediction."""
    return correct(confusion) / int(confusion.sum())


def correct(confusion: Confusion) -> int:
    """Return the number of correct predictions. With several labels per sample, each label is a prediction."""
    return int(np.trace(confusion, axis1=-2, axis2=-1).sum())


MEASURES = (
    "accuracy", "macro_f1", "micro_f1", "worst_class", "mean_class", "best_class", "class_gap", "kappa", "log_loss",
)  # fmt: skip
"""The metrics that are single numbers. Each is an attribute of `Evaluation`.

To add a metric, write the property and list it here. It then appears in rounds.jsonl, in `to_frame()` and in
experiment trackers.
"""
LOST = 0.05
"""A class is lost if its accuracy is below this."""


def lost_classes(class_accuracy: Iterable[float | None]) -> list[int]:
    """Return the classes whose accuracy is below `LOST`. Classes without test samples (None) are skipped."""
    return [c for c, a in enumerate(class_accuracy) if a is not None and a < LOST]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model's results on a test set.

    For a method without a global model, the confusion matrices of all clients' models on the same test set are summed.
    The accuracy, also by class, is then the mean over the models. Metrics such as macro F1 or the worst class are
    those of the sum, not means over the models.
    """

    confusion: Confusion
    totals: tuple[int, int] | None = None
    """The numbers of correct predictions and of all predictions, if sites report only these. The matrix is then zero,
    and metrics that need it are NaN or None."""
    log_loss: float | None = None
    """The mean of −log p of the true class, in nats. With several labels per sample, the mean binary cross entropy of
    the labels. None or NaN if it is unknown. `==` ignores it, because engines agree on it only up to rounding."""

    def __post_init__(self) -> None:
        matrix = np.array(self.confusion, dtype=np.int64)
        if not self._has_form(matrix):
            raise ValueError(f"the confusion matrix has shape {matrix.shape}; expected {self._FORM}")
        if self.totals is not None and (matrix.any() or not 0 <= self.totals[0] <= self.totals[1] != 0):
            raise ValueError(
                f"totals are {self.totals}; expected numbers of correct and of all predictions, with a matrix of zeros"
            )
        if matrix.min(initial=0) < 0 or (matrix.sum() == 0 and self.totals is None):
            raise ValueError("the confusion matrix is empty or has a negative cell; expected counts of samples")
        matrix.flags.writeable = False
        object.__setattr__(self, "confusion", matrix)

    _FORM: ClassVar[str] = "a square matrix"

    @staticmethod
    def _has_form(counts: Confusion) -> bool:
        return counts.ndim == 2 and counts.shape[0] == counts.shape[1]

    @staticmethod
    def from_counts(
        counts: Confusion, totals: tuple[int, int] | None = None, log_loss: float | None = None
    ) -> Evaluation:
        """Make an evaluation from counts: [C, C] for one class per sample, [labels, 2, 2] for several labels."""
        if counts.ndim == 2:
            return Evaluation(counts, totals, log_loss)
        from fedskew.metrics.multi_label import MultiLabelEvaluation  # most runs do not need it

        return MultiLabelEvaluation(counts, totals, log_loss)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Evaluation):
            return False
        return self.totals == other.totals and np.array_equal(self.confusion, other.confusion)

    def __hash__(self) -> int:
        return hash((self.confusion.tobytes(), self.totals))

    @property
    def samples(self) -> int:
        return int(self.confusion.sum()) if self.totals is None else self.totals[1]

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return accuracy(self.confusion) if self.totals is None else self.totals[0] / self.totals[1]

    @property
    def class_samples(self) -> tuple[int, ...]:
        """The number of test samples of each class."""
        return tuple(self.confusion.sum(axis=1).tolist())

    @property
    def predictions(self) -> tuple[int, ...]:
        """How often each class was predicted."""
        return tuple(self.confusion.sum(axis=0).tolist())

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes that occur among labels or predictions, as in scikit-learn."""
        occurrences = self.confusion.sum(axis=1) + self.confusion.sum(axis=0)
        occurring = occurrences > 0
        if not occurring.any():
            return float("nan")
        return float(np.mean(2 * np.diag(self.confusion)[occurring] / occurrences[occurring]))

    @property
    def micro_f1(self) -> float:
        """F1 of the pooled counts of all classes. With one label per sample, it is the accuracy."""
        return self.accuracy

    @property
    def class_accuracy(self) -> tuple[float | None, ...]:
        """The share of each class's samples predicted correctly, or None for a class without test samples."""
        counts = zip(np.diag(self.confusion).tolist(), self.confusion.sum(axis=1).tolist(), strict=True)
        return tuple(right / total if total else None for right, total in counts)

    @property
    def worst_class(self) -> float:
        """The accuracy of the class that is predicted worst."""
        return min(self._tested_accuracies, default=float("nan"))

    @property
    def mean_class(self) -> float:
        """Mean accuracy over the classes with test samples, known as balanced accuracy."""
        return float(np.nanmean(np.array(self.class_accuracy, float))) if self._tested_accuracies else float("nan")

    @property
    def kappa(self) -> float:
        """Cohen's κ, the agreement beyond chance. NaN if it is unknown, or if all samples and predictions are of one
        class."""
        total = self.confusion.sum()
        if not total:
            return float("nan")
        expected = float(self.confusion.sum(axis=1) @ self.confusion.sum(axis=0)) / float(total) ** 2
        return (accuracy(self.confusion) - expected) / (1 - expected) if expected < 1 else float("nan")

    @property
    def best_class(self) -> float:
        """The accuracy of the class that is predicted best."""
        return max(self._tested_accuracies, default=float("nan"))

    @property
    def class_gap(self) -> float:
        """Best minus worst class: how unequal the accuracies of the classes are."""
        return self.best_class - self.worst_class

    @property
    def _tested_accuracies(self) -> list[float]:
        """The accuracies of the classes with test samples."""
        return [a for a in self.class_accuracy if a is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the metrics, the matrix, and the totals if there are any.

        NaN and infinity become None. A log loss of None is left out.
        """
        known = {name: value for name in MEASURES if (value := getattr(self, name)) is not None}
        values: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in known.items()}
        if self.totals is not None:
            values["totals"] = list(self.totals)
        return values | {"class_accuracy": list(self.class_accuracy), "confusion": self.confusion.tolist()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Evaluation:
        """Read what `to_json` returned. The matrix, the totals and the log loss determine all other values."""
        totals = data.get("totals")
        matrix = np.asarray(data["confusion"], dtype=np.int64)
        return Evaluation.from_counts(matrix, (totals[0], totals[1]) if totals else None, data.get("log_loss"))
