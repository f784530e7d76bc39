"""BatchNorm's Triton kernels against the formula in float64, client by client."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import assert_close, made, needs_triton
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedskew.engine.kernels import stacked_batch_norm
from fedskew.engine.kernels.batch_norm import Activation, _forward, tiling

EPS = 1e-5
# clients, samples, channels, side
SHAPES = {
    "one block of channels": (2, 5, 16, 4),
    "a padded block": (2, 4, 24, 3),
    "several blocks, the last padded": (2, 7, 144, 3),
    "odd channels, one pixel": (3, 9, 5, 1),
    "several splits of the rows": (2, 40, 16, 8),
}
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"none": lambda y: y, "relu": F.relu, "relu6": F.relu6}
Case = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

pytestmark = needs_triton


def case(name: str, dtype: torch.dtype = torch.float32, shift: float = 1.0) -> Case:
    clients, samples, channels, side = SHAPES[name]
    x = (made(clients, samples, channels, side, side, seed=1) * 2 + shift).to(dtype)
    return x, made(clients, channels, seed=2) + 1, 2 * made(clients, channels, seed=3), None


def some_valid(x: Tensor) -> Tensor:
    """All rows of the first client, ever fewer of the next."""
    clients, samples = x.shape[:2]
    counts = torch.tensor([max(2, samples - 2 * client) for client in range(clients)])
    return (torch.arange(samples) < counts.unsqueeze(1)).to(x.device)


def expected(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, valid: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    each = []
    for client, images in enumerate(x):
        counted = images if valid is None else images[valid[client]]
        mean, var = counted.mean((0, 2, 3)), counted.var((0, 2, 3), correction=0)
        y = (images - mean.view(-1, 1, 1)) / (var + EPS).sqrt().view(-1, 1, 1)
        y = y if weight is None else y * weight[client].view(-1, 1, 1)
        y = y if bias is None else y + bias[client].view(-1, 1, 1)
        each.append((ACTIVATIONS[activation](y), mean, var))
    y, mean, var = (torch.stack(values) for values in zip(*each, strict=True))
    return y, mean, var


def ours(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, valid: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    return stacked_batch_norm(x, weight, bias, valid, EPS, activation)


def results(normalise: Callable[..., tuple[Tensor, ...]], given: Case, activation: Activation) -> list[Tensor]:
    """What it returns, and the gradients of a weighted sum over valid rows."""
    *tensors, valid = given
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y, mean, var = normalise(*leaves, valid, activation)
    factors = made(*y.shape, seed=9).to(y.dtype)
    if valid is not None:
        factors = factors * valid.view(*valid.shape, 1, 1, 1)
    gradients = torch.autograd.grad((y * factors).sum(), [t for t in leaves if t is not None])
    return [y.detach(), mean.detach(), var.detach(), *gradients]


def in_float64(given: Case) -> Case:
    x, weight, bias, valid = given
    return x.double(), None if weight is None else weight.double(), None if bias is None else bias.double(), valid


def assert_right(given: Case, activation: Activation, tolerance: float = 1e-5) -> None:
    assert_close(results(ours, given, activation), results(expected, in_float64(given), activation), tolerance)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_each_clients_batch_norm(name: str, activation: Activation) -> None:
    assert_right(case(name), activation)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_that_pad_do_not_count(name: str) -> None:
    x, weight, bias, _ = case(name)
    assert_right((x, weight, bias, some_valid(x)), "relu")


def test_the_case_of_several_splits_has_them() -> None:
    clients, samples, channels, side = SHAPES["several splits of the rows"]
    for backwards in (False, True):
        assert tiling(clients, samples * side**2, channels, torch.float32, backwards=backwards).splits > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["a padded block", "several splits of the rows"])
def test_sixteen_bits_stay_so_and_statistics_are_exact(name: str, dtype: torch.dtype) -> None:
    given = case(name, dtype)
    y, mean, var, grad_x, *others = results(ours, given, "relu")
    assert y.dtype == grad_x.dtype == dtype
    assert all(t.dtype == torch.float32 for t in (mean, var, *others))
    exact = results(expected, in_float64(given), "relu")
    assert_close([mean, var], exact[1:3], 1e-6)
    assert_close([y, grad_x, *others], [exact[0], *exact[3:]], 1e-2)


@pytest.mark.parametrize(("with_weight", "with_bias"), [(False, False), (True, False), (False, True)])
def test_weight_and_bias_may_be_missing(with_weight: bool, with_bias: bool) -> None:
    x, weight, bias, _ = case("a padded block")
    assert_right((x, weight if with_weight else None, bias if with_bias else None, None), "relu6")


def test_numbers_far_from_zero_keep_their_variance() -> None:
    given = case("several splits of the rows", shift=1e4)
    found, exact = ours(*given, "none"), expected(*in_float64(given), "none")
    assert_close([found[2]], [exact[2]], 1e-4)


def test_garbage_in_rows_that_pad_stays_there() -> None:
    x, weight, bias, _ = case("a padded block")
    valid = some_valid(x)
    spoiled = torch.where(valid.view(*valid.shape, 1, 1, 1), x, torch.nan)
    for one, other in zip(
        ours(spoiled, weight, bias, valid, "relu"), ours(x, weight, bias, valid, "relu"), strict=True
    ):
        assert torch.equal(one[valid] if one.shape == x.shape else one, other[valid] if one.shape == x.shape else other)


def test_a_client_without_valid_rows_touches_no_other() -> None:
    given = case("several blocks, the last padded")
    valid = torch.ones(given[0].shape[:2], dtype=torch.bool, device=given[0].device)
    alone = results(ours, (*given[:3], valid), "relu")
    valid = valid.clone()
    valid[1] = False
    for one, other in zip(results(ours, (*given[:3], valid), "relu"), alone, strict=True):
        assert torch.equal(one[0], other[0])


def test_a_gradient_of_rows_that_pad_reaches_them_only() -> None:
    x, weight, bias, _ = case("a padded block")
    valid = some_valid(x)
    x.requires_grad_()
    y = ours(x, weight, bias, valid, "none")[0]
    padding = (~valid).view(*valid.shape, 1, 1, 1).expand_as(y)
    (found,) = torch.autograd.grad(y, x, padding.to(y.dtype))
    assert not found[valid].any()
    assert (found[~valid] != 0).all()


def test_not_a_number_is_not_hidden_by_the_activation() -> None:
    x, weight, bias, _ = case("a padded block")
    x[1, 0, 3] = torch.nan
    y = ours(x, weight, bias, None, "relu6")[0]
    assert y[1, :, 3].isnan().all()
    assert not y[0].isnan().any()


def test_weights_may_be_views_of_one_arena() -> None:
    x, weight, bias, valid = case("a padded block")
    assert weight is not None
    arena = made(len(weight), 3 * weight.shape[1], seed=5)
    assert_right((x, arena[:, 7 : 7 + weight.shape[1]], bias, valid), "relu")
    assert_right((x, arena[:, ::3], bias, valid), "relu")


def test_memory_of_the_result_is_channels_last_whatever_the_images() -> None:
    x, *others = case("a padded block")
    last = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    found = [ours(images, *others, "relu")[0] for images in (x, last)]
    assert torch.equal(*found)
    assert all(y.permute(0, 1, 3, 4, 2).is_contiguous() for y in found)


def test_no_gradient_flows_through_the_statistics() -> None:
    x, *others = case("a padded block")
    y, mean, var = ours(x.requires_grad_(), *others, "relu")
    assert y.requires_grad
    assert not mean.requires_grad
    assert not var.requires_grad


def test_a_traced_step_gives_the_same() -> None:
    x, weight, bias, _ = case("a padded block")
    valid = some_valid(x)

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        y, mean, var = ours(x, weight, bias, valid, "relu")
        return [y, mean, var, *torch.autograd.grad(y.square().sum(), (x, weight, bias))]

    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    for one, other in zip(traced(*leaves), step(*leaves), strict=True):
        assert torch.equal(one, other)


def test_the_operation_is_what_it_says() -> None:
    """Its fake version, schema and gradient, by PyTorch's own examination."""
    x, weight, bias, _ = case("a padded block")
    assert weight is not None
    assert bias is not None
    images = x.permute(0, 1, 3, 4, 2).contiguous().requires_grad_()
    torch.library.opcheck(
        _forward.overload,
        (images, weight.requires_grad_(), bias.requires_grad_(), some_valid(x), EPS, "relu"),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
