"""The Triton kernels against PyTorch's own convolution in float64, client by client.

Without a GPU they run in Triton's interpreter: TRITON_INTERPRET=1 with Triton installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, INTERPRETED, assert_close, made, needs_triton
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedskew.engine.kernels import stacked_conv2d, stacked_depthwise_conv2d, supported

Case = tuple[Tensor, Tensor, Tensor | None, int, int]
Convolution = Callable[[Tensor, Tensor, Tensor | None, tuple[int, int], tuple[int, int]], Tensor]

# channels, out channels, side, kernel, stride, padding
DENSE = {
    "one channel, padded": (1, 6, 9, 5, 1, 2),
    "one channel, not padded": (1, 6, 9, 5, 1, 0),
    "three channels": (3, 32, 8, 5, 1, 2),
    "odd channels both sides": (6, 17, 7, 5, 1, 0),
    "a block in one tap": (32, 20, 6, 3, 1, 1),
    "several blocks in one tap": (64, 33, 4, 3, 1, 1),
    "stride 2": (16, 32, 8, 3, 2, 1),
    "stride 2, odd side": (16, 16, 7, 3, 2, 1),
    "1x1, stride 2": (16, 16, 6, 1, 2, 0),
    "stride 3": (5, 7, 10, 4, 3, 1),
    "wide": (128, 128, 4, 3, 1, 1),
    "wide, padded blocks, stride 2": (144, 130, 5, 3, 2, 1),
}
DEPTHWISE = {
    "16 channels": (16, 6, 3, 1, 1),
    "odd channels": (5, 7, 3, 1, 1),
    "two blocks of channels": (96, 4, 3, 1, 1),
    "stride 2": (32, 8, 3, 2, 1),
    "stride 2, odd side": (16, 7, 3, 2, 1),
    "5x5": (8, 6, 5, 1, 2),
    "not padded": (8, 6, 3, 1, 0),
    "2x2, padded on all sides": (8, 5, 2, 1, 1),
    "padding as wide as the window": (8, 4, 2, 1, 2),
    "stride 3, not padded": (8, 10, 2, 3, 0),
}


def results(
    convolve: Convolution, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> list[Tensor]:
    """The convolution, and the gradients of a weighted sum of it."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = convolve(leaves[0], leaves[1], leaves[2] if bias is not None else None, (stride, stride), (padding, padding))
    factors = made(*y.shape, seed=9, dtype=y.dtype) if y.dtype == x.dtype else made(*y.shape, seed=9).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * factors).sum(), leaves)]


def by_client(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    groups = x.shape[2] // weight.shape[2]
    biases = [None] * len(x) if bias is None else list(bias)
    return torch.stack([F.conv2d(*one, stride, padding, 1, groups) for one in zip(x, weight, biases, strict=True)])


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def dense_case(name: str, with_bias: bool = True) -> Case:
    channels, out, side, kernel, stride, padding = DENSE[name]
    x, weight = made(2, 3, channels, side, side, seed=1), made(2, out, channels, kernel, kernel, seed=2)
    return x, weight, made(2, out, seed=3) if with_bias else None, stride, padding


def depthwise_case(name: str, with_bias: bool = True) -> Case:
    channels, side, kernel, stride, padding = DEPTHWISE[name]
    x, weight = made(2, 3, channels, side, side, seed=1), made(2, channels, 1, kernel, kernel, seed=2)
    return x, weight, made(2, channels, seed=3) if with_bias else None, stride, padding


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def test_other_formats_and_devices_are_not_supported() -> None:
    x, weight = torch.zeros(1, 1, 1, 4, 4), torch.zeros(1, 1, 1, 3, 3)
    assert not supported(x.double(), weight.double())
    assert supported(x, weight) == (INTERPRETED and find_spec("triton") is not None)


@needs_triton
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", DENSE)
def test_dense_is_each_clients_convolution(name: str, with_bias: bool) -> None:
    x, weight, bias, stride, padding = dense_case(name, with_bias)
    assert supported(x, weight)
    exact = results(by_client, *wide(x, weight, bias), stride, padding)
    assert_close(results(stacked_conv2d, x, weight, bias, stride, padding), exact, 2e-6)


@needs_triton
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_is_each_clients_convolution(name: str, with_bias: bool) -> None:
    x, weight, bias, stride, padding = depthwise_case(name, with_bias)
    exact = results(by_client, *wide(x, weight, bias), stride, padding)
    assert_close(results(stacked_depthwise_conv2d, x, weight, bias, stride, padding), exact, 1e-5)


no_bf16_products = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter multiplies bfloat16 as integers")
HALF = [pytest.param(torch.bfloat16, marks=no_bf16_products), torch.float16]


def assert_half_is_close(convolve: Convolution, dtype: torch.dtype, case: Case) -> None:
    *given, stride, padding = case
    x, weight, bias = (t.to(dtype) for t in given)
    found = results(convolve, x, weight, bias, stride, padding)
    assert all(t.dtype == dtype for t in found)
    exact = results(by_client, x.double(), weight.double(), bias.double(), stride, padding)
    assert_close(found, exact, 1e-2)


@needs_triton
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["three channels", "several blocks in one tap", "stride 2"])
def test_dense_in_sixteen_bits_stays_so(name: str, dtype: torch.dtype) -> None:
    assert_half_is_close(stacked_conv2d, dtype, dense_case(name))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["two blocks of channels", "stride 2"])
