"""Train only the head (`train: head`). The initial encoder computes every sample's features once.

The server then works as if the features were the data and the head were the whole model. So training costs as much as
for a linear model, on every engine. A method that needs trained encoders, such as FedConcat, is refused. So is one that
keeps the whole head, or a layer outside the head, on the clients. The result is the same as training with a frozen
encoder in eval mode, where BatchNorm uses its running statistics. The final model has the encoder and the trained head.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedskew.data.dataset import Dataset, Samples
from fedskew.engine import DeviceSamples, Network, arithmetic, choose_device, features, number_format
from fedskew.experiment.config import Config
from fedskew.models.base import Classifier


def head_model(model: Classifier) -> Classifier:
    """Return the part of the model that is trained, as a model that takes features."""
    return Classifier(nn.Identity(), copy.deepcopy(model.head))


def with_encoder(model: Classifier, trained: nn.Module) -> Classifier:
    """Return the whole model with the trained head."""
    assert isinstance(trained, Classifier)
    weight = next(trained.parameters())
    whole = copy.deepcopy(model).to(weight.device, weight.dtype).eval()
    whole.head = trained.head
    return whole


def feature_dataset(dataset: Dataset, model: Classifier, config: Config) -> Dataset:
    """Return the dataset with each input replaced by its features.

    The last result is kept, because the runs of a comparison often share data and encoder.
    """
    _, weights, precision = key = (dataset, _encoder_weights(model), config.precision)
    for (last_dataset, last_weights, last_precision), found in _LAST:
        if last_dataset is dataset and last_precision == precision and _are_equal(weights, last_weights):
            return found
    with arithmetic(config.precision):
        found = _compute(dataset, model, config)
    _LAST[:] = [(key, found)]
    return found


_Weights = dict[str, torch.Tensor]
_LAST: list[tuple[tuple[Dataset, _Weights, str], Dataset]] = []
"""The last dataset, encoder weights and precision, and the dataset of features that was computed from them."""


def _encoder_weights(model: Classifier) -> _Weights:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.encoder.state_dict().items()}


def _are_equal(one: _Weights, other: _Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _compute(dataset: Dataset, model: Classifier, config: Config) -> Dataset:
    dtype, _ = number_format(config.precision)  # autocast is not used, because its rounding would stay in the features
    device = choose_device(config.device)
    network = Network(model, dtype).to(device)

    def inputs(samples: Samples) -> npt.NDArray[np.generic]:
        return features(network, network.state(), DeviceSamples(dataset, samples, device, dtype)).cpu().numpy()

    train, test = (replace(samples, x=inputs(samples)) for samples in (dataset.train, dataset.test))
    return replace(dataset, kind="table", train=train, test=test, vocabulary=0, fields=(), columns=(), scaling=())
