"""FedMR's inter-class term, computed from inner products, against differences of each pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedskew.losses import IGNORE, prototype_margin

CLASSES, WIDTH = 30, 48


def by_differences(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """The formula, through a tensor of [C, C, d]."""
    members = (targets.unsqueeze(-1) == torch.arange(len(known))).to(features.dtype)
    means = members.T @ features / members.sum(dim=0).clamp(min=1).unsqueeze(-1)
    here = (members.sum(dim=0) > 0) & known
    pairs = here.unsqueeze(-1) & known & ~torch.eye(len(known), dtype=torch.bool)
    between = (prototypes.unsqueeze(1) - prototypes).norm(dim=-1)
    shortfall = (between - (means.unsqueeze(1) - prototypes).norm(dim=-1)).clamp(min=0)
    return torch.where(pairs, shortfall, 0.0).sum() / pairs.sum().clamp(min=1)


def drawn(seed: int, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prototypes = offset + torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, (17,), generator=generator)
    noise = torch.randn(17, WIDTH, generator=generator, dtype=torch.float64)
    features = offset + 0.8 * (prototypes[targets] - offset) + 0.3 * noise
    targets[-3:] = IGNORE
    return features, targets, prototypes, torch.rand(CLASSES, generator=generator) < 0.8


def with_slope(
    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], features: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = features.clone().requires_grad_()
    value = loss(leaf, *rest)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("seed", range(5))
def test_inner_products_give_the_same_as_differences(seed: int) -> None:
    found, expected = (with_slope(loss, *drawn(seed)) for loss in (prototype_margin, by_differences))
    assert expected[0] > 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_points_far_from_the_origin_lose_no_digits() -> None:
    """Such as the features of a ReLU, in float32: their squares are a million times the squared distances."""
    features, targets, prototypes, known = drawn(0, offset=1000.0)
    single = features.float(), targets, prototypes.float(), known
    expected = with_slope(by_differences, single[0].double(), targets, single[2].double(), known)
    value, slope = with_slope(prototype_margin, *single)
    torch.testing.assert_close(value.double(), expected[0], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(slope.double(), expected[1], rtol=1e-2, atol=1e-4 * float(expected[1].abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nearness", [0.0, 1e-12, 1e-8, 1e-6, 1e-4])
def test_at_or_near_the_prototype_of_another_class_the_gradient_is_bounded(nearness: float, dtype: torch.dtype) -> None:
    """No distance changes faster than its point moves, so neither does the term of a class with one sample."""
    _, _, prototypes, _ = drawn(1)
    features = (prototypes[3] * (1 + nearness)).unsqueeze(0).to(dtype)
    known = torch.arange(CLASSES) < 5
    value, slope = with_slope(prototype_margin, features, torch.tensor([2]), prototypes.to(dtype), known)
    assert value > 0
    assert slope.norm() < 1.5


def test_points_equal_up_to_rounding_have_no_gradient() -> None:
    """Its direction would be that of rounding, which differs between programs."""
    _, _, prototypes, _ = drawn(3)
    nearly = torch.nextafter(prototypes[3].float(), torch.tensor(9.0)).unsqueeze(0)
    known = (torch.arange(CLASSES) == 2) | (torch.arange(CLASSES) == 3)
    value, slope = with_slope(prototype_margin, nearly, torch.tensor([2]), prototypes.float(), known)
    assert value == pytest.approx(float(torch.dist(prototypes[2], prototypes[3])), rel=1e-6)
    assert (slope == 0).all()


def test_equal_prototypes_leave_no_margin() -> None:
    prototypes = torch.full((CLASSES, WIDTH), 0.1, dtype=torch.float64)
    features, targets, _, known = drawn(2)
    value, slope = with_slope(prototype_margin, features, targets, prototypes, known)
    assert value == 0
    assert (slope == 0).all()


def test_vmap_maps_it_over_clients() -> None:
    clients = [drawn(seed) for seed in range(3)]
    stacked = [torch.stack(parts) for parts in zip(*clients, strict=True)]
    slopes, values = torch.func.vmap(torch.func.grad_and_value(prototype_margin))(*stacked)
    alone = [with_slope(prototype_margin, *client) for client in clients]
    torch.testing.assert_close(values, torch.stack([value for value, _ in alone]))
    torch.testing.assert_close(slopes, torch.stack([slope for _, slope in alone]))


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is created."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


def test_no_tensor_of_all_pairs_and_dimensions_is_made() -> None:
    batch = drawn(4)
    with Largest() as largest:
        with_slope(prototype_margin, *batch)
    assert largest.numbers == CLASSES * WIDTH
