"""A user's model by name: what works, and one-line errors for what does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fedskew as fs
from fedskew.errors import UserError
from fedskew.models import DataShape, adapted_model, make_model

DIGITS = DataShape((1, 8, 8), 10)
SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.fc = nn.Linear(64, 10)
    def forward(self, x):
        return self.fc(self.norm(x).flatten(1))

def build(inputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, inputs.classes))

def optional(inputs=None):
    return build(inputs)

def width(hidden=16):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Linear(hidden, 10))

def by_classes(num_classes, bias=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes, bias))

def frozen(inputs):
    return Net().eval()

def untrainable():
    return Net().requires_grad_(False)

def without_parameters():
    return nn.Flatten()

def wrong_classes():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))

def wrong_input():
    return nn.Linear(5, 10)

def pair():
    class Pair(Net):
        def forward(self, x):
            return super().forward(x), super().forward(x)
    return Pair()

def text():
    return "not a model"

def broken():
    raise RuntimeError("first line\\nsecond line")

made = Net()
number = 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_nets.py").write_text(SOURCE)
    (tmp_path / "my_broken.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("my_nets", "my_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("factory", ["Net", "build", "optional", "width", "by_classes"])
def test_a_factory_with_or_without_inputs(factory: str) -> None:
    path = list(sys.path)
    model = make_model(f"my_nets:{factory}", DIGITS, seed=1)
    assert isinstance(model, nn.Module)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert sys.path == path
    again = make_model(f"my_nets:{factory}", DIGITS, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_check_does_not_change_the_model() -> None:
    net = make_model("my_nets:Net", DIGITS)
    assert net.training
    assert net.norm.num_batches_tracked == 0
    assert not any(module.training for module in make_model("my_nets:frozen", DIGITS).modules())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_net:build", "cannot import 'my_net'"),
        ("my_broken:build", "cannot import 'my_broken'.*SyntaxError"),
        ("my_nets:biuld", "biuld.*did you mean 'build'"),
        ("my_nets:", "expected package.module:factory"),
        (":build", "expected package.module:factory"),
        ("my_nets:made", "is a Net; expected a function or class"),
        ("my_nets:number", "is a int; expected a function or class"),
        ("my_nets:text", "returned a str; expected a torch.nn.Module"),
        ("my_nets:broken", "RuntimeError: first line second line"),
        ("my_nets:wrong_classes", r"returns \(2, 7\).*expected \(2, 10\)"),
        ("my_nets:wrong_input", r"does not accept inputs of shape \(1, 8, 8\)"),
        (
            "my_nets:pair",
            r"returns 0: \(2, 10\), 1: \(2, 10\).*choose the logits with fedskew.ModelAdapter\(model, output=0\)",
        ),
        ("my_nets:untrainable", "has no trainable parameter; expected at least one with requires_grad"),
        ("my_nets:without_parameters", "has no trainable parameter; expected at least one with requires_grad"),
    ],
)
def test_mistakes_are_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_model(name, DIGITS)
    assert "\n" not in str(error.value)


def with_tensor(name: str) -> nn.Module:
    """A model with a tensor that fedskew cannot train or keep."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    if name == "computed":
        model.squared = model[1].weight ** 2  # torch.nn.utils.weight_norm also keeps such a tensor
    elif name == "complex":
        model.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    else:
        model[1].weight.register_hook(lambda gradient: 0 * gradient)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), "does not know the shape of '1.weight' yet"),
        (with_tensor("complex"), "'turn' of model 'Sequential' is complex; expected real tensors"),
        (with_tensor("hook"), "'1.weight' of model 'Sequential' has a hook for its gradient"),
        (with_tensor("computed"), "model 'Sequential' cannot be copied: RuntimeError: Only Tensors created explicitly"),
        (nn.Sequential(nn.Flatten(), nn.Linear(63, 10)), "does not accept inputs of shape"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), r"returns \(2, 7\) for a batch of 2; expected \(2, 10\)"),
        (nn.Flatten(), "has no trainable parameter"),
        (nn.Linear(64, 10).requires_grad_(False), "has no trainable parameter"),
        (nn.Flatten, "expected a model's name or a torch.nn.Module"),
    ],
)
def test_an_object_that_does_not_fit_the_data_is_refused_before_training(model: object, reason: str) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=3), seed=0)
    with pytest.raises(UserError, match=reason):
        fs.run(federation, "fedavg", model, rounds=1)  # type: ignore[arg-type]


class Counting(nn.Module):
    """Counts training steps in a buffer that is not part of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps.add_(1)
        logits: torch.Tensor = self.out(x.flatten(1))
        return logits


def test_the_result_s_model_has_every_buffer(tmp_path: Path) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=3), seed=0)
    finished, loaded = (
        fs.run(federation, "fedavg", Counting(), rounds=1, local_epochs=1, out=tmp_path / "run", progress=False)
        for _ in range(2)
    )
    assert finished.model is not None
    assert loaded.model is not None
    assert float(finished.model.get_buffer("steps")) > 1
    assert torch.equal(finished.model.get_buffer("steps"), loaded.model.get_buffer("steps"))


def test_a_model_in_double_precision_is_checked_and_left_as_it_is() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    assert adapted_model(model, DataShape((1, 8, 8), 10)) is model
    assert model.training
    assert next(model.parameters()).dtype == torch.float64
