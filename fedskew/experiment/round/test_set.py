"""What the models of a round do on the test set: the global one, and, where asked for, each client's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.federation import Federation
from fedskew.engine import Evaluator, ModelState
from fedskew.experiment.round.client_rows import of_client
from fedskew.experiment.round.client_states import ClientStates
from fedskew.methods.parts import Tensors
from fedskew.metrics.confusion import Confusion, Evaluation, accuracy
from fedskew.metrics.drift import drift_diversity, finite_or_none
from fedskew.metrics.groups import group_accuracy

Labels = tuple[int, ...] | None


class Tests:
    """Tests models on one test set."""

    def __init__(self, evaluators: Mapping[str, Evaluator]) -> None:
        """One for each domain, which are reported, too; or a single one, whose name does not matter."""
        self._evaluators = evaluators
        self._seen: dict[int, tuple[int, Confusion]] = {}
        """By client: what its own model did, and of which round that model was."""

    def of_another_run(self) -> Tests:
        """The same for a run whose clients' models are others."""
        return Tests(self._evaluators)

    def of(self, model: ModelState, labels: Labels = None) -> Evaluation:
        """The model on the test set, or on its samples of these labels."""
        return Evaluation(self.confusion(model, labels))

    def confusion(self, model: ModelState, labels: Labels = None) -> Confusion:
        """The same as a matrix, which may be empty."""
        matrix: Confusion = np.sum(list(self._confusions(model, labels).values()), axis=0)
        return matrix

    def _confusions(self, model: ModelState, labels: Labels) -> dict[str, Confusion]:
        return {name: evaluator.confusion(model, labels) for name, evaluator in self._evaluators.items()}

    def row(self, model: ModelState, labels: Labels = None) -> dict[str, Any]:
        """The same as fields of `RoundRow`."""
        return _recorded(self._confusions(model, labels))

    def begun(self, model: ModelState, labels: Labels = None) -> Callable[[], dict[str, Any]]:
        """The same, to be waited for later."""
        under_way = {name: evaluator.begun(model, labels) for name, evaluator in self._evaluators.items()}
        return lambda: _recorded({name: read() for name, read in under_way.items()})

    def of_everyone(
        self, clients: Sequence[int], kept: ClientStates, model: str, own: Callable[[Tensors], ModelState]
    ) -> dict[str, Any]:
        """Every client's own model on the whole test set: their confusion matrices add up, so that every accuracy is
        the mean over clients. Only models that changed since are tested again."""
        versions = kept.versions.get(model, {})
        for client in clients:
            version = versions.get(client, 0)
            if self._seen.get(client, (-1,))[0] == version:
                continue
            untrained = next((seen for seen in self._seen.values() if seen[0] == version == 0), None)
            tensors = kept.of(model, [client])[0]
            self._seen[client] = untrained or (version, self.of(own(tensors)).confusion)
        matrices = [self._seen[client][1] for client in clients]
        total = Evaluation(np.sum(matrices, axis=0))
        return {"evaluation": total, "client_accuracy": [accuracy(matrix) for matrix in matrices]}

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
            after = self.of(of_client(trained, int(row)), labels)
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
                    "class_accuracy": list(after.class_accuracy),
                }
                | ({"confusion": after.confusion.tolist()} if matrices else {})
            )
        moves = (_flat_move(sent, trained, int(row)) for row in np.flatnonzero(finite))
        return {
            "local": local,
            "local_before": list(before.class_accuracy),
            "drift_diversity": finite_or_none(drift_diversity(moves)) if finite.any() else None,
        }


def _recorded(parts: Mapping[str, Confusion]) -> dict[str, Any]:
    row: dict[str, Any] = {"evaluation": Evaluation(np.sum(list(parts.values()), axis=0))}
    if len(parts) > 1:
        row["domain_accuracy"] = {n: accuracy(matrix) if matrix.any() else None for n, matrix in parts.items()}
    return row


def _flat_move(sent: ModelState, trained: ModelState, row: int) -> npt.NDArray[np.generic]:
    return np.concatenate(
        [(trained.params[name][row] - w).double().cpu().numpy().ravel() for name, w in sent.params.items()]
    )
