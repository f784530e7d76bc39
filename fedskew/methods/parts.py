"""The parts of a method. An engine runs a method by calling the hooks of its parts.

A method has up to seven parts. Each part is the maths of one client or of one server step:

    objective     the local loss of one client on one batch                   `Objective`
    regulariser   a term added to the loss of any objective                   `Regulariser` (regularisers.py)
    solver        the direction in which a client steps                       `Solver`
    personal      the tensors of the model that stay on the clients           `Personal` (personal.py)
    weighting     the participants' weights in the server's mean              `Weighting`
    calibration   a server rule for the last round of a run                   `Calibration` (stages.py)
    server rule   how the clients' models become the next global model        `ServerRule`

A method in stages has a `Schedule` (stages.py) in place of the objective. With the key `class_weights`,
a run has one more part (class_weights.py).

A part is a frozen dataclass. Its fields are the hyper-parameters, and its methods ("hooks") are pure functions of named
tensors. Only the engine knows where the clients train, and how to reach them.

The hooks of a part, in the order of a round:

    server   downlink                                     what the server sends besides the model
    client   opening                                      a pass of the received model over the client's data
             perturbed, loss, proximal, term, tally,      local training, batch by batch
             direction
             closing                                      a pass of the trained model over the client's data
             uplink, next_state                           what the client sends besides the model, and what it keeps
    server   weigh                                        the participants' weights
             aggregate, next_server_state                 the next global model, and what the server keeps

A state is a flat mapping from names to tensors. `pack` and `unpack` store several tensors per parameter in one state.

This file has four sections: what hooks receive, the base of all parts, the kinds of parts, and functions that call or
check hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.errors import UserError
from fedskew.methods.hook_results import (
    invalid_weights,
    named_tensors,
    wrong_aggregate,
    wrong_companions,
    wrong_weights,
)

# -- what hooks receive ------------------------------------------------------------------------------------------------

Tensors = dict[str, Tensor]
"""Named tensors: a model's parameters, a state, or a message between client and server."""

LossPart = Literal["first", "second", "proximal"]
"""The loss on the first or second half of a batch, or the objective's proximal loss."""
SGD_OPTIMIZERS = ("sgd", "nesterov")
"""The local optimisers whose steps are weighted sums of gradients."""
Mode = Literal["eval", "train"]
"""The mode of a model. In `train` mode, BatchNorm uses the batch's statistics instead of its running ones, and dropout
is on."""
STATE = "state"
"""The prefix of the client's new state in the result of `Solver.direction`."""


