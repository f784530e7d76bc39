"""The terms of secure aggregation. The server sends them with every request.

A site refuses terms that differ from the settings of the app that it approved (`request_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.secure.fixed_point import FEWEST_BITS, FixedPoint
from fedskew.flower.secure.identity import require_different_keys
from fedskew.flower.secure.session import FEWEST_SITES, LEAST_THRESHOLD, count_needed
from fedskew.flower.wire import Facts

if TYPE_CHECKING:
    from fedskew.flower.settings import FederationSettings


@dataclass(frozen=True)
class SecureTerms:
    """What all sites of a federation must agree on."""

    needed: int
    """The smallest number of sites that can unmask a sum."""
    largest_change: float
    """The largest change of a single number of the model at a site."""
    most_samples: int
    """The largest weight that a site may have in the average, in samples."""
    roster: dict[str, str]
    """The public node key of every site."""

    @property
    def encoding(self) -> FixedPoint:
        return FixedPoint(len(self.roster), self.most_samples, self.largest_change)

    def to_json(self) -> Facts:
        return asdict(self)

    @classmethod
    def from_settings(cls, settings: FederationSettings, config: Config) -> SecureTerms:
        needed = count_needed(_planned(config, len(settings.sites)), settings.secure_threshold)
        return cls(needed, settings.largest_change, settings.most_samples, dict(settings.node_keys or {}))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SecureTerms:
        """Read the terms that a server sent."""
        try:
            roster = {str(name): str(key) for name, key in values["roster"].items()}
            terms = cls(int(values["needed"]), float(values["largest_change"]), int(values["most_samples"]), roster)
            bits = terms.encoding.fraction_bits
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise UserError("the server's terms of secure aggregation cannot be read") from error
        if bits < FEWEST_BITS:
            raise UserError(
                f"the server's terms of secure aggregation leave {bits} bits after the binary point; expected at least "
                f"{FEWEST_BITS}"
            )
        return terms

    def require_protection(self, config: Config) -> None:
        """Refuse terms that would not protect a site."""
        if len(self.roster) < FEWEST_SITES:
            raise UserError(f"secure aggregation has {len(self.roster)} sites; expected at least {FEWEST_SITES}")
        require_different_keys(self.roster)
        least = count_needed(_planned(config, len(self.roster)), LEAST_THRESHOLD)
        if self.needed < least:
            raise UserError(
                f"secure aggregation needs {self.needed} sites for a sum; this site expects at least {least}"
            )


def _planned(config: Config, sites: int) -> int:
    """The number of sites with which a round is planned."""
    return min(config.clients_per_round or sites, sites)


def secure_terms(settings: FederationSettings, config: Config) -> Facts:
    """The entry for secure aggregation in the terms of a run. Empty if the run does not use it."""
    if not settings.secure_aggregation:
        return {}
    return {"secure_aggregation": SecureTerms.from_settings(settings, config).to_json()}
