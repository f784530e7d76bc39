"""Every model: the published parameter count, encoder and head, and what the engines need."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedskew.errors import UserError
from fedskew.models import MODELS, Classifier, DataShape, make_model, parameter_count
from fedskew.models.cnn import convnet

CIFAR10 = DataShape((3, 32, 32), 10)
CIFAR100 = DataShape((3, 32, 32), 100)
TINY = DataShape((3, 64, 64), 200)
MNIST = DataShape((1, 28, 28), 10)
DIGITS = DataShape((1, 8, 8), 10)
AG_NEWS = DataShape((200,), 4, vocabulary=98_635)

COUNTS = [
    ("dnn", MNIST, 199_210),
    ("mobilenetv2", CIFAR10, 2_296_922),
    ("mobilenetv2", CIFAR100, 2_412_212),
    ("mobilenetv2", TINY, 2_540_312),
    ("resnet18-imagenet", CIFAR10, 11_181_642),
    ("resnet18", CIFAR10, 11_173_962),
    ("resnet18", CIFAR100, 11_220_132),
    ("resnet32", CIFAR10, 464_154),
    ("resnet32", CIFAR100, 470_004),
    ("resnet8", CIFAR10, 75_290),
    ("resnet8-b", CIFAR10, 78_042),
    ("resnet10", CIFAR10, 4_903_242),
    ("cnn", CIFAR10, 2_156_490),
    ("cnn", CIFAR100, 2_202_660),
    ("cnn", MNIST, 1_663_370),
    ("cnn", TINY, 8_545_416),
    ("convnet-s", MNIST, 1_663_370),
    ("convnet-l", CIFAR10, 1_312_842),
    ("lenet5", MNIST, 61_706),
    ("simple-cnn", MNIST, 44_426),
    ("simple-cnn", CIFAR10, 62_006),
    ("vgg9", CIFAR10, 3_491_530),
    ("vgg11", CIFAR10, 9_750_922),
    ("tfcnn", CIFAR10, 66_560),
    ("tfcnn", CIFAR100, 158_720),
    ("tfcnn", MNIST, 61_504),
    ("tfcnn-128", CIFAR10, 188_810),
    ("fasttext", AG_NEWS, 98_635 * 32 + 33 * 32 + 33 * 4),
]


@pytest.mark.parametrize(("name", "inputs", "count"), COUNTS)
def test_parameter_count_is_the_published_one(name: str, inputs: DataShape, count: int) -> None:
    with torch.device("meta"):
        assert parameter_count(MODELS[name].factory(inputs)) == count


def test_every_model_has_a_published_count() -> None:
    assert {name for name, _, _ in COUNTS} == set(MODELS)


def test_convnet_l_with_the_narrower_third_convolution() -> None:
    assert parameter_count(convnet(CIFAR10, filters=(32, 64, 64))) == 686_090


def test_fasttext_has_the_3_16_million_of_pfllib() -> None:
    assert round(parameter_count(make_model("fasttext", AG_NEWS)) / 1e6, 2) == 3.16


def test_mobilenetv2_running_statistics() -> None:
    model = make_model("mobilenetv2", CIFAR10)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 57
    assert sum(buffer.numel() for norm in norms for buffer in norm.buffers() if buffer.dim()) == 35_088


def small_inputs(name: str) -> DataShape:
    """The smallest inputs for which more than one pixel is left for BatchNorm."""
    entry = MODELS[name]
    if "text" in entry.kinds:
        return DataShape((5,), 3, vocabulary=11)
    side = {"mobilenetv2": 16, "resnet18-imagenet": 40, "resnet18": 16, "resnet10": 16}.get(name, 8)
    return DataShape((3, max(side, entry.smallest_side), max(side, entry.smallest_side)), 3)


def batch(inputs: DataShape, size: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if inputs.vocabulary:
        return torch.randint(inputs.vocabulary, (size, *inputs.shape), generator=random)
    return torch.randn(size, *inputs.shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_encoder_makes_flat_features_and_the_head_is_one_linear_layer(name: str) -> None:
    inputs = small_inputs(name)
    model = make_model(name, inputs).double().eval()
    assert isinstance(model, Classifier)
    assert isinstance(model.head, nn.Linear)
    x = batch(inputs, 2)
    features = model.encoder(x)
    assert features.shape == (2, model.head.in_features)
    torch.testing.assert_close(model(x), model.head(features))
    assert model(x).shape == (2, inputs.classes)


def test_vgg9_has_its_three_dropouts() -> None:
    drops = [m for m in make_model("vgg9", CIFAR10).modules() if isinstance(m, nn.Dropout | nn.Dropout2d)]
    assert [(type(drop), drop.p) for drop in drops] == [
        (nn.Dropout2d, 0.05),
        (nn.Dropout, 0.1),
        (nn.Dropout, 0.1),
    ]


def test_tfcnn_has_a_bias_free_head() -> None:
    model = make_model("tfcnn", CIFAR10)
    assert isinstance(model, Classifier)
    assert model.head.bias is None


def test_padding_does_not_change_a_text() -> None:
    model = make_model("fasttext", DataShape((6,), 4, vocabulary=50))
    short, long = torch.tensor([[7, 9]]), torch.tensor([[7, 9, 0, 0, 0, 0]])
    torch.testing.assert_close(model(short), model(long))
    assert model(torch.zeros(1, 6, dtype=torch.int64)).isfinite().all()


def test_resnet10_uses_batch_statistics_in_evaluation_too() -> None:
    model = make_model("resnet10", DIGITS).eval()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(model(x)[:2], model(x[:2]))


def test_resnet32_starts_from_kaiming_normal() -> None:
    model = make_model("resnet32", CIFAR10)
    last = [m for m in model.modules() if isinstance(m, nn.Conv2d)][-1]
    fan_in = last.in_channels * 9
    assert last.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.03)


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if "image" in entry.kinds])
def test_smallest_side_is_exact(name: str) -> None:
    side = MODELS[name].smallest_side
    x = torch.zeros(2, 3, side, side)
    assert make_model(name, DataShape((3, side, side), 4)).eval()(x).shape == (2, 4)
    if side > 1:
        too_small = DataShape((3, side - 1, side - 1), 4)
        with pytest.raises(UserError, match=rf"{name}.*at least {side}×{side}"):
            make_model(name, too_small)
        with pytest.raises((RuntimeError, UserWarning)), torch.device("meta"):
            MODELS[name].factory(too_small)(torch.zeros(2, 3, side - 1, side - 1))


@pytest.mark.parametrize("name", MODELS)
def test_images_need_not_be_square(name: str) -> None:
    if "image" in MODELS[name].kinds:
        assert make_model(name, DataShape((1, 33, 40), 4)).eval()(torch.zeros(1, 1, 33, 40)).shape == (1, 4)


@pytest.mark.parametrize(
    ("name", "inputs", "hint"),
    [
        ("cnn", AG_NEWS, "fasttext"),
        ("cnn", DataShape((12,), 3), "dnn"),
        ("dnn", AG_NEWS, "fasttext"),
        ("fasttext", MNIST, "cnn"),
        ("lenet5", DIGITS, "cnn"),
    ],
)
def test_unsuitable_data_are_refused_with_models_that_fit(name: str, inputs: DataShape, hint: str) -> None:
    with pytest.raises(UserError, match=rf"{name}.*expected.*for such inputs: .*{hint}") as error:
        make_model(name, inputs)
    assert str(inputs.shape) in str(error.value)


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UserError, match="resnet18"):
        make_model("resnet81", CIFAR10)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


@pytest.mark.parametrize("name", ["dnn", "resnet8"])
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    first = weights(make_model(name, DIGITS, seed=3))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    again = weights(make_model(name, DIGITS, seed=3))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, weights(make_model(name, DIGITS, seed=4)))