def pack(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Prefix every key with `name/`, so that several sets of tensors fit in one mapping.

    `{**pack("first_moment", m), **pack("second_moment", v)}` is a state with two tensors per parameter.
    """
    return {f"{name}/{key}": value for key, value in tensors.items()}


def unpack(name: str, packed: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors that `pack(name, …)` stored in `packed`, under their original keys."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in packed.items() if key.startswith(prefix)}


class Gradient(Protocol):
    """Computes the gradient of the objective's loss on the current batch, or of the loss that `part` names.

    `at` are the parameters at which the gradient is computed.
    """

    def __call__(self, at: Tensors, part: LossPart | None = None, /) -> Tensors: ...


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model on a batch of B samples."""

    logits: Tensor
    """[B, C], for C classes."""
    features: Tensor | None = None
    """[B, d]: the input of the head. None for a model that is not a `Classifier(encoder, head)`."""
    companions: Mapping[str, Outputs] = field(default_factory=dict)
    """The outputs of the frozen models that `Objective.companions` names, on the same batch."""

    def tensors(self) -> Tensors:
        """Return the logits and, if there are any, the features by name, so that `vmap` can map over them."""
        return {"logits": self.logits} if self.features is None else {"logits": self.logits, "features": self.features}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Outputs:
        """Undo the method `tensors`."""
        return cls(tensors["logits"], tensors.get("features"))

    @property
    def required_features(self) -> Tensor:
        """The features, for parts that declare `needs_features`. Raises `UserError` if there are none."""
        if self.features is None:
            raise UserError("the method needs features; expected a model that is a fedskew.Classifier(encoder, head)")
        return self.features

    @property
    def teacher(self) -> Outputs:
        """The outputs of the global model that the client received this round."""
        if "teacher" not in self.companions:
            raise UserError(
                "out.teacher is used, but companions() of the objective does not name it; expected companions() to "
                "return {'teacher': 'eval'}"
            )
        return self.companions["teacher"]


@dataclass(frozen=True)
class Client:
    """What a hook may know about the client besides the current batch."""

    label_counts: Tensor
    """[C]: the client's number of training samples per class. With example-level privacy, it is 1 for each class,
    because true counts would depend on single samples."""
    received: Tensors
    """The global parameters that the server sent this round."""
    downlink: Tensors = field(default_factory=dict)
    """What the server sent besides the parameters: the result of `Part.downlink`."""
    state: Tensors = field(default_factory=dict)
    """What the client kept from the last round in which it took part. If the solver has `changes_state`, local steps
    change it."""
    opening: Tensors = field(default_factory=dict)
    """The sums of `Part.opening` over the client's batches."""
    class_weights: Tensor | None = None
    """[C]: the weights of the classes in the cross entropy, if the run has `class_weights`."""


@dataclass(frozen=True)
class Seen:
    """One batch of a pass over a client's training data.

    A pass sees each sample at most once, without augmentation, with the model in eval mode. In rounds with training, it
    leaves out a last batch that is too small to train BatchNorm.
    """

    out: Outputs
    y: Tensor
    """[B]: the labels. Rows with the target `losses.IGNORE` are padding and must be ignored."""
    keys: Tensor
    """[B]: a random key per sample, for `randomness.uniform`."""
    gradient: Tensors = field(default_factory=dict)
    """The gradient of the batch's mean cross entropy. Only in `closing`, if a part declares `needs_gradient`."""


@dataclass(frozen=True)
class Trained:
    """A client at the end of its local training."""

    params: Tensors
    steps: Tensor
    """The number of local steps."""
    lr: float
    momentum: float
    closing: Tensors = field(default_factory=dict)
    """The sums of `Part.closing` over the client's batches."""
    optimizer: str = "sgd"
    """The name of the local optimiser."""

    def effective_steps(self) -> Tensor:
        """Return the number of steps without momentum that would move as far along a constant gradient.

        FedNova calls it ‖A‖₁. Only SGD, including Nesterov momentum, has such a number. Adam's steps do not grow with
        the gradient.
        """
        if self.optimizer not in SGD_OPTIMIZERS:
            raise UserError(f"effective_steps() needs SGD, not {self.optimizer!r}; declare `needs_sgd = True`")
        rho = self.momentum
        first = rho**2 if self.optimizer == "nesterov" else rho
        return (self.steps - first * (1 - rho**self.steps) / (1 - rho)) / (1 - rho)


class ServerData(Protocol):
    """The samples that the server holds, if the run has `server_data`. They are numbered from 0."""

    def __len__(self) -> int: ...

    def loss(self, params: Tensors, samples: Tensor) -> Tensor:
        """Return the mean loss of the model with these parameters on the samples with these numbers.

        The result can be differentiated. The model is in eval mode and has the mean of the participants' buffers.
        """


@dataclass(frozen=True)
class Updates:
    """What the server received in one round. Every tensor's first axis runs over the participants, in client order."""

    params: Tensors
    weights: Tensor
    """[K]: each participant's weight in the mean. The weights sum to 1."""
    uplink: Tensors
    """What the clients sent besides their models: the results of `Part.uplink`, stacked."""
    lr: float
    """The clients' learning rate in this round."""
    participation: float
    """The fraction of clients that took part: of the stage's clients if the stage names them, else of all clients."""
    key: int = 0
    """A random key, for `fedskew.randomness`. It depends only on the seed, the round and which model is trained."""
    server_data: ServerData | None = None
    """The samples that the server holds. Only for server rules that declare `needs_server_data`."""

    @property
    def required_server_data(self) -> ServerData:
        """The server's samples, for rules that declare `needs_server_data`. Raises `UserError` if there are none."""
        if self.server_data is None:
            raise UserError("the server rule needs samples at the server; expected server_data, such as 0.02")
        return self.server_data

    def mean(self) -> Tensors:
        """Return FedAvg's weighted mean of the participants' models."""
        return weighted_mean(self.params, self.weights)

    def changes(self, sent: Tensors) -> Tensors:
        """Return each participant's update: its trained parameters minus `sent`, the parameters that it received."""
        return {name: self.params[name] - w for name, w in sent.items()}


def weighted_mean(stacked: Mapping[str, Tensor], weights: Tensor) -> Tensors:
    """Return Σ_k weights[k]·tensor[k] for each tensor. Integer tensors (BatchNorm's counters) are rounded."""
    in_dtype = {dtype: weights.to(dtype) for dtype in {t.dtype for t in stacked.values()} if dtype.is_floating_point}

    def mean(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(len(tensor), tensor.shape[1:].numel())
        if tensor.is_floating_point():
            return (in_dtype[tensor.dtype] @ rows).view(tensor.shape[1:])
        return (weights @ rows.to(weights.dtype)).round().to(tensor.dtype).view(tensor.shape[1:])

    return {name: mean(tensor) for name, tensor in stacked.items()}


def squared_norms(stacked: Mapping[str, Tensor]) -> Tensor:
    """Return each participant's ‖·‖² over all its tensors: [K], in float64 if the device has it."""
    rows = [t.to(ACCURATE[t.device.type]).reshape(len(t), t.shape[1:].numel()) for t in stacked.values()]
    return torch.stack([r.square().sum(dim=1) for r in rows]).sum(dim=0)


# -- the base of all parts ---------------------------------------------------------------------------------------------

Reveals = Literal[
    "nothing",
    "label skew",
    "label presence",
    "label counts",
    "label presence, prototypes",
    "label counts, prototypes",
    "label counts, prototypes, feature covariance",
    "all labels",
]
"""What the server can learn about a client's labels and features from what a part sends."""


@dataclass(frozen=True)
class Part:
    """The declarations and hooks that all parts share. Every hook has a default that does nothing."""

    reveals: ClassVar[Reveals] = "nothing"
    """What the server can learn about a client's labels and features from what the part sends."""
    sends: ClassVar[str] = ""
    """What the client sends besides the model, in words.

    A part that overrides `uplink` or `tally` must declare it. Otherwise, a Flower site refuses to send its update.
    """
    extra_compute: ClassVar[str] = ""
    """What clients compute besides FedAvg's forward and backward pass per local step, in words.

    The cost is per local step, unless the words name another period, such as `per round` or `after the last round`. It
    holds for the default hyper-parameters, because the catalogue describes a method before anybody chooses others. The
    rows of a run record the cost with the run's own hyper-parameters.
    """
    needs_sgd: ClassVar[bool] = False
    """Whether the maths holds for local SGD only, for instance because it uses `Trained.effective_steps`."""
    needs_gradient: ClassVar[bool] = False
    """Whether `closing` uses `seen.gradient`."""
    needs_features: ClassVar[bool] = False
    """Whether hooks use features. Then the model must be a `Classifier(encoder, head)`."""
    needs_linear_head: ClassVar[bool] = False
    """Whether hooks use the rows of `head.weight`, one per class. Then no objective may choose another kind of head."""
    needs_sample_count: ClassVar[bool] = False
    """Whether hooks use `client.state["sample_count"]`, the client's number of training samples."""
    sample_by_sample: ClassVar[bool] = True
    """Whether the part uses the client's data only as means over samples.

    Each term of such a mean depends on one sample, and not on `client.label_counts`. Example-level privacy needs this.
    The default is False for objectives, regularisers and class weights.
    """
    multi_label: ClassVar[bool] = True
    """Whether the maths also holds for several labels per sample, where there is no softmax over the classes.

    `y` is then [B, L] zeros and ones, for L labels. The default is False for objectives, regularisers and schedules.
    """

    @property
    def members(self) -> tuple[Part, ...]:
        """The parts that this one is composed of; by default only itself."""
        return (self,)

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:
        """Raise `UserError` if the part cannot work with this model or number of classes. Called before training."""

    def client_state(self, params: Tensors) -> Tensors:  # noqa: ARG002
        """Return a client's state before its first round, in which it receives `params`."""
        return {}

    def server_state(self, params: Tensors) -> Tensors:  # noqa: ARG002
        """Return the server's state before the first round."""
        return {}

    def downlink(self, server_state: Tensors) -> Tensors:  # noqa: ARG002
        """Return what the server sends besides the model. Clients find it in `client.downlink`."""
        return {}

    def opening(self, seen: Seen, client: Client) -> Tensors:  # noqa: ARG002
        """Return statistics of one batch under the received model. `client.opening` is their sum over all batches."""
        return {}

    def closing(self, seen: Seen, client: Client) -> Tensors:  # noqa: ARG002
        """Return statistics of one batch under the trained model. `trained.closing` is their sum over all batches."""
        return {}

    def uplink(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        """Return what the client sends besides the model. The server finds it in `updates.uplink`, stacked."""
        return {}

    def next_state(self, trained: Trained, client: Client) -> Tensors:  # noqa: ARG002
        """Return the client's state after the round."""
        return {}

    def next_server_state(self, updates: Updates, server_state: Tensors) -> Tensors:  # noqa: ARG002
        """Return what the server keeps for this part after the round, whichever server rule the method has."""
        return {}


# -- the kinds of parts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective(Part):
    """The local loss of one client on one batch."""

    sample_by_sample: ClassVar[bool] = False
    """As in `Part`. A class that overrides the loss of another one must declare it again."""
    multi_label: ClassVar[bool] = False
    takes_class_weights: ClassVar[bool] = False
    """Whether the loss weighs its cross entropy by `client.class_weights`, if they are not None."""
    head: ClassVar[str] = ""
    """The kind of head that the loss is made for, such as `etf`; empty if it chooses none."""

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        """Return a scalar, the mean over the batch. Ignore rows with the target `losses.IGNORE`: they are padding."""
        raise NotImplementedError

    def proximal(self, out: Outputs, y: Tensor, client: Client) -> Tensor:  # noqa: ARG002
        """Return a second loss. A solver computes its gradient with `gradient(params, "proximal")`."""
        raise UserError(
            f"{type(self).__name__} has no proximal(), but the solver needs it; choose another objective or solver"
        )

    def companions(self) -> dict[str, Mode]:
        """Name the frozen models whose outputs the loss uses, each with its mode.

        `teacher` is the model received this round. `state/NAME` is a model that this client keeps as `NAME`. Any other
        name is a model that an earlier stage trained.
        """
        return {}

    def class_outputs(self, out: Outputs) -> Outputs:
        """Return the outputs with logits [B, C], which regularisers need.

        Override this hook if the head returns other logits in training.
        """
        return out

    def perturbed(self, features: Tensor, y: Tensor, client: Client, key: Tensor) -> Tensor:  # noqa: ARG002
        """Return the head's input during training, in place of the features. `key` is the random key of the step.

        Only for objectives with `needs_features`. `out.features` in the loss remains the encoder's output.
        """
        return features

    def tally(self, out: Outputs, y: Tensor) -> Tensors:  # noqa: ARG002
        """Return counts for one batch. The run records their sums over the round."""
        return {}

    def extra_forwards(self, visits: float, tally: Mapping[str, float]) -> float:  # noqa: ARG002
        """Return how many samples pass through companions in a round of `visits` samples, for the recorded cost."""
        return visits * len(self.companions())


@dataclass(frozen=True)
class Solver(Part):
    """The direction of a local step. The engine clips it if the run sets `clip_norm`.

    After that, the local optimiser adds weight decay and steps.
    """

    plain_gradient: ClassVar[bool] = True
    """Whether `direction` calls `gradient(params)`, with its own argument `params`, for the whole loss.

    Personal layers step along this plain gradient. If the solver does not compute it, personal layers that train
    together with the shared ones cost one more gradient per step.
    """

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:  # noqa: ARG002
        """Return the direction that the optimiser uses in place of the gradient at `params`.

        `gradient` may be called several times. A solver with `changes_state` also returns `pack("state", …)` with new
        values for the client's state. The next step, `uplink` and `next_state` find these values in `client.state`.
        """
        return gradient(params)

    def changes_state(self) -> bool:
        """Return whether `direction` also returns a state for the next step."""
        return False

    def gradients(self) -> int:
        """Return how many gradients a step computes, for the recorded cost and for example-level privacy."""
        return 1


@dataclass(frozen=True)
class Weighting(Part):
    """The participants' weights in every weighted mean of the server, including the mean of BatchNorm's buffers."""

    def weigh(self, sent: Tensors, updates: Updates, state: Tensors) -> Tensor:  # noqa: ARG002
        """Return one number ≥ 0 per participant: [K]. The weights are these numbers divided by their sum, which must be
        above 0.

        `sent` are the current global parameters, and `state` is the server's state. The default returns
        `updates.weights`, the participants' shares of the round's samples. A method's own weighting must override this
        hook.
        """
        return updates.weights


@dataclass(frozen=True)
class ServerRule(Part):
    """How the clients' models become the next global model. BatchNorm statistics that clients send are averaged."""

    uses_only_mean: ClassVar[bool] = False
    """Whether `aggregate` uses the updates only through `updates.mean()`.

    Then the server needs no individual update, so secure aggregation and central privacy are possible.
    """
    needs_server_data: ClassVar[bool] = False
    """Whether `aggregate` uses `updates.server_data`. Then the run must set `server_data`."""

    def aggregate(self, sent: Tensors, updates: Updates, state: Tensors) -> tuple[Tensors, Tensors]:  # noqa: ARG002
        """Return the next global parameters and the next server state. `sent` are the current global parameters.

        The default is FedAvg's weighted mean. A method's own server rule must override this hook.
        """
        return updates.mean(), state


# -- functions that call or check hooks --------------------------------------------------------------------------------


def collect(parts: Iterable[Part], hook: str, *arguments: object) -> Tensors:
    """Call a hook of each part, and return all tensors by name. Raise `UserError` if a hook returns no such mapping."""
    collected: Tensors = {}
    for part in parts:
        collected |= _expect_tensors(part, hook, getattr(part, hook)(*arguments))
    return collected


def _expect_tensors(part: Part, hook: str, returned: object) -> Tensors:
    if type(returned) is dict and all(isinstance(value, Tensor) for value in returned.values()):
        return returned
    return named_tensors(part, hook, returned)


def same_form(tensors: object, others: Mapping[str, Tensor]) -> bool:
    """Return whether `tensors` are named tensors with the same names, shapes and types as `others`."""
    if not isinstance(tensors, Mapping) or tensors.keys() != others.keys():
        return False
    return all(
        isinstance(t := tensors[name], Tensor) and t.shape == other.shape and t.dtype == other.dtype
        for name, other in others.items()
    )


def split_direction(returned: Tensors) -> tuple[Tensors, Tensors]:
    """Split what a solver with `changes_state` returned into the direction and the new state."""
    state = unpack(STATE, returned)
    return {name: t for name, t in returned.items() if not name.startswith(f"{STATE}/")}, state


def check_companions(objective: Objective) -> None:
    """Raise `UserError` unless the hook `companions` returns a dict from names of models to their modes."""
    returned: object = objective.companions()
    if not isinstance(returned, Mapping) or not all(
        isinstance(name, str) and mode in ("eval", "train") for name, mode in returned.items()
    ):
        raise wrong_companions(objective, returned)


def weigh_updates(
    weighting: Weighting, sent: Tensors, updates: Updates, state: Tensors, may_wait: bool = False
) -> Updates:
    """Return the updates with the weights that `weighting` computes, divided by their sum.

    Wrong weights raise `UserError`. On a GPU, they do so only with `may_wait`, because the host must wait for them.
    Otherwise they become NaN there, so that the caller finds a server's step that is not finite.
    """
    weights = weighting.weigh(sent, updates, state)
    if weights is updates.weights:
        return updates
    if not isinstance(weights, Tensor) or weights.shape != updates.weights.shape:
        raise wrong_weights(weighting, weights, updates.weights)
    weights = weights.detach().to(updates.weights)
    total = weights.sum()
    is_valid = (weights >= 0).all() & total.isfinite() & (total > 0)
    if may_wait or _is_on_host(weights):
        if not is_valid:
            raise invalid_weights(weighting, weights)
        return replace(updates, weights=weights / total)
    return replace(updates, weights=torch.where(is_valid, weights / total, torch.nan))


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def server_step(
    rule: ServerRule, parts: Sequence[Part], sent: Tensors, updates: Updates, state: Tensors
) -> tuple[Tensors, Tensors]:
    """Return the next global parameters, from the server rule, and the next server state, from all parts.

    A rule that learns may return tensors from which PyTorch can compute gradients. These are detached.
    """
    stepped = rule.aggregate(sent, updates, state)
    if not isinstance(stepped, tuple | list) or len(stepped) != 2:
        raise wrong_aggregate(rule, stepped, sent)
    params, after = stepped
    if not same_form(params, sent) or not isinstance(after, Mapping):
        raise wrong_aggregate(rule, stepped, sent)
    after = {**state, **_expect_tensors(rule, "aggregate", after)}
    after |= collect(parts, "next_server_state", updates, state)
    return _detached(params), _detached(after)


def _detached(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: t.detach() if t.requires_grad else t for name, t in tensors.items()}


def individual_updates_reason(part: type[Part]) -> str:
    """Return why the server needs individual updates for a part. Empty if the mean of the models is enough."""
    if part.sends:
        return f"sends {part.sends}"
    if part.next_server_state is not Part.next_server_state:
        return "keeps a state on the server that is made from individual updates"
    if issubclass(part, Weighting) and part.weigh is not Weighting.weigh:
        return "sets the weights of individual updates"
    if issubclass(part, ServerRule) and not part.uses_only_mean:
        return "uses individual updates on the server"
    return ""


Hook = Literal["opening", "closing", "perturbed"]
"""The hooks that take time even if they do nothing. Engines skip them unless a part overrides them."""


def uses_hook(part: Part, hook: Hook) -> bool:
    """Return whether one of the part's members overrides this hook."""
    return any(_overrides(member, hook) for member in part.members)


def _overrides(part: Part, hook: Hook) -> bool:
    base = Objective if hook == "perturbed" else Part
    return getattr(type(part), hook, None) not in (None, getattr(base, hook))


def data_pass_cost(parts: Sequence[Part]) -> float:
    """Return the cost per sample of the opening and closing passes, relative to a local step on one sample.

    A local step is a forward and a backward pass. The forward pass is a third of its cost.
    """
    members = [member for part in parts for member in part.members]
    forward = 1 / 3
    opening = forward if any(_overrides(member, "opening") for member in members) else 0.0
    closers = [member for member in members if _overrides(member, "closing")]
    if not closers:
        return opening
    return opening + (1.0 if any(member.needs_gradient for member in closers) else forward)
