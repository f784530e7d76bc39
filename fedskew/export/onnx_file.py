"""Write `model.onnx`, the model with its normalisation, and compare its outputs with PyTorch's."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fedskew.errors import UserError
from fedskew.experiment.storage.files import write_file
from fedskew.export.raw_inputs import RawInputs
from fedskew.results import Result

TOLERANCE = 1e-4
"""The largest allowed difference of a logit, relative to max(1, largest logit)."""
INPUT_NAMES = {"image": "images", "table": "rows", "text": "tokens"}
"""Names of the ONNX model's input, by kind of data."""
_TRACED, _CHECKED = 2, (1, 2, 7)
"""Batch sizes for tracing and for checking. The exported model accepts any size."""


def require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"the ONNX format needs {' and '.join(missing)}: pip install 'fedskew[onnx]'")


def write_onnx(run: Result, path: Path) -> float:
    """Check and write the file. Return the largest difference of a logit, relative to max(1, largest logit)."""
    if run.inputs.get("fields"):
        named = " and ".join(name for name, _, _ in run.inputs["fields"])
        raise UserError(f"{run.folder}: the model takes {named}; the ONNX export needs a model with a single input")
    model = RawInputs(run.model, run.inputs).eval()
    content = _export(model, run)
    difference = _largest_difference(content, model, run)
    if not difference <= TOLERANCE:
        raise UserError(
            f"the ONNX model of {run.folder} and PyTorch compute different logits: the relative difference is "
            f"{difference:.1e}; expected at most {TOLERANCE:.0e}"
        )
    write_file(path, content)
    return difference


def _export(model: RawInputs, run: Result) -> bytes:
    with _quiet():
        program: Any = torch.onnx.export(
            model,
            (random_samples(run.inputs, _TRACED),),
            dynamo=True,
            verbose=False,
            input_names=[INPUT_NAMES[run.inputs["kind"]]],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    proto = program.model_proto
    for key, value in (
        ("classes", json.dumps(run.classes)),
        ("method", run.config.method),
        ("model", run.config.model),
    ):
        proto.metadata_props.add(key=key, value=value)
    content: bytes = proto.SerializeToString()
    return content


def _largest_difference(content: bytes, model: RawInputs, run: Result) -> float:
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())
    differences = []
    for size in _CHECKED:
        samples = random_samples(run.inputs, size)
        with torch.no_grad():
            expected = model(samples).numpy()
        (found,) = session.run(None, {name: samples.numpy()})
        if found.shape != expected.shape:
            return float("inf")
        differences.append(np.abs(found - expected).max() / np.maximum(1.0, np.abs(expected).max()))
    return float(np.max(differences))


def random_samples(inputs: dict[str, Any], size: int) -> torch.Tensor:
    """Draw random samples with the type and scale of stored ones."""
    random = torch.Generator().manual_seed(0)
    shape = (size, *inputs["shape"])
    if inputs["kind"] == "image":
        return torch.randint(256, shape, generator=random, dtype=torch.uint8)
    if inputs["kind"] == "text":
        return torch.randint(inputs["vocabulary"], shape, generator=random)
    columns = torch.tensor(inputs.get("scaling") or [[0.0, 1.0]], dtype=torch.float64)
    return columns[:, 0] + columns[:, 1] * torch.randn(shape, generator=random, dtype=torch.float64)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings, such as those about torchvision, which is not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
