"""Personal parts: which tensors of the model stay on the clients, how they are trained, and how they are tested.

The engine splits the model into personal and shared tensors. Personal tensors never leave a client. The server keeps
their initial values, from which a new client starts, unless the part's `start` returns others. The other parts of a
method see only the shared tensors. So a solver, a weighting or a server rule works as if the shared tensors were the
whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedskew.errors import UserError
from fedskew.methods.parts import STATE, Client, Gradient, LossPart, Part, Solver, Tensors, pack, split_direction

PERSONAL = "personal"
"""Key prefix of the personal tensors within a client's state."""

BATCH_NORM = "batchnorm"
"""The name that stands for all tensors of BatchNorm layers: scale, shift and statistics."""


@dataclass(frozen=True)
class Phase:
    """Consecutive epochs of a client's local training. Parameters that the phase does not train are fixed.

    Personal parameters step along the plain gradient. The method's solver steps the shared ones.
    """

    trains: Literal["all", "shared", "personal"] = "all"
    epochs: int | None = None
    """None means the run's `local_epochs`."""


@dataclass(frozen=True)
class Personal(Part):
    """Declares which tensors of the model stay on the clients. By default, none do."""

    has_global_model: ClassVar[bool] = False
    """Whether the server's model can be used as it is. Otherwise only the clients' personal models are tested."""
    shares: ClassVar[str] = "model"
    """What clients send of the model, in words."""

    def keeps(self) -> tuple[str, ...]:
        """Name the tensors that stay: `batchnorm`, layers such as `head` or `encoder.3`, or patterns such as `*.bias`.

        The name of a layer stands for all its tensors, including those of the layers inside it.
        """
        return ()

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of local training. Exactly one of them must train shared parameters."""
        return (Phase(),)

    def start(self, own: Tensors, received: Tensors) -> Tensors:  # noqa: ARG002
        """Return the personal tensors that a client's local training starts from in this round.

        `own` are the personal tensors after the client's last round, or their initial values in its first round.
        `received` is the received model. Tensors in it that `keeps` names have their initial values, because the
        server never gets others.
        """
        return own

    def own_solver(self) -> Solver | None:
        """Return the solver of a second model, which each client trains beside the global one and never sends.

        The second model is personal: its tensors have the names of the global model's. Before a client's first round,
        it equals the initial global model. For its solver, `client.received` is the global model that the client
        received. Return None if there is no second model.
        """
        return None

    def fine_tuning(self) -> Phase | None:
        """Return the phase in which clients adapt the final model to their data before its test, or None."""
        return None

    @property
    def tests_both_models(self) -> bool:
        """Whether each client has a model of its own beside the global one, without fine-tuning. Both are tested."""
        has_own = bool(self.keeps()) or self.own_solver() is not None
        return self.has_global_model and has_own and self.fine_tuning() is None


def needs_another_gradient(part: Personal, phase: Phase, solver: Solver | type[Solver]) -> bool:
    """Return whether a step of this phase needs one more gradient, for its personal layers.

    Personal layers step along the plain gradient. They cost one more gradient if they train together with shared layers
    whose solver does not compute the plain one.
    """
    return phase.trains == "all" and bool(part.keeps()) and not solver.plain_gradient


def phase_gradients(part: Personal, solver: Solver, local_epochs: int) -> list[tuple[int, int]]:
    """Return the epochs and the gradients per step of each phase of a round. A second model counts as a phase.

    `solver` is the method's solver. It is used only in phases that train shared parameters.
    """

    def gradients(phase: Phase) -> int:
        return 1 if phase.trains == "personal" else solver.gradients() + needs_another_gradient(part, phase, solver)

    phases = [(local_epochs if phase.epochs is None else phase.epochs, gradients(phase)) for phase in part.phases()]
    if (own := part.own_solver()) is not None:
        phases.append((local_epochs, own.gradients()))
    return phases


def mean_gradients(part: Personal, solver: Solver, local_epochs: int) -> float:
    """Return the mean number of gradients per step of a round."""
    phases = phase_gradients(part, solver, local_epochs)
    return sum(epochs * each for epochs, each in phases) / sum(epochs for epochs, _ in phases)


def personal_names(part: Personal, model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that stay on the clients."""
    return frozenset().union(*(_tensors_of(name, model) for name in part.keeps()))


