"""A federation whose samples are at its sites.

The server knows how many samples each site has and, for some methods, how many have certain labels. With secure
aggregation, it knows neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from fedskew.data.dataset import Dataset
from fedskew.data.federation import Federation
from fedskew.data.partitions.rule import IntArray
from fedskew.flower.settings import SITES
from fedskew.flower.site_replies import usable_replies
from fedskew.flower.sites import Sites
from fedskew.flower.wire import is_count

_CENSUS_SECONDS = 600.0
"""Seconds in which sites must report how many samples they have with certain labels."""


class RemoteFederation(Federation):
    """A federation whose clients are sites. They report their numbers of samples, except with secure aggregation."""

    def __init__(
        self,
        dataset: Dataset,
        sites: Sites,
        seed: int,
        labels: tuple[int, ...] | None = None,
        column_sums_from: tuple[str, ...] = (),
    ) -> None:
        no_samples = np.empty(0, np.int64)
        super().__init__(dataset, (no_samples,) * len(sites.names), {"name": SITES, "names": list(sites.names)}, seed)
        # The dataclass `Federation` is frozen, so a plain assignment would fail.
        object.__setattr__(self, "_sites", sites)
        object.__setattr__(self, "_labels", labels)
        object.__setattr__(self, "_census", {})
        object.__setattr__(self, "_column_sums_from", column_sums_from)

    _sites: Sites
    _labels: tuple[int, ...] | None
    """Only samples with these labels count. None: all samples count."""
    _census: dict[int, int]
    """The sites' numbers of samples with these labels, by client."""
    _column_sums_from: tuple[str, ...]

    @property
    def column_sums_from(self) -> tuple[str, ...]:
        return self._column_sums_from

    @property
    def secure_aggregation(self) -> bool:
        return "secure_aggregation" in self._sites.terms

    @property
    def sizes(self) -> IntArray:
        """Samples per site, 0 while the number is unknown. After `restrict`, only samples with its `labels` count.

        With secure aggregation, the number is 1 when a site is admitted. After a round to which the site contributed,
        it is an even share of the contributors' samples.
        """
        if self._labels is None:
            return np.array(self._sites.samples, np.int64)
        self._count_at_new_sites(self._labels)
        return np.array([self._census.get(client, 0) for client in range(self.clients)], np.int64)

    @property
    def populated(self) -> IntArray:
        return np.flatnonzero(self.sizes)

    @cached_property
    def label_counts(self) -> IntArray:
        """Zeros, because the server does not know the counts."""
        return np.zeros((self.clients, self.classes), np.int64)

    @cached_property
    def hash(self) -> str:
        """Hash of the sites' names. It does not depend on their data, which may change."""
        return hashlib.sha256(json.dumps(list(self._sites.names)).encode()).hexdigest()

    @property
    def unused(self) -> int:
        return 0

    def restrict(self, labels: Sequence[int]) -> Federation:
        return RemoteFederation(self.dataset, self._sites, self.seed, tuple(labels), self._column_sums_from)

    def _count_at_new_sites(self, labels: tuple[int, ...]) -> None:
        """Ask connected sites for their numbers of samples with these labels, unless they have already replied."""
        facts = {client: {"labels": list(labels)} for client in self._sites.online if client not in self._census}
        for client, reply in usable_replies(self._sites.request("census", facts, b"", _CENSUS_SECONDS)):
            samples = reply.facts.get("samples")
            self._census[client] = samples if is_count(samples) else 0
