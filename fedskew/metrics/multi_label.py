"""The results of a model that predicts any number of labels per sample."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedskew.metrics.confusion import Confusion, Evaluation


class MultiLabelEvaluation(Evaluation):
    """Results by label.

    `confusion[label, true, predicted]` counts samples. `true` is 1 if the sample has the label, and `predicted` is 1 if
    the model predicts the label.

    A model makes one decision per sample and label. `accuracy` is the share of correct decisions. It is high if labels
    are rare, so macro F1 and AUROC are better measures. `class_accuracy` is the sensitivity of each label: the share of
    its samples for which it was predicted.
    """

    _FORM = "labels × 2 × 2"

    @staticmethod
    def _has_form(counts: Confusion) -> bool:
        return counts.ndim == 3 and counts.shape[1:] == (2, 2)

    @property
    def samples(self) -> int:
        if self.totals is not None:  # they count one decision per sample and label
            return self.totals[1] // len(self.confusion)
        return int(self.confusion[0].sum())

    @property
    def class_samples(self) -> tuple[int, ...]:
        return tuple(self.confusion[:, 1].sum(axis=-1).tolist())

    @property
    def predictions(self) -> tuple[int, ...]:
        return tuple(self.confusion[:, :, 1].sum(axis=-1).tolist())

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the labels that occur in at least one sample or prediction."""
        hits, occurrences = self._hits, self._occurrences
        occurring = occurrences > 0
        return float(np.mean(2 * hits[occurring] / occurrences[occurring])) if occurring.any() else math.nan

    @property
    def micro_f1(self) -> float:
        """F1 of the pooled counts of all labels."""
        total = int(self._occurrences.sum())
        return 2 * int(self._hits.sum()) / total if total else math.nan

    @property
    def class_accuracy(self) -> tuple[float | None, ...]:
        """The sensitivity of each label, or None for a label without test samples."""
        counts = zip(self._hits.tolist(), self.class_samples, strict=True)
        return tuple(right / total if total else None for right, total in counts)

    @property
    def kappa(self) -> float:
        """Mean of Cohen's κ over the labels for which it is defined."""
        known = [value for counts in self.confusion if math.isfinite(value := _kappa_of_label(counts))]
        return float(np.mean(known)) if known else math.nan

    @property
    def _hits(self) -> npt.NDArray[np.int64]:
        hits: npt.NDArray[np.int64] = self.confusion[:, 1, 1]
        return hits

    @property
    def _occurrences(self) -> npt.NDArray[np.int64]:
        return np.array(self.class_samples, np.int64) + np.array(self.predictions, np.int64)


def _kappa_of_label(counts: Confusion) -> float:
    return Evaluation(counts).kappa if counts.any() else math.nan
