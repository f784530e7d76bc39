"""Differential privacy of whole sites: clipped changes, Gaussian noise, and the ε that a run has come to.

    central   the server clips every site's change to norm C and adds noise of deviation z·C/K to the mean of the K:
              whoever sees the models of the run learns little of whether any one site took part
    local     every site clips its change and adds noise of deviation z·C before it sends it: the server itself learns
              little of any site, and the model suffers √K times as much noise

T releases with noise multiplier z are together as private as one Gaussian mechanism with μ = √T·s/z, where s is 1 for a
site that is there or not (central) and 2 for one change or any other (local); ε follows from μ exactly (Dong, Roth and
Su, "Gaussian differential privacy", JRSS B 2022). No amplification by sampling is counted. What is covered is the
model; the number of samples that a site tells, and losses and metrics where they are shared, are not.

Flower's own wrappers are not used: the server-side one accounts for FedAvg only and reseeds from the run's global
state; `LocalDpMod` needs one array per tensor and takes a formula for σ that holds for ε < 1 and a single release.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping

import torch
from torch import Tensor

from fedskew.errors import UserError
from fedskew.methods import Method, Tensors
from fedskew.methods.fedavg import Mean
from fedskew.methods.fedavgm import FedAvgM
from fedskew.methods.fedopt import FedAdagrad, FedAdam, FedYogi

SENSITIVITY = {"central": 1.0, "local": 2.0}
_MEANS = (Mean, FedAvgM, FedAdagrad, FedAdam, FedYogi)
"""Server rules that see the updates' mean alone."""


def epsilon(releases: int, noise_multiplier: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest ε for which so many releases are (ε, δ)-private."""
    if releases == 0:
        return 0.0
    mu = math.sqrt(releases) * sensitivity / noise_multiplier
    low, high = 0.0, 1.0
    while _delta(high, mu) > delta:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(middle, mu) > delta else (low, middle)
    return high


def _delta(epsilon: float, mu: float) -> float:
    """The δ of a Gaussian mechanism with that μ at this ε."""
    return _normal(mu / 2 - epsilon / mu) - math.exp(epsilon + _log_normal(-mu / 2 - epsilon / mu))


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_normal(x: float) -> float:
    """log Φ(x), also where Φ itself is too small for a number."""
    if x > -30:
        return math.log(_normal(x))
    return -x * x / 2 - math.log(-x) - math.log(2 * math.pi) / 2 + math.log1p(-1 / (x * x))


def private_change(
    trained: Mapping[str, Tensor], sent: Mapping[str, Tensor], clip: float, deviation: float, noise: torch.Generator
) -> Tensors:
    """The trained parameters with their change clipped to a norm, and noise of that deviation on every entry."""
    change = {name: trained[name].double() - sent[name].double() for name in sent}
    norm = math.sqrt(sum(float(c.square().sum()) for c in change.values()))
    scale = min(1.0, clip / norm) if norm > 0 else 1.0
    return {
        name: (sent[name].double() + scale * c + deviation * torch.randn(c.shape, generator=noise, dtype=c.dtype)).to(
            trained[name].dtype
        )
        for name, c in change.items()
    }


def noise_source() -> torch.Generator:
    """Not keyed by the run's seed: whoever knows that must not know the noise."""
    return torch.Generator().manual_seed(secrets.randbits(63))


def refuse_unbounded(kind: str, method: Method, average: str, buffers: Mapping[str, Tensor]) -> None:
    """Refuse methods and models whose releases the accounting does not cover."""
    if average != "uniform":
        raise UserError(f"average is {average!r}; {kind} privacy needs 'uniform': a large site's weight has no bound")
    told = [part.sends for part in method.members if part.sends]
    if told:
        raise UserError(f"method {method.name!r} sends {', '.join(told)}, which {kind} privacy does not cover")
    if kind == "central" and not isinstance(method.server, _MEANS):
        raise UserError(
            f"method {method.name!r} does more than average the updates; central privacy needs a mean, such as fedavg's"
        )
    statistics = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
    if statistics:
        raise UserError(f"the model averages statistics ({statistics[0]}), whose change has no bound; choose another")
