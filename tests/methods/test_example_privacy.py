"""Which methods work with example-level privacy: what they declare is what they compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_cases import only
from toy_runs import finished, image_federation, linear_layers, server

from fedskew.errors import UserError
from fedskew.gaussian_privacy import epsilon
from fedskew.losses import cross_entropy
from fedskew.methods import METHODS, Objective, Regulariser, Solver, make_method
from fedskew.methods.example_privacy import (
    EXAMPLE_SENSITIVITY,
    gradients_per_sample,
    is_sample_by_sample,
    require_private_gradients,
    unprotected_use,
)
from fedskew.methods.parts import Client, Outputs, Part, Tensors, collect
from fedskew.methods.pkd import PartialDistillation

LOSSES = sorted(
    {part for entry in METHODS.values() for part in entry.parts if issubclass(part, Objective | Regulariser)},
    key=lambda part: part.__name__,
)


def outputs(rows: slice, logits_per_class: int) -> Outputs:
    draw = torch.Generator().manual_seed(2)

    def model() -> Outputs:
        logits, features = (
            torch.randn(6, size, generator=draw, dtype=torch.float64) for size in (8 * logits_per_class, 6)
        )
        return Outputs(logits[rows], features[rows])

    out, teacher, previous = model(), model(), model()
    return replace(out, companions={"teacher": teacher, "state/previous": previous})


def downlink(part: Part) -> Tensors:
    params = {name: p.detach().double() for name, p in linear_layers(8).named_parameters()}
    return collect([part], "downlink", part.server_state(params))


def client(part: Part, counts: list[int]) -> Client:
    opening = {"features": torch.zeros(8, 6).double(), "squares": torch.zeros(8).double()}
    return Client(torch.tensor(counts), {}, downlink(part), {}, opening)


LABELS = torch.tensor([0, 3, 3, 5, 0, 1])
SOME, OTHERS = [2, 1, 0, 2, 0, 1, 0, 0], [9, 1, 1, 1, 4, 0, 0, 3]


def value(part: Part, rows: slice, counts: list[int]) -> torch.Tensor:
    heads = 2 if getattr(part, "head", "") == "personal" else 1
    hook = part.loss if isinstance(part, Objective) else part.term  # type: ignore[attr-defined]
    found: torch.Tensor = hook(outputs(rows, heads), LABELS[rows], client(part, counts))
    return found


@pytest.mark.parametrize("kind", LOSSES, ids=lambda part: part.__name__)
def test_a_loss_declares_whether_it_is_a_mean_over_samples(kind: type[Part]) -> None:
    """The loss of the batch is the mean of the samples' losses, and label counts do not matter, or it says so."""
    part = kind()
    if not unprotected_use(kind).startswith("has a loss") and unprotected_use(kind):
        return  # refused because of what it sends or computes besides the loss
    whole = value(part, slice(None), SOME)
    alone = torch.stack([value(part, slice(row, row + 1), SOME) for row in range(6)]).mean()
    is_mean = torch.allclose(whole, alone, rtol=1e-9) and torch.allclose(whole, value(part, slice(None), OTHERS))
    assert is_sample_by_sample(kind) == is_mean


def test_covered_methods_are_those_without_label_counts_passes_and_stages() -> None:
    covered = {name for name, entry in METHODS.items() if not any(map(unprotected_use, entry.parts))}
    assert {"fedavg", "fedprox", "scaffold", "feddyn", "fedntd", "moon", "fedsam", "fedavgm", "median"} <= covered
    refused = {"fedvls", "fedlc", "fedgr", "fpl", "ccvr", "pkd", "feddecorr", "feddisco", "fedcurv", "local-only"}
    assert not refused & covered
    assert unprotected_use(PartialDistillation)


class Undeclared(Objective):
    """A loss that may be a mean over samples, but does not declare it."""

    def loss(self, out: Outputs, y: torch.Tensor, client: Client) -> torch.Tensor:
        return cross_entropy(out.logits, y)


def test_a_loss_without_a_declaration_is_refused_as_such() -> None:
    assert unprotected_use(Undeclared).endswith("(or does not declare sample_by_sample)")


COVERED = [name for name, entry in METHODS.items() if entry.example_privacy]


@pytest.mark.parametrize("method", only(["fedavg", "fedgf", "mofedsam", "pfedme", "fedsmoo", "fedrep"], COVERED))
def test_a_covered_method_trains_and_computes_no_gradient_that_does_not_count(method: str) -> None:
    """The engine refuses a gradient more than the solver declares."""
    private = {"example_clip": 0.5, "example_noise": 1.0, "rounds": 2, "local_epochs": 1}
    state, rows = finished(server(image_federation(), method, linear_layers(), **private))
    assert all(tensor.isfinite().all() for tensor in state.model.params.values())
    assert rows[-1].privacy is not None
    assert rows[-1].privacy["epsilon"] > rows[-2].privacy["epsilon"] > 0  # type: ignore[index]


SOLVERS = [name for name in COVERED if any(issubclass(part, Solver) for part in METHODS[name].parts)]


@pytest.mark.parametrize("solver", only(["fedprox", "pfedme", "fedsmoo", "fedlesam", "fedsol"], SOLVERS))
def test_a_solver_declares_whether_it_computes_the_plain_gradient(solver: str) -> None:
    """Personal layers step along it. If it must be computed for them alone, the engine refuses the step."""
    private = {"example_clip": 0.5, "example_noise": 1.0, "rounds": 1, "local_epochs": 1}
    this = server(image_federation(), f"{solver}+fedper", linear_layers(), **private)
    if make_method(solver).solver.plain_gradient:
        require_private_gradients(make_method(f"{solver}+fedper"))
        finished(this)
        return
    for combined in (f"{solver}+fedrep", f"{solver}+ditto"):  # the personal layers have phases of their own
        require_private_gradients(make_method(combined))
    with pytest.raises(UserError, match="one more gradient per step for its personal layers"):
        require_private_gradients(make_method(f"{solver}+fedper"))
    with pytest.raises(UserError, match="computes more gradients than its"):
        finished(this)


@pytest.mark.parametrize(
    ("method", "expected"),
    [("fedavg", 5), ("fedsam", 10), ("fedrep", 5 + 10), ("ditto", 5 + 5), ("fedper+fedsam", 10)],
)
def test_every_gradient_of_a_round_counts(method: str, expected: int) -> None:
    made = make_method(method)
    if method == "fedrep":
        expected = sum(phase.epochs or 5 for phase in made.personal.phases())  # type: ignore[union-attr]
    assert gradients_per_sample(made.solver, made.personal, 5) == expected


@pytest.mark.parametrize(("gradients", "noise"), [(1, 2.0), (25, 4.0), (100, 30.0)])
def test_epsilon_of_one_sample_is_that_of_dp_accounting(gradients: int, noise: float) -> None:
    """Google's accountant composes one Gaussian event per epoch. Its noise is relative to a sensitivity of 1."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    event = accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(noise / EXAMPLE_SENSITIVITY), gradients)
    expected = PLDAccountant().compose(event).get_epsilon(1e-5)
    assert epsilon(gradients, noise, 1e-5, EXAMPLE_SENSITIVITY) == pytest.approx(expected, rel=2e-3)


def test_epsilon_of_tiny_noise_is_large_and_finite() -> None:
    assert 1e18 < epsilon(5, 1e-9, 1e-5, EXAMPLE_SENSITIVITY) < float("inf")
