"""Draw the clients of a round, and the samples that they train on."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedskew.data.federation import Federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.methods import Stage
from fedskew.randomness import sample

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Participants:
    """The clients of a round, with the samples that each trains on. A pooled cohort is a single client."""

    federation: Federation
    """All clients, with only the samples that the stage uses."""
    clients: IntArray
    """The clients' numbers, in ascending order."""
    samples: tuple[IntArray, ...]
    """Training samples of each participant in this round."""
    population: int
    """Number of clients in the federation, or in the stage if it names its clients."""

    @property
    def sizes(self) -> IntArray:
        """Number of samples of each participant, including those not in this round's batches."""
        return self.federation.sizes[self.clients]


class ClientSampler:
    """Draws the clients of each round.

    The draw depends only on the seed, the model's name and its round, unless a stage chooses clients or classes. So
    most methods get the same clients.
    """

    def __init__(self, federation: Federation, config: Config) -> None:
        self._federation, self._config = federation, config
        self._restricted: dict[tuple[int, ...], Federation] = {}

    def sample(self, stage: Stage, model_round: int) -> Participants:
        """Draw the participants of a round of the stage's model."""
        federation = self._with_labels(stage.labels)
        clients = self._draw(stage, model_round, federation)
        if stage.cohort == "pooled":
            return self._pool(stage, model_round, clients)
        indices = federation.joined_indices
        ends = indices.ends[clients]
        spans = zip(clients.tolist(), (ends - indices.sizes[clients]).tolist(), ends.tolist(), strict=True)
        samples = tuple(
            draw_samples(indices.samples[start:end], stage, model_round, client, self._config)
            for client, start, end in spans
        )
        population = len(self._federation.sizes) if stage.clients is None else len(stage.clients)
        return Participants(federation, clients, samples, population)

    def _with_labels(self, labels: tuple[int, ...] | None) -> Federation:
        if labels is None:
            return self._federation
        if labels not in self._restricted:
            self._restricted[labels] = self._federation.restrict(labels)
        return self._restricted[labels]

    def _draw(self, stage: Stage, model_round: int, federation: Federation) -> IntArray:
        eligible, per_round = federation.populated, None if stage.everyone else self._config.clients_per_round
        if stage.clients is not None:
            # The stage draws the same share of its clients as other stages draw of all clients.
            in_stage = np.isin(eligible, stage.clients)
            per_round = None if per_round is None else max(1, round(per_round * in_stage.sum() / len(eligible)))
            eligible = eligible[in_stage]
        if not len(eligible):
            restricted = "" if stage.labels is None else f" of classes {', '.join(map(str, stage.labels))}"
            raise UserError(f"stage {stage.name!r} has no client with samples{restricted}; expected at least one")
        number = min(per_round or len(eligible), len(eligible))
        key = (self._config.seed, "clients", model_number(stage.model), model_round)
        return np.sort(eligible[sample(number, len(eligible), *key)])

    def _pool(self, stage: Stage, model_round: int, drawn: IntArray) -> Participants:
        """Make one client with random samples of all clients, as many as the drawn clients have together."""
        all_samples = self._federation.samples
        budget = int(self._federation.sizes[drawn].sum())
        key = (self._config.seed, "pooled samples", model_number(stage.model), model_round)
        pool = all_samples[np.sort(sample(budget, len(all_samples), *key))]
        federation = Federation(self._federation.dataset, (pool,), {"name": "pooled"}, self._config.seed)
        return Participants(federation, np.zeros(1, np.int64), (pool,), 1)


def draw_samples(available: IntArray, stage: Stage, model_round: int, client: int, config: Config) -> IntArray:
    """The samples that a client trains on in a round: all that it has, or a few batches that are drawn anew."""
    if stage.local_batches is None or len(available) <= stage.local_batches * config.batch_size:
        return available
    key = (config.seed, "batches", model_number(stage.model), model_round, client)
    drawn: IntArray = available[sample(stage.local_batches * config.batch_size, len(available), *key)]
    return drawn


def model_number(model: str) -> int:
    """The integer that stands for a model in random-number keys. The global model has 0 in every method."""
    return 0 if model == "global" else zlib.crc32(model.encode())
