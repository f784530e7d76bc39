"""What the models of a round do on the test set: the global one, and, where asked for, each client's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.federation import Federation
from fedskew.engine import Evaluator, ModelState
from fedskew.metrics.confusion import Evaluation
from fedskew.metrics.drift import drift_diversity, finite_or_none
from fedskew.metrics.groups import group_accuracy

Labels = tuple[int, ...] | None


class Tests:
    """Tests models on one test set."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator

    def of(self, model: ModelState, labels: Labels = None) -> Evaluation:
        """The model on the test set, or on its samples of these labels."""
        return Evaluation(self.evaluator.confusion(model, labels))

    def of_clients(
        self,
        sent: ModelState,
        trained: ModelState,
        clients: npt.NDArray[np.int64],
        finite: npt.NDArray[np.bool_],
        federation: Federation,
        labels: Labels,
        matrices: bool = False,
    ) -> dict[str, Any]:
        """Each client's model before and after its update, over its vacant, minority and majority classes; with the
        confusion `matrices`, which are large, where asked for."""
        before = self.of(sent, labels)
        local = []
        for row in np.flatnonzero(finite):
            client = int(clients[row])
            after = self.of(_of_client(trained, int(row)), labels)
            groups = {
                "vacant": federation.vacant(client),
                "minority": federation.minority(client),
                "majority": federation.majority(client),
            }
            local.append(
                {
                    "client": client,
                    "before": {"accuracy": before.accuracy} | group_accuracy(before.class_accuracy, groups),
                    "after": {"accuracy": after.accuracy} | group_accuracy(after.class_accuracy, groups),
                    "class_accuracy": after.class_accuracy,
                }
                | ({"confusion": after.confusion.tolist()} if matrices else {})
            )
        moves = (_flat_move(sent, trained, int(row)) for row in np.flatnonzero(finite))
        return {
            "local": local,
            "local_before": before.class_accuracy,
            "drift_diversity": finite_or_none(drift_diversity(moves)) if finite.any() else None,
        }


def _of_client(stacked: ModelState, row: int) -> ModelState:
    return ModelState(
        {name: t[row] for name, t in stacked.params.items()}, {name: t[row] for name, t in stacked.buffers.items()}
    )


def _flat_move(sent: ModelState, trained: ModelState, row: int) -> npt.NDArray[np.generic]:
    return np.concatenate(
        [(trained.params[name][row] - w).double().cpu().numpy().ravel() for name, w in sent.params.items()]
    )
