"""Which methods work with example-level privacy, and how often a round uses a sample.

In a local step, example-level privacy clips the gradient of each sample and adds noise to their sum (DP-SGD: Abadi et
al., "Deep learning with differential privacy", CCS 2016). Everything that a client computes from such gradients, and
everything that the server does, is then as private as the gradients themselves. So a method works with example-level
privacy if it uses the client's data in no other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedskew.errors import UserError
from fedskew.methods.parts import Part, Solver
from fedskew.methods.personal import BATCH_NORM, Personal, needs_another_gradient, phase_gradients
from fedskew.methods.stages import Calibration, Schedule

if TYPE_CHECKING:
    from fedskew.methods.composition import Method

EXAMPLE_SENSITIVITY = 2.0
"""How far the sum of the clipped gradients can move if one sample is replaced by another, in units of the clip."""


def unprotected_use(part: type[Part]) -> str:
    """Return how a part uses the client's data besides the gradients of single samples, or an empty string."""
    if issubclass(part, Schedule | Calibration):
        return "runs in stages"
    if part.reveals != "nothing":
        return f"reveals {part.reveals}"
    for hook in ("opening", "closing"):
        if getattr(part, hook) is not getattr(Part, hook):
            return "computes sums over the client's samples"
    if issubclass(part, Personal) and BATCH_NORM in part().keeps():
        return "needs a model with BatchNorm"
    if not is_sample_by_sample(part):
        return (
            "makes the loss depend on label counts, or on several samples at once (or does not declare "
            "sample_by_sample)"
        )
    return ""


def is_sample_by_sample(part: type[Part]) -> bool:
    """Return whether the part declares `sample_by_sample` (see `Part`).

    A class that overrides a loss must declare it again.
    """
    for kind in part.__mro__:
        if "sample_by_sample" in vars(kind):
            return bool(kind.sample_by_sample)  # type: ignore[attr-defined]
        if any(hook in vars(kind) for hook in _LOSSES):
            return False
    return False


_LOSSES = ("loss", "proximal", "perturbed", "term", "weights")
"""The hooks that the declaration `sample_by_sample` is about."""


def require_private_gradients(method: Method) -> None:
    """Refuse a method that uses the clients' data other than through the gradients that its solver counts."""
    for part in method.members:
        if use := unprotected_use(type(part)):
            setting = "the setting class_weights" if part is method.class_weights else f"method {method.name!r}"
            raise UserError(
                f"{setting} {use}, which example-level privacy does not cover ({type(part).__name__}); expected "
                "another one: docs/federation.md lists those that work"
            )
    if _needs_another_gradient(method):
        raise UserError(
            f"method {method.name!r} needs one more gradient per step for its personal layers, because "
            f"{type(method.solver).__name__} does not compute the plain one, and example-level privacy would not count "
            "it; expected another solver, such as fedprox"
        )


def _needs_another_gradient(method: Method) -> bool:
    """Return whether the personal layers of the method need a gradient that its solver does not count."""
    personal = method.personal
    if personal is None:
        return False
    return any(needs_another_gradient(personal, phase, method.solver) for phase in personal.phases())


def gradients_per_sample(solver: Solver, personal: Personal | None, local_epochs: int) -> int:
    """Return the maximum number of gradients of a round that use one given sample.

    In each epoch, a sample is in the batch of at most one local step. All gradients of this step count.
    """
    if personal is None:
        return local_epochs * solver.gradients()
    return sum(epochs * each for epochs, each in phase_gradients(personal, solver, local_epochs))
