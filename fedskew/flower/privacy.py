"""Differential privacy of whole sites: clipped changes, Gaussian noise, and the ε that a run has reached.

    central   The server clips every site's change to norm C and adds noise of deviation z·C/K to the mean of the K
              changes. So the models of the run reveal little about the data of any one site.
    local     Every site clips its change and adds noise of deviation z·C before sending it. So the server itself learns
              little about any site, but the mean has √K times as much noise.

Two runs are neighbours if they differ in the data of one site, whose change is replaced by any other of norm C at most.
Which sites take part in a round is public, so K is the same in both runs. The mean then differs by at most 2·C/K, and a
local change by at most 2·C. In both cases the sensitivity is 2, in the unit that z multiplies.

T releases with noise multiplier z are together as private as one Gaussian mechanism with μ = 2·√T/z, and ε follows from
μ exactly (Dong, Roth and Su, "Gaussian differential privacy", JRSS B 2022). No amplification by sampling is counted.
The guarantee covers the models. It does not cover the number of samples that a site reports, nor losses and metrics.

Flower's own wrappers are not used. The server-side one accounts for FedAvg only, and reseeds from the run's global
state. `LocalDpMod` needs one array per tensor, and uses a formula for σ that holds for ε < 1 and a single release.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedskew.errors import UserError
from fedskew.flower.secret_noise import draw_normals
from fedskew.methods import Method, Tensors

SENSITIVITY = {"central": 2.0, "local": 2.0}
"""Sensitivity of one release, in units of clip / K (central) or clip (local)."""
NEIGHBOURS = "for a site whose data are replaced by any others; who takes part is public"


def epsilon(releases: int, noise_multiplier: float, delta: float, sensitivity: float = 1.0) -> float:
    """Compute the smallest ε for which `releases` releases are (ε, δ)-private."""
    return gaussian_epsilon(math.sqrt(releases) * sensitivity / noise_multiplier, delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Compute the smallest ε for which a Gaussian mechanism with parameter μ is (ε, δ)-private.

    Several mechanisms are together as private as one whose μ² is the sum of theirs.
    """
    if mu == 0 or math.isinf(mu):
        return mu
    low, high = 0.0, 1.0
    while _delta(high, mu) > delta:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(middle, mu) > delta else (low, middle)
    return high


def _delta(epsilon: float, mu: float) -> float:
    """Compute the δ of a Gaussian mechanism with parameter μ at this ε."""
    return _normal(mu / 2 - epsilon / mu) - math.exp(epsilon + _log_normal(-mu / 2 - epsilon / mu))


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_normal(x: float) -> float:
    """Compute log Φ(x), even where Φ itself is too small for a float."""
    if x > -30:
        return math.log(_normal(x))
    return -x * x / 2 - math.log(-x) - math.log(2 * math.pi) / 2 + math.log1p(-1 / (x * x))


def noise_to_signal(kind: str, noise_multiplier: float, sites: int, parameters: int) -> float:
    """The norm of the noise on a round's mean change, divided by the largest possible norm of the mean change."""
    return noise_multiplier * math.sqrt(parameters) / (sites if kind == "central" else math.sqrt(sites))


def private_change(
    trained: Mapping[str, Tensor], start: Mapping[str, Tensor], clip: float, deviation: float
) -> Tensors:
    """Return the trained parameters, with their change from `start` clipped, and with noise in every entry.

    A change with a number that is not finite counts as no change. It has no norm to clip by, and a server can cause it:
    if it sends -inf as one bias, all other entries stay finite.
    """
    change = {name: trained[name].double() - start[name].double() for name in start}
    norm = math.sqrt(sum(float(c.square().sum()) for c in change.values()))
    if not math.isfinite(norm):
        change, norm = {name: torch.zeros_like(c) for name, c in change.items()}, 0.0
    scale = min(1.0, clip / norm) if norm > 0 else 1.0
    return {
        name: (start[name].double() + scale * c + deviation * draw_normals(c.shape)).to(trained[name].dtype)
        for name, c in change.items()
    }


def refuse_unbounded(kind: str, method: Method, average: str, buffers: Mapping[str, Tensor]) -> None:
    """Refuse methods and models whose releases the accounting does not cover."""
    if method.weighting is not None:
        raise UserError(f"method {method.name!r} sets the sites' weights; {kind} privacy needs equal ones")
    if average != "uniform":
        raise UserError(f"average is {average!r}; {kind} privacy needs 'uniform': a large site's weight has no bound")
    extras = [part.sends for part in method.members if part.sends]
    if extras:
        raise UserError(f"method {method.name!r} sends {', '.join(extras)}, which {kind} privacy does not cover")
    if kind == "central" and not method.server.uses_only_mean:
        raise UserError(
            f"method {method.name!r} does more than average the updates; central privacy needs a mean, such as fedavg's"
        )
    statistics = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
    if statistics:
        raise UserError(f"the model averages statistics ({statistics[0]}), whose change has no bound; choose another")
