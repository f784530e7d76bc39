"""Local optimisers turn a gradient, or what a solver uses in its place, into a step. Every engine uses them.

They take the same steps as the optimisers of `torch.optim`. Their state is zero at the start of a client's round. If
the round has phases, it is zero at the start of each phase. Tensors belong to one client, or to a stack of clients
along a leading axis. Stacked clients may be at different local steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.engine import kernels
from fedskew.methods.parts import Tensors

STEPS = "steps"
"""Key of each client's number of steps so far, for optimisers that use it."""

State = Mapping[str, Sequence[Tensor]]
"""Lists of tensors shaped like the parameters, by name. Under `STEPS`, one tensor with an entry per client."""


@dataclass(frozen=True)
class LocalOptimiser(ABC):
    """Takes the local steps of one client or of a stack of clients."""

    momentum: float
    weight_decay: float

    shaped_state: ClassVar[tuple[str, ...]]
    """Names of the state tensors that are shaped like the parameters."""
    counts_steps: ClassVar[bool] = False
    """Whether its state has `STEPS`."""
    has_kernel: ClassVar[bool] = False
    """Whether there is a GPU kernel that updates a parameter for all clients at once (`kernels.sgd`)."""

    @property
    def state_names(self) -> tuple[str, ...]:
        return (*self.shaped_state, STEPS) if self.counts_steps else self.shaped_state

    @abstractmethod
    def step(
        self,
        params: Sequence[Tensor],
        direction: Sequence[Tensor],
        state: State,
        lr: float | Tensor,
        use_kernel: bool = False,
    ) -> None:
        """Change parameters and state in place.

        The stacked engine on a CUDA GPU passes `lr` as a tensor, because a step in a CUDA graph must read its current
        value at each replay. `use_kernel` allows the kernel, which a compiler cannot fuse with other operations.
        """

    def new_state(self, params: Sequence[Tensor]) -> State:
        """Return the state of one client before its first step."""
        state = {name: [torch.zeros_like(p) for p in params] for name in self.shaped_state}
        if self.counts_steps:
            state[STEPS] = [torch.zeros((), dtype=ACCURATE[params[0].device.type], device=params[0].device)]
        return state


@dataclass(frozen=True)
class SGD(LocalOptimiser):
    """SGD with momentum and L2 weight decay, like `torch.optim.SGD`."""

    nesterov: bool = False

    shaped_state = ("velocity",)
    has_kernel = True

    def step(
        self,
        params: Sequence[Tensor],
        direction: Sequence[Tensor],
        state: State,
        lr: float | Tensor,
        use_kernel: bool = False,
    ) -> None:
        velocity = state["velocity"]
        if isinstance(lr, float):
            self._foreach_step(list(params), list(direction), list(velocity), lr)
            return
        for p, g, v in zip(params, direction, velocity, strict=True):
            if use_kernel and kernels.can_step(p, g):
                kernels.stacked_sgd_step(p, g, v, lr, self.momentum, self.weight_decay, self.nesterov)
            else:
                self._device_step(p, g, v, lr)

    def _foreach_step(self, params: list[Tensor], direction: list[Tensor], velocity: list[Tensor], lr: float) -> None:
        if self.weight_decay:
            direction = list(torch._foreach_add(direction, params, alpha=self.weight_decay))
        if self.momentum:
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, direction)
            ahead = torch._foreach_add(direction, velocity, alpha=self.momentum) if self.nesterov else velocity
            direction = list(ahead)
        torch._foreach_add_(params, direction, alpha=-lr)

    def _device_step(self, p: Tensor, g: Tensor, v: Tensor, lr: Tensor) -> None:
        g = g + self.weight_decay * p if self.weight_decay else g
        if self.momentum:
            velocity = self.momentum * v + g
            v.copy_(velocity)
            g = g + self.momentum * velocity if self.nesterov else velocity
        p.copy_(p - lr * g)


@dataclass(frozen=True)
class Adam(LocalOptimiser):
    """Adam with L2 weight decay, like `torch.optim.Adam`, or with decoupled weight decay, like `torch.optim.AdamW`.

    Its β₁ is the momentum.
    """

    decoupled: bool = False
    beta2: float = 0.999
    eps: float = 1e-8

    shaped_state = ("first moment", "second moment")
    counts_steps = True

    def step(
        self,
        params: Sequence[Tensor],
        direction: Sequence[Tensor],
        state: State,
        lr: float | Tensor,
        use_kernel: bool = False,  # noqa: ARG002
    ) -> None:
        (steps,) = state[STEPS]
        steps.add_(1)
        moments = state["first moment"], state["second moment"]
        for p, g, first, second in zip(params, direction, *moments, strict=True):
            if self.weight_decay and self.decoupled:
                p.mul_(1 - lr * self.weight_decay)
            elif self.weight_decay:
                g = g + self.weight_decay * p
            first.mul_(self.momentum).add_(g, alpha=1 - self.momentum)
            second.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            denominator = (second / self._bias_correction(self.beta2, steps, p)).sqrt_().add_(self.eps)
            p.sub_(lr * (first / self._bias_correction(self.momentum, steps, p)) / denominator)

    def _bias_correction(self, beta: float, steps: Tensor, like: Tensor) -> Tensor:
        """Return 1 − βᵗ for each client after t steps, which corrects a moment that started at zero."""
        bias = (1 - beta**steps).to(like.dtype)  # `steps` has the most accurate format, because β₂ᵗ is close to 1
        return bias.view(bias.shape + (1,) * (like.dim() - bias.dim()))


def clip(direction: Tensors, clip_norm: float | None) -> Tensors:
    """Scale one client's direction down to a norm of at most `clip_norm`."""
    if clip_norm is None:
        return direction
    norm = torch.stack([d.square().sum() for d in direction.values()]).sum().sqrt()
    scale = (clip_norm / norm.clamp(min=1e-12)).clamp(max=1.0)
    return {name: d * scale for name, d in direction.items()}


OPTIMISERS: dict[str, Callable[[float, float], LocalOptimiser]] = {
    "sgd": SGD,
    "nesterov": lambda momentum, weight_decay: SGD(momentum, weight_decay, nesterov=True),
    "adam": Adam,
    "adamw": lambda momentum, weight_decay: Adam(momentum, weight_decay, decoupled=True),
}
"""Functions that make an optimiser from momentum and weight decay.

`experiment/config/keys.py` repeats the names for the key `optimizer`, because the command line's help must not import
torch.
"""
