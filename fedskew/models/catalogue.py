"""The catalogue of models: where each comes from and which inputs it accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedskew.errors import UserError, unknown
from fedskew.models.base import DataShape, Factory, has_features
from fedskew.models.cnn import cnn, convnet_l
from fedskew.models.custom import custom_factory
from fedskew.models.dnn import dnn
from fedskew.models.fasttext import fasttext
from fedskew.models.heads import replace_head
from fedskew.models.lenet import lenet5, simple_cnn
from fedskew.models.mobilenet import mobilenetv2
from fedskew.models.resnet import resnet8, resnet8_b, resnet10, resnet18, resnet18_imagenet, resnet32
from fedskew.models.tfcnn import tfcnn, tfcnn_128
from fedskew.models.vgg import vgg9, vgg11
from fedskew.randomness import integer_key

InputKind = Literal["image", "table", "text"]


@dataclass(frozen=True)
class ModelEntry:
    """A model in the catalogue."""

    name: str
    description: str
    paper: str
    """The paper that uses this form of the model, with "(code)" if only the paper's published code shows the form."""
    factory: Factory
    kinds: tuple[InputKind, ...] = ("image",)
    smallest_side: int = 1
    """The smallest height and width, in pixels, that its convolutions and pooling layers can process."""

    @property
    def takes(self) -> str:
        """The accepted inputs, in words."""
        size = f" of at least {self.smallest_side}×{self.smallest_side}" if self.smallest_side > 1 else ""
        words = {
            "image": f"images (channels, height, width){size}",
            "table": "tables (features,)",
            "text": "text",
        }
        return " or ".join(words[kind] for kind in self.kinds)


_ENTRIES = (
    ModelEntry("dnn", "two hidden layers of 200 units", "FedVLS", dnn, kinds=("image", "table")),
    ModelEntry("cnn", "two 5×5 convolutions, 512 hidden units", "FedLMD", cnn, smallest_side=4),
    ModelEntry("convnet-s", "the same network as cnn, under PKD's name", "PKD", cnn, smallest_side=4),
    ModelEntry("convnet-l", "three 5×5 convolutions, 512 hidden units", "PKD", convnet_l, smallest_side=8),
    ModelEntry("lenet5", "LeNet-5, padded by 2", "PKD", lenet5, smallest_side=12),
    ModelEntry("simple-cnn", "LeNet-5 without padding", "NIID-Bench", simple_cnn, smallest_side=16),
    ModelEntry("vgg9", "six 3×3 convolutions, dropout", "PKD", vgg9, smallest_side=8),
    ModelEntry("vgg11", "eight 3×3 convolutions, no BatchNorm", "FedNTD", vgg11, smallest_side=32),
    ModelEntry("tfcnn", "three 3×3 convolutions, bias-free head", "FedGR", tfcnn, smallest_side=8),
    ModelEntry("tfcnn-128", "TFCNN with 128 hidden units, head with bias", "FedGR", tfcnn_128, smallest_side=8),
    ModelEntry("mobilenetv2", "MobileNetV2 for small images", "FedVLS (code)", mobilenetv2),
    ModelEntry("resnet18", "ResNet-18, 3×3 stem", "FedVLS", resnet18),
    ModelEntry("resnet18-imagenet", "ResNet-18, 7×7 stem and max-pooling", "FedVLS (code)", resnet18_imagenet),
    ModelEntry("resnet10", "one block per stage, batch statistics in evaluation", "FedNTD (code)", resnet10),
    ModelEntry("resnet32", "16 to 64 channels, five blocks per stage", "FedVLS", resnet32),
    ModelEntry("resnet8", "16 to 64 channels, one block per stage", "FedLMD", resnet8),
    ModelEntry("resnet8-b", "ResNet-8 with convolutional shortcuts", "FedGR (code)", resnet8_b),
    ModelEntry("fasttext", "mean of word vectors, 32 hidden units", "FedVLS (code)", fasttext, kinds=("text",)),
)

MODELS: dict[str, ModelEntry] = {entry.name: entry for entry in _ENTRIES}


def make_model(name: str, data: DataShape, seed: int = 0, head: str = "auto") -> nn.Module:
    """Make the model called `name`, or the one that a user's `package.module:factory` returns.

    `data` is the shape of a sample and the number of classes, and `seed` determines the initial weights. If `head` is a
    name in `HEADS`, a head of that kind replaces the model's linear one.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        factory = custom_factory(name) if ":" in name else _fitting_factory(name, data)
        # Seed after importing a user's module, because the import may draw random numbers. torch.manual_seed would
        # also reseed the accelerators.
        torch.default_generator.manual_seed(integer_key(seed, "init"))
        return _with_head(factory(data), name, head)


def _with_head(model: nn.Module, name: str, head: str) -> nn.Module:
    if head in ("auto", "linear"):
        return model
    if not has_features(model) or not isinstance(model.head, nn.Linear):
        raise UserError(
            f"head is {head!r}, but the logits of model {name!r} are not head(encoder(x)) with a linear head; "
            "expected auto, or a fedskew.Classifier(encoder, head) with a linear head"
        )
    return replace_head(model, head)


def input_kind(data: DataShape) -> InputKind:
    """Infer the kind of data from the shape of a sample and the vocabulary."""
    if len(data.shape) == 3:
        return "image"
    return "text" if data.vocabulary else "table"


def fits(entry: ModelEntry, data: DataShape) -> bool:
    """Return whether the model accepts these inputs."""
    kind = input_kind(data)
    if data.fields:
        return False
    large_enough = kind != "image" or min(data.shape[1:]) >= entry.smallest_side
    return kind in entry.kinds and large_enough


def _fitting_factory(name: str, data: DataShape) -> Factory:
    """Return the model's factory. Raise `UserError` if the model does not accept these inputs."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    entry = MODELS[name]
    if data.fields:
        raise UserError(
            f"model {name!r} takes one tensor, but a sample has {' and '.join(field.name for field in data.fields)}; "
            "expected a model of your own, as an object or package.module:factory"
        )
    if not fits(entry, data):
        fitting = sorted(other.name for other in MODELS.values() if fits(other, data))
        raise UserError(
            f"model {name!r} does not accept {input_kind(data)} inputs of shape {data.shape}; "
            f"expected {entry.takes}. Models for such inputs: {', '.join(fitting)}"
        )
    return entry.factory


def parameter_count(model: nn.Module) -> int:
    """Count the parameters, including frozen ones, without buffers."""
    return sum(parameter.numel() for parameter in model.parameters())
