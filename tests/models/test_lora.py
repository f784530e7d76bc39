"""Low-rank adapters: their formula, what is trained, and a run's merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import slow
from torch import nn

import fedskew as fs
from fedskew.errors import UserError
from fedskew.models import Classifier, DataShape, make_model
from fedskew.models.lora import LowRank, merged, with_adapters
from fedskew.results import load_run

SETTINGS: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "lr": 0.02, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def fed() -> fs.Federation:
    options = {"image": [1, 8, 8], "samples": 300, "test_samples": 100}
    return fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), **options)


def classifier(name: str) -> Classifier:
    model = make_model(name, DataShape((1, 8, 8), 10), 1)
    assert isinstance(model, Classifier)
    return model.double()


def disturb(model: nn.Module) -> None:
    """Make every adapter and norm differ from its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 10


@pytest.mark.parametrize("name", ["dnn", "cnn", "resnet8", "resnet8-b", "mobilenetv2"])
def test_merging_gives_the_same_function(name: str) -> None:
    plain = classifier(name)
    adapted = with_adapters(plain, rank=3, alpha=6.0)
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    assert torch.equal(adapted.eval()(x), plain.eval()(x)), "the correction starts at zero"
    disturb(adapted)
    joined = merged(adapted)
    torch.testing.assert_close(joined(x), adapted(x), rtol=0, atol=1e-9)
    assert not torch.allclose(joined(x), plain(x))
    assert joined.state_dict().keys() == plain.state_dict().keys()


class Transformer(nn.Module):
    """PyTorch's attention layers read the weights of the layers inside them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(x[:, 0]).mean(dim=1)
        return hidden


@pytest.mark.parametrize("train", [True, False])
def test_adapters_in_a_transformer(train: bool) -> None:
    plain = Classifier(Transformer(), nn.Linear(8, 10)).double()
    adapted = with_adapters(plain, rank=2, alpha=4.0)
    assert isinstance(adapted.get_submodule("encoder.layers.layers.0.self_attn.out_proj"), LowRank)
    disturb(adapted)
    joined = merged(adapted).train(train)
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    with torch.set_grad_enabled(train):
        torch.testing.assert_close(joined(x), adapted.train(train)(x), rtol=0, atol=1e-9)
    if train:
        adapted(x).sum().backward()
        assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def test_a_linear_adapter_follows_the_formula() -> None:
    adapted = with_adapters(classifier("dnn"), rank=2, alpha=5.0)
    disturb(adapted)
    layer = adapted.get_submodule("encoder.1")
    assert isinstance(layer, LowRank)
    x = torch.rand(3, 64, dtype=torch.float64)
    base, down, up = (part.state_dict() for part in (layer.base, layer.down, layer.up))
    expected = x @ (base["weight"] + 5 / 2 * up["weight"] @ down["weight"]).T + base["bias"]
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def test_only_adapters_norms_and_head_are_trained() -> None:
    adapted = with_adapters(classifier("resnet8"), rank=2, alpha=4.0, targets=["encoder.3.residual.*"])
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    adapters = {name for name in trained if ".down." in name or ".up." in name}
    assert adapters == {f"encoder.3.residual.{layer}.{part}.weight" for layer in (0, 3) for part in ("down", "up")}
    norms = {f"{name}.{kind}" for name, layer in adapted.named_modules() if isinstance(layer, nn.BatchNorm2d)
             for kind in ("weight", "bias")}  # fmt: skip
    assert trained == adapters | norms | {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("fedavg", "dnn"), ("scaffold", "dnn"), ("fedvls+fedavgm", "dnn"), ("fedavg", "resnet8"),
        *slow(("scaffold", "resnet8"), ("fedvls+fedavgm", "resnet8")),
    ],
)  # fmt: skip
def test_engines_agree(fed: fs.Federation, model: str, method: str) -> None:
    runs = [
        fs.run(fed, method, model, train="lora", lora_rank=2, engine=engine, precision="float64", **SETTINGS)
        for engine in ("plain", "stacked")
    ]
    assert [run.engine for run in runs] == ["plain", "stacked"]
    for name, tensor in runs[0].model.state_dict().items():
        torch.testing.assert_close(runs[1].model.state_dict()[name], tensor, rtol=0, atol=1e-8)


def test_a_run_saves_the_merged_model_and_sends_only_what_it_trains(fed: fs.Federation, tmp_path: Path) -> None:
    settings = SETTINGS | {"train": "lora", "lora_rank": 2, "out": tmp_path / "run"}
    run = fs.run(fed, "fedavg", "dnn", **settings)
    x = torch.rand(3, 1, 8, 8)
    again = fs.run(fed, "fedavg", "dnn", **settings)
    for model in (load_run(tmp_path / "run").model, again.model):
        torch.testing.assert_close(model(x), run.model(x))
    start = make_model("dnn", DataShape((1, 8, 8), 10), 0).state_dict()
    assert torch.equal(run.model.state_dict()["encoder.1.bias"], start["encoder.1.bias"]), "a frozen bias"
    change = run.model.state_dict()["encoder.1.weight"] - start["encoder.1.weight"]
    assert int(torch.linalg.matrix_rank(change.double(), atol=1e-5)) == 2
    sent = 4 * (2 * (64 + 200) + 2 * (200 + 200) + 200 * 10 + 10)
    assert run.history[1].bytes["up"] == 4 * sent, "four clients"


def test_what_has_no_adapters_is_refused(fed: fs.Federation) -> None:
    no_target = r"match no linear layer and no ungrouped 2D convolution of the encoder; expected .* such as 'encoder.1'"
    for target in ("enc", "encoder.2", "head"):  # no layer, a ReLU, and a linear layer outside the encoder
        with pytest.raises(UserError, match=f"lora_targets {target} {no_target}"):
            fs.run(fed, "fedavg", "dnn", train="lora", lora_targets=[target], **SETTINGS)
    with pytest.raises(UserError, match="train is 'lora', but Sequential has no separate encoder"):
        fs.run(fed, "fedavg", nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), train="lora", **SETTINGS)
    with pytest.raises(UserError, match="lora_rank is 0; expected a whole number of at least 1"):
        fs.run(fed, "fedavg", "dnn", train="lora", lora_rank=0, **SETTINGS)
    with pytest.raises(UserError, match="the encoder has no linear layer and no ungrouped 2D convolution"):
        with_adapters(Classifier(nn.Flatten(), nn.Linear(64, 10)), rank=2, alpha=4.0)
