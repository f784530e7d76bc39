"""The terms of secure aggregation. The server sends them with every request, and sites compare them with the app."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedskew.errors import UserError
from fedskew.flower.secure.fixed_point import FixedPoint
from fedskew.flower.secure.session import FEWEST_SITES, LEAST_THRESHOLD
from fedskew.flower.wire import Facts

if TYPE_CHECKING:
    from fedskew.flower.settings import FederationSettings


@dataclass(frozen=True)
class SecureTerms:
    """What all sites of a federation must agree on."""

    threshold: float
    """The share of a session's sites that can unmask its sum."""
    largest_change: float
    """The largest number in a site's change of the model."""
    most_samples: int
    """The largest weight of a site."""
    roster: dict[str, str]
    """The public node key of every site."""

    @property
    def encoding(self) -> FixedPoint:
        return FixedPoint(len(self.roster), self.most_samples, self.largest_change)

    def to_json(self) -> Facts:
        return asdict(self)

    @classmethod
    def from_settings(cls, settings: FederationSettings) -> SecureTerms | None:
        """The terms of a federation. None if it has no secure aggregation."""
        if not settings.secure_aggregation:
            return None
        roster = dict(settings.node_keys or {})
        return cls(settings.secure_threshold, settings.largest_change, settings.most_samples, roster)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SecureTerms:
        """Read the terms that a server sent. Refuse those that would not protect the site."""
        try:
            roster = {str(name): str(key) for name, key in values["roster"].items()}
            terms = cls(
                float(values["threshold"]), float(values["largest_change"]), int(values["most_samples"]), roster
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError("the server's terms of secure aggregation cannot be read") from error
        if not LEAST_THRESHOLD - 1e-9 <= terms.threshold <= 1:
            raise UserError(f"the threshold of secure aggregation is {terms.threshold:g}; expected 2/3 to 1")
        if len(roster) < FEWEST_SITES:
            raise UserError(f"secure aggregation has {len(roster)} sites; expected at least {FEWEST_SITES}")
        return terms


def secure_terms(settings: FederationSettings) -> Facts:
    """The entry for secure aggregation in the terms of every request. Empty without secure aggregation."""
    terms = SecureTerms.from_settings(settings)
    return {} if terms is None else {"secure_aggregation": terms.to_json()}
