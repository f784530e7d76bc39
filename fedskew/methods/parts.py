"""The parts a method is made of, each the maths of one client or of one server step.

A method is an **objective** (the local loss), a **local solver** (how a client descends) and a **server rule**
(how updates become the next global model); a **schedule** (stages.py) replaces the objective by a list of stages. A
part is a frozen dataclass of hyper-parameters and a few pure functions of named tensors. It never knows how many
clients there are, on which device they run or how they are reached: that is the engine's business.

A part that must know a client's data as a whole asks for a pass over it: `opening`, by the model as received, for what
the local training then uses; `closing`, by the model as trained, for what the client sends or keeps.

State is a flat mapping of named tensors. `pack` and `unpack` keep several model-shaped entries in one mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedskew.errors import UserError

Tensors = dict[str, Tensor]
"""Named tensors: a model's parameters, or anything that travels with them."""

Half = Literal["first", "second"]


class Gradient(Protocol):
    """The gradient of the objective on the current batch, or on one half of its samples, at any parameters."""

    def __call__(self, at: Tensors, half: Half | None = None, /) -> Tensors: ...


Mode = Literal["eval", "train"]
Reveals = Literal["nothing", "label presence", "label counts", "label presence, prototypes", "all labels"]


def pack(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Put tensors under a common name, so that a state can hold several sets of tensors shaped like the model."""
    return {f"{name}/{key}": value for key, value in tensors.items()}


def unpack(name: str, packed: Mapping[str, Tensor]) -> Tensors:
    """The tensors that `pack` put under `name`, without that name."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in packed.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Outputs:
    """What a model says of a batch: `logits[B, C]`, `features[B, d]` (None for a model without an encoder),
    and the same of the frozen models that the objective asked for."""

    logits: Tensor
    features: Tensor | None = None
    companions: Mapping[str, Outputs] = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """Logits and, where there are any, features by name: what can be lifted over clients."""
        return {"logits": self.logits} if self.features is None else {"logits": self.logits, "features": self.features}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Outputs:
        return cls(tensors["logits"], tensors.get("features"))

    @property
    def known_features(self) -> Tensor:
        """The features, for an objective with `needs_features`."""
        if self.features is None:
            raise UserError("the method needs features; expected a model that is a fedskew.Classifier(encoder, head)")
        return self.features

    @property
    def teacher(self) -> Outputs:
        """The global model that the client received this round."""
        return self.companions["teacher"]


@dataclass(frozen=True)
class Client:
    """What the maths of one client may use besides the batch."""

    label_counts: Tensor
    received: Tensors
    """The parameters that the server sent this round."""
    downlink: Tensors = field(default_factory=dict)
    """What the server sent beside them."""
    state: Tensors = field(default_factory=dict)
    """What this client kept from the last round it took part in."""
    opening: Tensors = field(default_factory=dict)
    """What its parts' `opening` came to, over all its samples."""


@dataclass(frozen=True)
class Seen:
    """A batch in a pass over a client's own training data: each sample once, not augmented, the model in eval mode."""

    out: Outputs
    y: Tensor
    """Rows whose target is `losses.IGNORE` pad the batch and count for nothing."""
    keys: Tensor
    """[B]: of each row, for `randomness.uniform`."""
    gradient: Tensors = field(default_factory=dict)
    """Of the batch's mean cross entropy, for a part with `needs_gradient`."""


@dataclass(frozen=True)
class Trained:
    """A client at the end of its local training."""

    params: Tensors
    steps: Tensor
    """How many steps it took."""
    lr: float
    momentum: float
    closing: Tensors = field(default_factory=dict)
    """What its parts' `closing` came to, over all its samples."""

    def effective_steps(self) -> Tensor:
        """‖A‖₁: by how many plain steps momentum SGD moved along a constant gradient."""
        rho = self.momentum
        return (self.steps - rho * (1 - rho**self.steps) / (1 - rho)) / (1 - rho)


@dataclass(frozen=True)
class Updates:
    """What the server received in one round; every tensor has a leading axis of participants, in client order."""

    params: Tensors
    weights: Tensor
    """Of each participant in a mean; they sum to 1."""
    uplink: Tensors
    """What the clients sent beside their models."""
    lr: float
    participation: float
    """Participants over all clients of the federation."""

    def mean(self) -> Tensors:
        return weighted_mean(self.params, self.weights)

    def changes(self, sent: Tensors) -> Tensors:
        """How far each participant moved from the model it was sent."""
        return {name: self.params[name] - w for name, w in sent.items()}


def weighted_mean(stacked: Mapping[str, Tensor], weights: Tensor) -> Tensors:
    """Σ_k a_k·w_k for each tensor; whole-number entries (BatchNorm's counters) are rounded."""
    in_dtype = {dtype: weights.to(dtype) for dtype in {t.dtype for t in stacked.values()} if dtype.is_floating_point}

    def mean(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(len(tensor), tensor.shape[1:].numel())
        if tensor.is_floating_point():
            return (in_dtype[tensor.dtype] @ rows).view(tensor.shape[1:])
        return (weights @ rows.to(weights.dtype)).round().to(tensor.dtype).view(tensor.shape[1:])

    return {name: mean(tensor) for name, tensor in stacked.items()}


def squared_norms(stacked: Mapping[str, Tensor]) -> Tensor:
    """[K], in float64: each participant's ‖·‖² over all its tensors together."""
    rows = [t.double().reshape(len(t), t.shape[1:].numel()) for t in stacked.values()]
    return torch.stack([r.square().sum(dim=1) for r in rows]).sum(dim=0)


@dataclass(frozen=True)
class Part:
    """What all parts declare."""

    reveals: ClassVar[Reveals] = "nothing"
    """What the server learns of a client's labels, beyond the model and the number of samples."""
    sends: ClassVar[str] = ""
    """What leaves the client beside the model, in words; empty: nothing."""
    extra_compute: ClassVar[str] = ""
    """Per local step, beside one forward and one backward pass; empty: none."""
    needs_gradient: ClassVar[bool] = False
    """Whether `closing` uses the gradient of each batch."""

    @property
    def members(self) -> tuple[Part, ...]:
        """The parts that this one is made of: itself, but for what composition joins."""
        return (self,)

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:
        """Refuse, before any training, a model or a number of classes that the part cannot work with."""

    def client_state(self, params: Tensors) -> Tensors:  # noqa: ARG002
        """What a client keeps between its rounds, as it is before its first."""
        return {}

    def server_state(self, params: Tensors) -> Tensors:  # noqa: ARG002
        """What the server keeps between rounds, as it is before the first."""
        return {}

    def downlink(self, server_state: Tensors) -> Tensors:  # noqa: ARG002
        """What the server sends beside the model."""
        return {}

    def opening(self, seen: Seen, client: Client) -> Tensors:  # noqa: ARG002
        """Of one batch, by the model as received; the sums over all batches are `client.opening`."""
        return {}

    def closing(self, seen: Seen, client: Client) -> Tensors:  # noqa: ARG002
        """Of one batch, by the model as trained; the sums over all batches are `trained.closing`."""
        return {}

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        """What the client sends beside the model."""
        return {}

    def next_state(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        """What the client keeps for its next round."""
        return {}

    def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:  # noqa: ARG002
        """What the server keeps for the next round of what clients sent for this part, whatever the server rule."""
        return {}


@dataclass(frozen=True)
class Objective(Part):
    """The local loss of one client on one batch."""

    needs_features: ClassVar[bool] = False
    """Whether it uses features, which only a model of an encoder and a head has."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        """A scalar, the mean over the batch; rows whose target is `losses.IGNORE` count for nothing."""
        raise NotImplementedError

    def companions(self) -> dict[str, Mode]:
        """The frozen models whose outputs the loss uses, and whether their BatchNorm takes the batch's statistics.

        `teacher` is the model received this round; `state/NAME` one that this client keeps; any other name a
        model that an earlier stage left.
        """
        return {}

    def perturbed(self, features: Tensor, y: Tensor, client: Client, key: Tensor) -> Tensor:  # noqa: ARG002
        """What the head is given instead of the features, in training; `key` is the step's, for randomness.

        Only for an objective with `needs_features`; what the loss finds in `out.features` is what the encoder made.
        """
        return features

    def tally(self, out: Outputs, y: Tensor) -> Tensors:  # noqa: ARG002
        """Numbers to add up over all batches of a round and to report."""
        return {}

    def extra_forwards(self, visits: float, tally: Mapping[str, float]) -> float:  # noqa: ARG002
        """Forward passes of companions in a round with so many sample visits, for the account of computation."""
        return visits * len(self.companions())


@dataclass(frozen=True)
class Solver(Part):
    """How a client descends; the engine applies SGD with momentum and weight decay to the direction."""

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:  # noqa: ARG002
        return gradient(params)

    def gradients(self) -> int:
        """How many gradients a step takes, for the account of computation."""
        return 1


@dataclass(frozen=True)
class ServerRule(Part):
    """How the round's updates become the next global parameters. Buffers are always averaged."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:
        """The next parameters and the server's next state."""
        raise NotImplementedError
