"""Evaluation on samples that clients hold out of their own data: the configuration key `client_test`.

In a round with an evaluation, the new global model is evaluated on every client's held-out samples. If there is no
global model, each client's own model is evaluated instead. A method with both, such as Ditto, has both evaluated.
FedBABU fine-tunes the global model for each client, and the fine-tuned models are evaluated only at the end of the run.
The participants' models are also evaluated before and after their local training, except for `centralised` and
`local-only`. Rounds that train another model, such as PKD's experts, are left out. After the last round, each client's
own model is scored if it has one, or else the global model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from fedskew.data.federation import Federation
from fedskew.engine import Evaluator, ModelState
from fedskew.metrics.site_scores import SiteScore, correct_shares, score_site

ModelFor = Callable[[int], ModelState]
"""Returns the model to evaluate for a client."""


class ClientTests:
    """Evaluates models on the clients' held-out samples."""

    def __init__(self, federation: Federation, evaluator: Evaluator) -> None:
        self._federation, self._evaluator = federation, evaluator
        self._rows = {k: rows for k, rows in enumerate(federation.held_out) if len(rows)}
        """The held-out rows of the training set, by client."""

    def measure(
        self, model: ModelState, sent: ModelState | None = None, trained: Mapping[int, ModelState] | None = None
    ) -> dict[str, list[float | None]]:
        """Measure the accuracy of the new global model on each client's held-out samples.

        With `sent` and `trained`, also measure the participants' models before and after local training. Each list has
        one entry per client of the federation, which is None for a client that was not evaluated.
        """
        fields = {"accuracy": self._accuracies(model, list(self._rows))}
        if sent is not None and trained is not None:
            participants = self.with_held_out(trained)
            fields["before"] = self._accuracies(sent, participants)
            fields["after"] = self.measure_own_models(trained.__getitem__, participants)
        return fields

    def with_held_out(self, clients: Iterable[int]) -> list[int]:
        """Select the clients that have held-out samples."""
        return [client for client in clients if client in self._rows]

    def measure_own_models(self, model_for: ModelFor, clients: list[int] | None = None) -> list[float | None]:
        """Measure the accuracy of each client's own model on its held-out samples."""
        found: list[float | None] = [None] * self._federation.clients
        for client in self._rows if clients is None else clients:
            correct = self._correct_shares(model_for(client), self._rows[client])
            found[client] = float(correct.mean())
        return found

    def scores(self, model_for: ModelFor, positive: int | None) -> dict[str, SiteScore]:
        """Score a model for each client that has held-out samples, by the client's name."""
        names = self._federation.client_labels
        found = {}
        for client, rows in self._rows.items():
            probabilities, true = self._evaluator.probabilities(model_for(client), rows)
            found[names[client]] = score_site(probabilities.cpu().numpy(), true.cpu().numpy(), positive)
        return found

    def _accuracies(self, model: ModelState, clients: list[int]) -> list[float | None]:
        """Evaluate one model for these clients, in one pass."""
        found: list[float | None] = [None] * self._federation.clients
        if not clients:
            return found
        parts = [self._rows[client] for client in clients]
        correct = self._correct_shares(model, np.concatenate(parts))
        for client, part in zip(clients, np.split(correct, np.cumsum([len(rows) for rows in parts])[:-1]), strict=True):
            found[client] = float(part.mean())
        return found

    def _correct_shares(self, model: ModelState, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return each sample's share of correct predictions. With one class per sample, the share is 0 or 1."""
        probabilities, true = self._evaluator.probabilities(model, rows)
        return correct_shares(probabilities.cpu().numpy(), true.cpu().numpy())
