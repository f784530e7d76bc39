"""Domain and label skew together: every client has one domain, and a Dirichlet share of its classes (FPL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.data.partitions.dirichlet import Dirichlet
from fedskew.data.partitions.rule import IntArray, Labels, Partition, positive_number, register, whole_number
from fedskew.randomness import integer_key


@register
@dataclass(frozen=True)
class DomainDirichlet(Partition):
    """The clients are shared out to the domains, and each domain is divided among its own by a Dirichlet(beta) draw.

    Evenly, the first domains getting one more, unless `per_domain` says how many clients each has. Clients are
    numbered domain by domain.
    """

    name: ClassVar[str] = "domain-dirichlet"
    clients: int
    beta: float = 0.5
    min_size: int = 10
    per_domain: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        whole_number("clients", self.clients, at_least=1)
        positive_number("beta", self.beta)
        whole_number("min_size", self.min_size, at_least=1)
        if self.per_domain is not None:
            object.__setattr__(self, "per_domain", tuple(self.per_domain))
            for number in self.per_domain:
                whole_number("per_domain", number, at_least=1)

    @property
    def smallest(self) -> int:
        return self.min_size

    def draw(self, labels: Labels, seed: int) -> list[IntArray]:
        if labels.domain is None:
            raise self.refuse("the data have no domains; use dirichlet, or digits-domains")
        domains = int(labels.domain.max()) + 1
        parts: list[IntArray] = []
        for domain, clients in enumerate(self._shared_out(domains)):
            members = np.flatnonzero(labels.domain == domain)
            rule = Dirichlet(clients, self.beta, self.min_size)
            drawn = rule.draw(Labels(labels.y[members], labels.names), integer_key(seed, "partition domain", domain))
            parts += [members[part] for part in drawn]
        return parts

    def _shared_out(self, domains: int) -> tuple[int, ...]:
        if self.per_domain is None:
            if self.clients < domains:
                raise self.refuse(f"{self.clients} clients for {domains} domains; expected at least one each")
            even, more = divmod(self.clients, domains)
            return tuple(even + (domain < more) for domain in range(domains))
        if len(self.per_domain) != domains or sum(self.per_domain) != self.clients:
            raise self.refuse(f"expected {domains} numbers of clients, one a domain, {self.clients} in all")
        return self.per_domain
