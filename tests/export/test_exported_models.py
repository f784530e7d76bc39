"""Every model: what leaves fedskew computes what was trained, as plain PyTorch and as ONNX."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exported_runs import CLASSES, finished, form
from method_cases import slow
from torch import nn

from fedskew.errors import UserError
from fedskew.experiment.storage.files import write_tensors
from fedskew.export import onnx_file
from fedskew.export.raw_inputs import RawInputs
from fedskew.export.source import model_source
from fedskew.models import MODELS, DataShape, make_model

with_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="the extra [onnx] is not installed",
)


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_the_one_file_of_code_is_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = form(name)
    run = finished(name, inputs)
    (tmp_path / "model.py").write_text(model_source(name, with_words=False), encoding="utf-8")
    (tmp_path / "model.json").write_text(json.dumps({"inputs": inputs, "classes": CLASSES}), encoding="utf-8")
    write_tensors(tmp_path / "model.safetensors", run.model.state_dict(), {})
    module = imported(tmp_path / "model.py", monkeypatch)
    loaded = module.load()
    samples = onnx_file.random_samples(run.inputs, 3)
    assert not loaded.training
    torch.testing.assert_close(loaded(samples), RawInputs(run.model, inputs)(samples), rtol=0, atol=0)
    assert module.classes() == CLASSES


@pytest.mark.parametrize("name", MODELS)
def test_the_one_file_of_code_imports_torch_and_safetensors_only(name: str) -> None:
    tree = ast.parse(model_source(name, with_words=True))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    standard = {"__future__", "collections.abc", "dataclasses", "functools", "json", "math", "pathlib", "re", "typing"}
    assert {module.partition(".")[0] for module in modules - standard} == {"torch", "safetensors"}


DEEPER_TWINS = {"convnet-s": "cnn", "vgg11": "vgg9", "resnet18": "resnet18-imagenet", "resnet32": "resnet8"}
"""Models of the layers that another one has, slow to export; every export is checked by itself besides."""


def test_twins_have_the_same_layers() -> None:
    def layers(name: str) -> set[str]:
        return {type(layer).__name__ for layer in finished(name, form(name)).model.modules()}

    for deeper, other in DEEPER_TWINS.items():
        assert layers(deeper) <= layers(other), deeper


PUSHED = {"dnn", "resnet8", "fasttext"}
"""Models that `make test` exports; `make test-all` exports all of them."""


@with_onnx
@pytest.mark.parametrize(
    "name",
    [name if name in PUSHED else slow(name)[0] for name in MODELS if name not in DEEPER_TWINS],
)
def test_onnx_gives_the_logits_of_pytorch(name: str, tmp_path: Path) -> None:
    import onnxruntime

    run = finished(name, form(name))
    difference = onnx_file.write_onnx(run, tmp_path / "model.onnx")
    assert difference < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    samples = onnx_file.random_samples(run.inputs, 4)  # a batch size that the export did not try
    (logits,) = session.run(["logits"], {onnx_file.INPUT_NAMES[run.inputs["kind"]]: samples.numpy()})
    with torch.no_grad():
        expected = RawInputs(run.model, run.inputs)(samples)
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == CLASSES


@with_onnx
def test_onnx_of_a_table_standardises_its_columns(tmp_path: Path) -> None:
    inputs = {"kind": "table", "shape": [2], "vocabulary": 0, "scaling": [[1e9, 2.0], [-3.0, 0.1]]}
    run = finished("dnn", inputs)
    assert onnx_file.write_onnx(run, tmp_path / "model.onnx") < 1e-5
    rows = torch.tensor([[1e9 + 2.0, -3.1]], dtype=torch.float64)
    expected = run.model(torch.tensor([[1.0, -1.0]]))
    torch.testing.assert_close(RawInputs(run.model, inputs)(rows), expected, rtol=1e-4, atol=1e-4)


@with_onnx
def test_a_file_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = form("dnn")
    run = finished("dnn", inputs)
    other = make_model("dnn", DataShape(tuple(inputs["shape"]), len(CLASSES)), seed=5)
    right = onnx_file._export
    monkeypatch.setattr(onnx_file, "_export", lambda model, run: right(RawInputs(other, inputs).eval(), run))
    with pytest.raises(UserError, match="compute different logits"):
        onnx_file.write_onnx(run, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@with_onnx
def test_logits_that_are_no_numbers_do_not_agree(tmp_path: Path) -> None:
    run = finished("dnn", form("dnn"))
    with torch.no_grad():
        next(run.model.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="the relative difference is nan"):
        onnx_file.write_onnx(run, tmp_path / "model.onnx")


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(UserError, match=r"needs onnxscript: pip install 'fedskew\[onnx\]'"):
        onnx_file.require_onnx()


class _Scaled(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("kind", ["image", "table", "text"])
def test_raw_inputs_are_scaled_as_in_training(kind: str) -> None:
    forms = {
        "image": {"kind": "image", "mean": [0.5, 0.25], "std": [0.5, 0.25]},
        "table": {"kind": "table", "scaling": [[10.0, 2.0], [0.0, 1.0]]},
        "text": {"kind": "text"},
    }
    given = {
        "image": torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1),
        "table": torch.tensor([[12.0, 3.0]]),
        "text": torch.tensor([[4, 0]]),
    }
    expected = {
        "image": torch.tensor([-1.0, 3.0]).view(1, 2, 1, 1),
        "table": torch.tensor([[1.0, 3.0]]),
        "text": torch.tensor([[4, 0]]),
    }
    assert torch.equal(RawInputs(_Scaled(), forms[kind])(given[kind]), expected[kind])