def _tensors_of(name: str, model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors that `name`, an entry of `Personal.keeps`, stands for."""
    norms = [layer_name for layer_name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    layers = norms if name == BATCH_NORM else [name]
    trained = [tensor for tensor, p in model.named_parameters() if p.requires_grad]  # frozen ones are never sent
    tensors = [*trained, *dict(model.named_buffers())]
    return frozenset(tensor for tensor in tensors if any(_within(tensor, layer) for layer in layers))


def _within(tensor: str, name: str) -> bool:
    """Return whether a tensor has this name, belongs to the layer of this name, or matches the pattern."""
    return tensor == name or tensor.startswith(f"{name}.") or fnmatchcase(tensor, name)


def _nothing_kept(part: Personal, name: str, model: nn.Module) -> str:
    """Return the error message for a name in `Personal.keeps` that stands for no tensor."""
    method = type(part).__name__
    if name == BATCH_NORM:
        return (
            f"{method} keeps BatchNorm layers on the clients, but the model has none; expected a model such as resnet8"
        )
    if any(_within(parameter, name) for parameter, _ in model.named_parameters()):
        return (
            f"{method} keeps {name!r} on the clients, but the model does not train it; expected a layer whose "
            "parameters require gradients"
        )
    listed = ", ".join(dict.fromkeys(p.partition(".")[0] for p, _ in model.named_parameters()))
    return (
        f"{method} keeps {name!r} on the clients, but the model has no layer of that name with parameters; expected "
        f"one within {listed}"
    )


def check_personal(part: Personal, model: nn.Module) -> None:
    """Raise `UserError` if the part does not fit the model, or if its hooks contradict each other."""
    missing = next((name for name in part.keeps() if not _tensors_of(name, model)), None)
    if missing is not None:
        raise UserError(_nothing_kept(part, missing, model))
    kept = personal_names(part, model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if trained <= kept:
        raise UserError(
            f"{type(part).__name__} keeps every trained parameter of the model on the clients, so there is nothing to "
            "share; expected a model that also trains other layers"
        )
    if part.own_solver() is not None and (kept or len(part.phases()) > 1):
        raise UserError(
            f"{type(part).__name__} trains a second model and also keeps tensors of the first or has several phases; "
            "expected only one of these"
        )
    shared = [phase for phase in part.phases() if phase.trains != "personal"]
    if len(shared) != 1:
        raise UserError(
            f"{type(part).__name__}.phases() has {len(shared)} phases that train shared parameters; expected one"
        )


def shared_tensors(tensors: Mapping[str, Tensor], personal: frozenset[str]) -> Tensors:
    """Leave out personal tensors, also if `pack` has prefixed their names."""
    return {key: t for key, t in tensors.items() if not {key, key.partition("/")[2]} & personal}


@dataclass(frozen=True)
class SharedSolver(Solver):
    """A solver for the shared parameters of a model. The personal ones step along the plain gradient."""

    solver: Solver
    personal: frozenset[str]

    @property
    def members(self) -> tuple[Part, ...]:
        return self.solver.members

    def gradients(self) -> int:
        return self.solver.gradients()

    def changes_state(self) -> bool:
        return self.solver.changes_state()

    def direction(self, gradient: Gradient, params: Tensors, client: Client) -> Tensors:
        own = {name: t for name, t in params.items() if name in self.personal}
        shared = {name: t for name, t in params.items() if name not in self.personal}
        plain: list[Tensors] = []

        def shared_gradient(at: Tensors, part: LossPart | None = None, /) -> Tensors:
            grads = gradient({name: at.get(name, t) for name, t in params.items()}, part)
            if at is shared and part is None and not plain:  # the personal parameters can use this gradient, too
                plain.append(grads)
            return {name: grads[name] for name in at}

        found, state = split_direction(self.solver.direction(shared_gradient, shared, client))
        grads = plain[0] if plain else gradient(params)
        return {name: grads[name] if name in own else found[name] for name in params} | pack(STATE, state)


def without_personal(state: Mapping[str, Tensor]) -> Tensors:
    """Return a client's state without its personal tensors."""
    return {name: t for name, t in state.items() if not name.startswith(f"{PERSONAL}/")}
