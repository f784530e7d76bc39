"""Training only the head on features that were computed once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from method_cases import only
from torch import nn

import fedskew as fs
from fedskew.errors import UserError
from fedskew.experiment import head_training
from fedskew.export import export_run
from fedskew.models import Classifier, DataShape, make_model
from fedskew.results import load_run

SETTINGS: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "lr": 0.1, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def fed() -> fs.Federation:
    options = {"image": [1, 8, 8], "samples": 300, "test_samples": 100}
    return fs.federation("synthetic", fs.Dirichlet(clients=4, beta=0.3), **options)


@pytest.fixture(scope="module")
def pretrained() -> Classifier:
    """A ResNet whose BatchNorm statistics are not those of a new model."""
    model = make_model("resnet8", DataShape((1, 8, 8), 10), 3)
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.copy_(torch.randn(layer.running_mean.shape, generator=generator) / 4)
            layer.running_var.copy_(1 + torch.rand(layer.running_var.shape, generator=generator))
    assert isinstance(model, Classifier)
    return model


class InEvalMode(nn.Module):
    """A frozen encoder that never enters train mode: the reference."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        del mode
        return super().train(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(x)
        return out


@pytest.mark.parametrize(
    ("method", "engine"),
    only(
        [("fedavg", "plain"), ("fedvls+fedavgm", "stacked"), ("scaffold", "stacked"), ("fpl", "plain")],
        itertools.product(("fedavg", "fedvls+fedavgm", "scaffold", "fedprox", "fpl"), ("plain", "stacked")),
    ),
)
def test_it_equals_training_with_a_frozen_encoder(
    fed: fs.Federation, pretrained: Classifier, method: str, engine: str
) -> None:
    settings = SETTINGS | {"precision": "float64"}
    source = pretrained.state_dict()
    on_features = fs.run(fed, method, model=pretrained, train="head", engine=engine, **settings)
    reference = make_model("resnet8", DataShape((1, 8, 8), 10))
    reference.load_state_dict(source)
    assert isinstance(reference, Classifier)
    reference.encoder = InEvalMode(reference.encoder)
    whole = fs.run(fed, method, model=reference, engine="plain", **settings)
    for name in ("head.weight", "head.bias"):
        expected = whole.model.state_dict()[name]
        torch.testing.assert_close(on_features.model.state_dict()[name], expected, rtol=0, atol=1e-12)
        assert not torch.equal(expected, source[name].double()), "the head was trained"
    assert [row.evaluation for row in on_features.history] == [row.evaluation for row in whole.history]
    encoder = {name: t for name, t in on_features.model.state_dict().items() if name.startswith("encoder")}
    assert all(torch.equal(t, source[name].to(t.dtype)) for name, t in encoder.items())


def test_the_saved_model_is_the_whole_one(fed: fs.Federation, tmp_path: Path) -> None:
    run = fs.run(fed, "fedavg", model="dnn", train="head", out=tmp_path / "run", **SETTINGS)
    loaded = load_run(tmp_path / "run").model
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(loaded(x), run.model(x))
    again = fs.run(fed, "fedavg", model="dnn", train="head", out=tmp_path / "run", **SETTINGS)
    assert torch.equal(again.model(x), run.model(x))
    assert run.inputs["shape"] == [1, 8, 8]
    exported = export_run(tmp_path / "run", tmp_path / "model")
    assert {"model.py", "model.safetensors"} <= set(exported.files)


def test_a_resumed_run_ends_as_an_uninterrupted_one(fed: fs.Federation, tmp_path: Path) -> None:
    class Stop(fs.Callback):
        def on_round(self, row: object, rounds_ahead: int) -> bool | None:
            raise KeyboardInterrupt

    settings = SETTINGS | {"rounds": 3, "train": "head"}
    whole = fs.run(fed, "scaffold", **settings)
    with pytest.raises(KeyboardInterrupt):
        fs.run(fed, "scaffold", out=tmp_path / "run", callbacks=[Stop()], **settings)
    resumed = fs.run(fed, "scaffold", out=tmp_path / "run", **settings)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_features_are_computed_once_for_runs_that_share_them(
    fed: fs.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    compute = head_training._compute
    monkeypatch.setattr(head_training, "_compute", lambda *a: computed.append(1) or compute(*a))
    monkeypatch.setattr(head_training, "_LAST", [])
    for method in ("fedavg", "fedprox"):
        fs.run(fed, method, train="head", **SETTINGS)
    assert len(computed) == 1
    fs.run(fed, "fedavg", train="head", seed=1, **SETTINGS)
    assert len(computed) == 2, "another encoder"


@pytest.mark.parametrize(
    ("method", "kept"), [("fedper", "head"), ("fedrep", "head"), ("fedbabu", "head"), ("fedbn", "batchnorm")]
)
def test_clients_that_keep_a_layer_and_share_another_need_more_than_the_head(
    fed: fs.Federation, method: str, kept: str
) -> None:
    line = f"train is 'head', but method '{method}' keeps {kept} on the clients and shares other layers"
    with pytest.raises(UserError, match=f"{line}, and 'head' does not train both; expected train: all or lora"):
        fs.run(fed, method, "resnet8", train="head", **SETTINGS)
    fs.run(fed, method, "resnet8", train="lora", **SETTINGS)


def test_what_needs_more_than_features_is_refused(fed: fs.Federation) -> None:
    with pytest.raises(UserError, match="augment is flip; expected none with train: head"):
        fs.run(fed, "fedavg", train="head", augment=["flip"], **SETTINGS)
    with pytest.raises(UserError, match="method 'fedconcat' needs trained encoders"):
        fs.run(fed, "fedconcat", train="head", **SETTINGS)
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(UserError, match="Sequential has no separate encoder"):
        fs.run(fed, "fedavg", model=own, train="head", **SETTINGS)
    with pytest.raises(UserError, match="train is 'heads'; expected one of all, head, lora; did you mean 'head'"):
        fs.run(fed, "fedavg", train="heads", **SETTINGS)
