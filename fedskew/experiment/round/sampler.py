"""Who takes part in a round, and with which samples."""

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
    """A round's clients, in order, with what each has and trains on."""

    federation: Federation
    clients: IntArray
    samples: tuple[IntArray, ...]
    """By participant: what it trains on in this round."""
    population: int
    """Of how many clients the round is one."""

    @property
    def sizes(self) -> IntArray:
        """Each participant's samples, also those that it does not train on now."""
        return self.federation.sizes[self.clients]


class Enlistment:
    """Draws clients without regard to the method, so that all methods meet the same ones."""

    def __init__(self, federation: Federation, config: Config) -> None:
        self._federation, self._config = federation, config
        self._restricted: dict[tuple[int, ...], Federation] = {}

    def of(self, stage: Stage, model_round: int) -> Participants:
        """The participants of a model's round."""
        federation = self._of_labels(stage.labels)
        clients = self._drawn(stage, model_round, federation)
        if stage.cohort == "pooled":
            return self._pooled(stage, model_round, clients)
        indices = federation.indices
        samples = tuple(
            trained_on(indices[client], stage, model_round, client, self._config) for client in clients.tolist()
        )
        population = self._federation.clients if stage.clients is None else len(stage.clients)
        return Participants(federation, clients, samples, population)

    def _of_labels(self, labels: tuple[int, ...] | None) -> Federation:
        if labels is None:
            return self._federation
        if labels not in self._restricted:
            self._restricted[labels] = self._federation.restrict(labels)
        return self._restricted[labels]

    def _drawn(self, stage: Stage, model_round: int, federation: Federation) -> IntArray:
        eligible, a_round = federation.populated, self._config.clients_per_round
        if stage.clients is not None:
            share = np.isin(eligible, stage.clients)
            a_round = None if a_round is None else max(1, round(a_round * share.sum() / len(eligible)))
            eligible = eligible[share]
        if not len(eligible):
            raise UserError(f"stage {stage.name!r} has no client with samples of classes {stage.labels}")
        wanted = min(a_round or len(eligible), len(eligible))
        key = (self._config.seed, "clients", model_number(stage.model), model_round)
        return np.sort(eligible[sample(wanted, len(eligible), *key)])

    def _pooled(self, stage: Stage, model_round: int, drawn: IntArray) -> Participants:
        """One client with as many samples as those drawn have together: of all samples, drawn anew each round."""
        everything = np.concatenate(self._federation.indices)
        budget = int(self._federation.sizes[drawn].sum())
        key = (self._config.seed, "pooled samples", model_number(stage.model), model_round)
        pool = everything[np.sort(sample(budget, len(everything), *key))]
        federation = Federation(self._federation.dataset, (pool,), {"name": "pooled"}, self._config.seed)
        return Participants(federation, np.zeros(1, np.int64), (pool,), 1)


def trained_on(own: IntArray, stage: Stage, model_round: int, client: int, config: Config) -> IntArray:
    """What a client with these samples trains on in a round: all of them, or some batches, drawn anew."""
    if stage.local_batches is None or len(own) <= stage.local_batches * config.batch_size:
        return own
    key = (config.seed, "batches", model_number(stage.model), model_round, client)
    some: IntArray = own[sample(stage.local_batches * config.batch_size, len(own), *key)]
    return some


def model_number(model: str) -> int:
    """What keys a model's randomness; the global model's is 0, in every method."""
    return 0 if model == "global" else zlib.crc32(model.encode())