def test_depthwise_in_sixteen_bits_stays_so(name: str, dtype: torch.dtype) -> None:
    assert_half_is_close(stacked_depthwise_conv2d, dtype, depthwise_case(name))


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter cannot multiply bfloat16 numbers")
def test_tf32_is_what_cudnn_would_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    x, weight, bias, stride, padding = dense_case("a block in one tap")
    exact = results(by_client, *wide(x, weight, bias), stride, padding)
    assert_close(results(stacked_conv2d, x, weight, bias, stride, padding), exact, 2e-3)


@needs_triton
def test_autocast_computes_in_its_format_and_gives_gradients_in_theirs() -> None:
    x, weight, bias, stride, padding = dense_case("three channels")
    with torch.autocast(DEVICE, torch.bfloat16):
        found = results(stacked_conv2d, x, weight, bias, stride, padding)
    assert found[0].dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in found[1:])


@needs_triton
def test_weights_may_be_views_of_one_arena() -> None:
    x, weight, bias, stride, padding = dense_case("three channels")
    arena = made(2, 2 * weight[0].numel(), seed=5)
    view = arena[:, 7 : 7 + weight[0].numel()].view(weight.shape)
    assert not view.is_contiguous()
    exact = results(by_client, *wide(x, view, bias), stride, padding)
    assert_close(results(stacked_conv2d, x, view, bias, stride, padding), exact, 1e-5)


@needs_triton
@pytest.mark.parametrize("dense", [True, False])
def test_memory_of_the_result_is_channels_last_whatever_the_images(dense: bool) -> None:
    x, weight, bias, stride, padding = dense_case("stride 2") if dense else depthwise_case("stride 2")
    convolve = stacked_conv2d if dense else stacked_depthwise_conv2d
    last = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    found = [convolve(images, weight, bias, (stride, stride), (padding, padding)) for images in (x, last)]
    assert torch.equal(*found)
    assert all(y.permute(0, 1, 3, 4, 2).is_contiguous() for y in found)


@needs_triton
def test_images_without_gradient_get_none() -> None:
    x, weight = dense_case("three channels")[:2]
    traced = make_fx(lambda w: torch.autograd.grad(stacked_conv2d(x, w, None, (1, 1), (2, 2)).sum(), w))(
        weight.requires_grad_()
    )
    called = " ".join(str(node.target) for node in traced.graph.nodes)
    assert "weight_gradient" in called
    assert "input_gradient" not in called


@needs_triton
@pytest.mark.parametrize("dense", [True, False])
def test_a_traced_step_gives_the_same(dense: bool) -> None:
    x, weight, bias, stride, padding = dense_case("stride 2") if dense else depthwise_case("stride 2")
    convolve: Convolution = stacked_conv2d if dense else stacked_depthwise_conv2d

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        y = convolve(x, weight, bias, (stride, stride), (padding, padding))
        return [y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))]

    leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    traced = make_fx(step, tracing_mode="fake")(*leaves)
    for one, other in zip(traced(*leaves), step(*leaves), strict=True):
        assert torch.equal(one, other)


@needs_triton
@pytest.mark.parametrize("dense", [True, False])
def test_the_operations_are_what_they_say(dense: bool) -> None:
    """Their fake versions, schemas and gradients, by PyTorch's own examination."""
    from fedskew.engine.kernels import convolution, depthwise

    x, weight, bias, stride, padding = dense_case("stride 2") if dense else depthwise_case("stride 2")
    images = x.permute(0, 1, 3, 4, 2).contiguous().requires_grad_()
    if dense:
        given = (images, weight.requires_grad_(), bias, [stride] * 2, [padding] * 2, False)
        torch.library.opcheck(convolution._forward.overload, given)
    else:
        packed = weight.squeeze(2).permute(0, 2, 3, 1).contiguous().requires_grad_()
        torch.library.opcheck(depthwise._forward.overload, (images, packed, bias, [stride] * 2, [padding] * 2))
