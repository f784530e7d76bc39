"""The number format that the user chose is the one that is computed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_runs import config, finished, image_federation, linear, server

import fedskew as fs
from fedskew.engine.choice import arithmetic, choose_precision
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import run_prepared


class Products(TorchDispatchMode):
    """Watches in which format matrix products come out."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
            self.formats.add(out.dtype)
        return out


@pytest.mark.parametrize("engine", ["plain", "stacked"])
@pytest.mark.parametrize(
    ("precision", "products", "parameters"),
    [
        ("float32", {torch.float32}, torch.float32),
        ("tf32", {torch.float32}, torch.float32),
        ("bf16", {torch.bfloat16, torch.float32}, torch.float32),  # the server's mean stays in float32
        ("float64", {torch.float64}, torch.float64),
    ],
)
def test_products_and_parameters(
    precision: str, products: set[torch.dtype], parameters: torch.dtype, engine: str
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    with Products() as seen:
        state, _ = finished(server(image_federation(), "fedavg", model, engine=engine, precision=precision))
    assert seen.formats == products
    assert {p.dtype for p in state.model.params.values()} == {parameters}


@pytest.mark.parametrize(
    ("precision", "tf32"), [("float32", False), ("float64", False), ("tf32", True), ("bf16", True)]
)
def test_what_a_gpu_is_told(precision: str, tf32: bool) -> None:
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul

    def told() -> tuple[bool, bool, bool, bool]:
        return products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark

    before = told()
    with arithmetic(precision):
        assert told() == (tf32, tf32, True, False)
    assert told() == before


def test_the_initial_model_is_evaluated_as_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured for the first evaluation is replayed in all others; a resumed run has no initial model."""
    digits = fs.federation("digits", fs.IID(clients=3))
    ready = prepare(config(precision="float32", batch_size=100), digits, "fedavg", linear(10))
    this = Server(ready.federation, ready.method, ready.model, ready.config)
    seen: list[tuple[bool, bool]] = []
    evaluator = this._base_runtime.test_set._evaluators[""]
    real = evaluator.begin

    def begin(*given: Any) -> Any:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic))
        return real(*given)

    monkeypatch.setattr(evaluator, "begin", begin)
    run_prepared(ready, server=this)
    assert seen == [(False, True)] * 3


@pytest.mark.parametrize(("capability", "chosen"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "float32")])
def test_a_gpu_s_default_is_bf16_if_it_computes_in_it(
    capability: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_precision("auto", torch.device("cuda", 0)) == chosen
    assert choose_precision("tf32", torch.device("cuda", 0)) == "tf32"
    assert choose_precision("auto", torch.device("cpu")) == "float32"


def test_a_run_says_which_format_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = fs.federation("digits", fs.IID(clients=3))
    assert prepare(config(precision="auto"), digits, "fedavg", linear(10)).notices == ()  # float32 is no surprise
    monkeypatch.setattr("fedskew.experiment.preparation.choose_precision", lambda *_: "bf16")
    ready = prepare(config(precision="auto"), digits, "fedavg", linear(10))
    assert ready.config.precision == "bf16"
    assert ready.notices == (
        "number format: bf16, the default on this GPU; --precision float32 rounds less but is slower",
    )
    assert prepare(ready.config, digits, "fedavg", linear(10)).notices == ()  # it was requested
