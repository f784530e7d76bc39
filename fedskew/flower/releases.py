"""How much privacy an update spends: that of the whole site, and that of one sample.

An update with noise consists of one or more Gaussian mechanisms with parameter μ = 2/z, for the noise multiplier z (see
`privacy.py`). Over rounds and runs, the squares of μ add up. This is exact for Gaussian mechanisms, even if a mechanism
depends on the results of earlier ones. In the terms of zCDP, ρ = Σ μ²/2. ε follows from the sum and δ. No amplification
by sampling is counted. An update without noise makes ε infinite.

    local     The site adds the noise to its update: one mechanism.
    central   The server says that it adds the noise to the mean, and the site has to trust it: one mechanism.
    example   The site adds noise to the gradients of single samples. In each epoch, there is one mechanism for each
              gradient that a local step computes.
    none      There is no noise.

There are two accounts: one of the privacy of the whole site, and one of the privacy of one sample. Noise that protects
the whole site also protects each sample, so local and central noise count in both accounts. Noise on the gradients of
single samples does not protect the whole site. In the account of the whole site, it counts as no noise.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.privacy import SENSITIVITY
from fedskew.flower.settings import FederationSettings
from fedskew.flower.wire import Facts, one_line
from fedskew.gaussian_privacy import gaussian_epsilon
from fedskew.methods import Method, make_method
from fedskew.methods.example_privacy import gradients_per_sample, require_private_gradients


@dataclass(frozen=True)
class Release:
    """An update that leaves the site."""

    run: str
    round: int
    privacy: str
    """The kind of privacy: local, central, example or none."""
    noise: float | None
    """The noise multiplier. None without noise."""
    mechanisms: int = 1
    """The number of Gaussian mechanisms that this update consists of."""

    @property
    def has_site_noise(self) -> bool:
        """Whether the site adds the noise itself, so that the same training gives another update each time."""
        return self.privacy in ("local", "example")

    def mu_squared(self, account: Account) -> float:
        """The sum of the squares of μ in an account. Infinite if no noise of this update counts in it."""
        if self.noise is None or (account.is_whole_site and self.privacy == "example"):
            return math.inf
        mu = SENSITIVITY[self.privacy] / self.noise
        return self.mechanisms * mu * mu  # infinite for tiny noise, where mu ** 2 would raise an error


@dataclass(frozen=True)
class Account:
    """One of the two accounts of a ledger."""

    key: str
    """The key of the budget in the policy."""
    budget_name: str
    """The budget's name in messages."""
    expected: str
    """The setting with which a run can keep to the budget, for messages."""

    @property
    def is_whole_site(self) -> bool:
        return self is SITE


SITE = Account("epsilon", "this site's budget", "federation.privacy = 'local'")
EXAMPLE = Account("example_epsilon", "this site's budget of one sample", "federation.privacy = 'example' or 'local'")
ACCOUNTS = (SITE, EXAMPLE)


def read_release(facts: Facts, method: Method) -> Release:
    """Describe the update that a request asks for. Refuse noise that the ledger cannot count."""
    local = facts["local"]
    kinds = {"local": facts["noise"], "central": facts.get("central_noise"), "example": _example_noise(local)}
    given = [kind for kind, noise in kinds.items() if noise is not None]
    if len(given) > 1:
        raise UserError(f"the server sets {' and '.join(given)} noise; expected one kind, which the ledger can count")
    privacy = given[0] if given else "none"
    multiplier = None
    if privacy != "none":
        values: Any = kinds[privacy]
        if not isinstance(values, list) or len(values) != 2 or not all(map(_is_positive, values)):
            raise UserError(
                f"the server sets clip and noise to {one_line(repr(values))}; expected two positive numbers"
            )
        multiplier = float(values[1])
    mechanisms = _count_gradients(method, local.get("epochs")) if privacy == "example" else 1
    return Release(one_line(str(facts["run"])), facts["key"]["round"] + 1, privacy, multiplier, mechanisms)


def _example_noise(local: Facts) -> list[Any] | None:
    """Return the clip and the noise of example-level privacy. None without it."""
    values = [local.get("example_clip"), local.get("example_noise")]
    return None if values == [None, None] else values


def _count_gradients(method: Method, epochs: Any) -> int:
    """Count the gradients of a round that use one given sample. Each of them is a Gaussian mechanism."""
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0:
        raise UserError(f"the server sets the local epochs to {one_line(repr(epochs))}; expected a whole number")
    return gradients_per_sample(method.solver, method.personal, epochs)


def planned_release(settings: FederationSettings, config: Config) -> Release:
    """Describe one update of a run by the run's settings. The name of the run and the round are left blank.

    With example-level privacy, refuse a method that it does not cover.
    """
    if settings.privacy == "example":
        method = make_method(config.method, config.method_params)
        require_private_gradients(method)
        return Release("", 0, "example", config.example_noise, _count_gradients(method, config.local_epochs))
    return Release("", 0, settings.privacy, None if settings.privacy == "none" else settings.noise)


def run_epsilon(settings: FederationSettings, config: Config, rounds: int) -> float:
    """Compute the ε of a run with noise, for a site that takes part in `rounds` rounds, or for one of its samples."""
    account = EXAMPLE if settings.privacy == "example" else SITE
    mu_squared = rounds * planned_release(settings, config).mu_squared(account)
    return gaussian_epsilon(math.sqrt(mu_squared), settings.delta)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
