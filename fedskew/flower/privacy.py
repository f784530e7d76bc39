"""Differential privacy: clipped changes, Gaussian noise, and the meaning of ε.

    central   The server clips every site's change to norm C and adds noise of deviation z·C/K to the mean of the K
              changes. z is the noise multiplier. The models of the run then reveal little about the data of any one
              site.
    local     Every site clips its change and adds noise of deviation z·C before it sends the change. The server itself
              then learns little about any site, but the mean has √K times as much noise.
    example   In every local step, a site clips the gradient of each sample and adds noise to the sum of the gradients
              (`engine/private_gradient.py`). The server then learns little about any one sample, but it may learn much
              about a site.

Central and local privacy have an ε for a whole site. Two runs are neighbours if they differ in the data of one site.
The change of this site is then any other change of norm C at most. Which sites take part in a round is public, so K is
the same in both runs. The mean differs by at most 2·C/K, and a local change by at most 2·C. In both cases, the
sensitivity is 2, in the unit that z multiplies.

Example-level privacy has an ε for one sample. Two runs are neighbours if one sample of a site's training part is
replaced by any other. The number of samples is public. For each sample, an epoch is one Gaussian mechanism of
sensitivity 2, or k mechanisms if a local step computes k gradients.

T mechanisms with noise multiplier z are together as private as one Gaussian mechanism with μ = 2·√T/z, and ε follows
from μ exactly (Dong, Roth and Su, "Gaussian differential privacy", JRSS B 2022). No amplification by sampling is
counted.
The guarantee covers the models. It does not cover the number of samples that a site reports, nor losses and metrics.

Flower's own wrappers are not used. Its wrapper at the server accounts for FedAvg only, and draws the noise from NumPy's
global generator. Its `LocalDpMod` needs one array per tensor, and its formula for σ holds only for ε < 1 and a single
update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedskew.errors import UserError
from fedskew.flower.secret_noise import draw_normals
from fedskew.methods import Method, Tensors
from fedskew.methods.example_privacy import EXAMPLE_SENSITIVITY

SENSITIVITY = {"central": 2.0, "local": 2.0, "example": EXAMPLE_SENSITIVITY}
"""Sensitivity of one mechanism, in units of clip / K (central) or clip (the others)."""
_SITES = "for a site whose data are replaced by any others; who takes part is public"
NEIGHBOURS = {
    "central": _SITES,
    "local": _SITES,
    "example": "for one training sample that is replaced by any other; the number of samples is public, and a whole "
    "site has no finite ε",
}
"""Whose data ε protects, by the kind of privacy."""


def noise_to_signal(kind: str, noise_multiplier: float, sites: int, parameters: int) -> float:
    """The norm of the noise on a round's mean change, divided by the largest possible norm of the mean change.

    `kind` is central or local.
    """
    return noise_multiplier * math.sqrt(parameters) / (sites if kind == "central" else math.sqrt(sites))


def private_change(
    trained: Mapping[str, Tensor], start: Mapping[str, Tensor], clip: float, deviation: float
) -> Tensors:
    """Clip the change of the parameters from `start`, and add secret noise of this deviation to every entry.

    Return the parameters, not their change. A change that is not finite has no norm to clip by, so it counts as no
    change. Otherwise, a server could get changes that are not clipped: if it sends -inf as one bias, the norm is NaN
    and `scale` would be 1, but the changes of the other parameters may be finite.
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
    """Refuse a method, average or model for which the ε of a whole site does not hold."""
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
    averaged = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
    if averaged:
        raise UserError(
            f"the model's buffer {averaged[0]!r} is averaged without a bound on one site's share; expected a model "
            "without buffers of decimal numbers, such as running statistics"
        )


def refuse_changed_buffers(kind: str, changed: Mapping[str, Tensor]) -> None:
    """Refuse to send the buffers that training changed, such as counts of inputs, because no noise is added to them."""
    if changed:
        raise UserError(
            f"training changed the model's buffer {min(changed)!r}, which {kind} privacy does not cover; expected a "
            "model whose buffers stay as they are"
        )
