"""Low-rank adapters: layers keep their weights and learn a small correction (LoRA).

Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022. Convolutions are adapted as in the library
PEFT.

    y = W x + (α/r)·B A x        A: [r, in], B: [out, r]

W is frozen, r is the rank of the adapters, and α/r scales their output. For a convolution, A has the same kernel size
and stride, and B is a 1×1 convolution. B starts at zero, so the adapters do not change the model's outputs at first.
The head and all BatchNorm, GroupNorm and LayerNorm layers are trained as usual. All other parameters of the model are
frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.errors import UserError
from fedskew.models.base import Classifier
from fedskew.randomness import integer_key

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


class LowRank(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base: nn.Module, down: nn.Module, up: nn.Module, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = down, up
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return out

    @property
    def weight(self) -> Tensor:
        """The layer's weight with the correction. PyTorch's attention layers read the weights of layers inside them."""
        # `getattr`, because mypy takes `module.weight` for a tensor or a module.
        base, down, up = (getattr(part, "weight") for part in (self.base, self.down, self.up))  # noqa: B009
        corrected: Tensor = base + self.scale * torch.einsum("or,r...->o...", up.flatten(1), down)
        return corrected

    @property
    def bias(self) -> Tensor | None:
        own: Tensor | None = getattr(self.base, "bias")  # noqa: B009
        return own

    def merged(self) -> nn.Module:
        """Return a trainable copy of the frozen layer, with the correction added to its weight."""
        layer = copy.deepcopy(self.base).requires_grad_(True)
        with torch.no_grad():
            getattr(layer, "weight").copy_(self.weight)  # noqa: B009
        return layer


def with_adapters(model: Classifier, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0) -> Classifier:
    """Return a copy of the model with adapters in its encoder. Only the adapters, the norms and the head are trained.

    `targets` are patterns of layer names, such as `encoder.4*`. If there are none, all linear layers and all
    2D convolutions without groups get an adapter.
    """
    adapted = copy.deepcopy(model)
    chosen = [name for name, layer in adapted.named_modules() if _is_target(name, layer, targets)]
    if not chosen:
        layers = [name for name, layer in model.named_modules() if _is_adaptable(name, layer)]
        if not layers:
            raise UserError(
                "train is 'lora', but the encoder has no linear layer and no ungrouped 2D convolution; "
                "expected 'all' or 'head'"
            )
        raise UserError(
            f"lora_targets {', '.join(targets)} match no linear layer and no ungrouped 2D convolution of the encoder; "
            f"expected patterns such as {layers[0]!r}"
        )
    adapted.encoder.requires_grad_(False)
    for layer in adapted.encoder.modules():
        if isinstance(layer, _NORMS):
            layer.requires_grad_(True)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(integer_key(seed, "lora"))
        for name in chosen:
            parent, _, child = name.rpartition(".")
            setattr(adapted.get_submodule(parent), child, _adapter(adapted.get_submodule(name), rank, alpha / rank))
    return adapted


def merged(model: nn.Module) -> nn.Module:
    """Return a copy of the model in which every adapter is added to its layer. All of its encoder can be trained."""
    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LowRank):
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, layer.merged())
    assert isinstance(plain, Classifier)
    plain.encoder.requires_grad_(True)
    return plain


def _is_adaptable(name: str, layer: nn.Module) -> bool:
    if not name.startswith("encoder"):
        return False
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)


def _is_target(name: str, layer: nn.Module, targets: Sequence[str]) -> bool:
    return _is_adaptable(name, layer) and (not targets or any(fnmatchcase(name, pattern) for pattern in targets))


def _adapter(layer: nn.Module, rank: int, scale: float) -> LowRank:
    down: nn.Module
    up: nn.Module
    if isinstance(layer, nn.Conv2d):
        geometry: dict[str, Any] = {
            "kernel_size": layer.kernel_size,
            "stride": layer.stride,
            "padding": layer.padding,
            "dilation": layer.dilation,
            "padding_mode": layer.padding_mode,
        }
        down = nn.Conv2d(layer.in_channels, rank, bias=False, **geometry)
        up = nn.Conv2d(rank, layer.out_channels, kernel_size=1, bias=False)
    else:
        assert isinstance(layer, nn.Linear)
        down, up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
    nn.init.zeros_(up.weight)
    weight = next(layer.parameters())
    return LowRank(layer, down.to(weight), up.to(weight), scale)
