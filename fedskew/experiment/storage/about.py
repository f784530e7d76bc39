"""The content of `about.json`: the federation, the command, the versions and the machine of a run.

Reports and the export of a model read the federation from this file, because the data may be missing when they are
made. A run can be repeated or resumed without this file.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedskew import __version__
from fedskew.data import Dataset, Federation
from fedskew.errors import UserError
from fedskew.experiment.preparation import Prepared

PACKAGES = ("torch", "numpy", "scikit-learn")
"""Packages whose versions are recorded."""
MAX_LISTED_CLIENTS = 10_000
"""With more clients, label counts are not written as JSON, because reading so many lists can take seconds."""


def about(prepared: Prepared) -> dict[str, Any]:
    """Collect the content of `about.json`."""
    params = list(prepared.model.parameters())
    return {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "federation": describe_federation(prepared.federation),
        "model": {"name": prepared.config.model, "parameters": sum(p.numel() for p in params)},
        **({} if prepared.init_report is None else {"init": prepared.init_report.to_json()}),
        "versions": versions(),
        "machine": machine(prepared.config.device),
    }


def describe_federation(federation: Federation) -> dict[str, Any]:
    """Describe a federation. Label counts of sites on other machines are left out, even if a method reveals them."""
    names = federation.partition.get("names")
    clients: dict[str, Any] = {"sites": names} if names else {"label_counts": _label_counts(federation)}
    if federation.client_names:
        clients["client_names"] = list(federation.client_names)
    if federation.column_sums_from:
        clients["column_sums"] = list(federation.column_sums_from)
    if federation.secure_aggregation:
        clients["secure_aggregation"] = True
    return {
        "classes": list(federation.dataset.classes),
        "inputs": describe_inputs(federation.dataset),
        **clients,
        "unused": federation.unused,
        "split": federation.hash,
    }


def _label_counts(federation: Federation) -> npt.NDArray[np.int64] | list[list[int]]:
    """Label counts as lists for JSON. With many clients they stay an array, which `RunFolder` saves in another file."""
    counts = federation.label_counts
    return counts if len(counts) > MAX_LISTED_CLIENTS else counts.tolist()


def describe_inputs(dataset: Dataset) -> dict[str, Any]:
    """Describe the shape of a sample, and how its stored values become the model's inputs."""
    normalised = {"mean": list(dataset.mean), "std": list(dataset.std)} if dataset.kind == "image" else {}
    scaling = {"scaling": [list(column) for column in dataset.scaling]} if dataset.scaling else {}
    shape = {"kind": dataset.kind, "shape": list(dataset.input_shape), "vocabulary": dataset.vocabulary}
    columns: dict[str, Any] = {"columns": list(dataset.columns)} if dataset.columns else {}
    if dataset.encoding is not None and not dataset.encoding.only_numbers:
        columns["encoding"] = dataset.encoding.to_json()
    fields = (
        {"fields": [[name, list(size), is_whole] for name, size, is_whole in dataset.fields]} if dataset.fields else {}
    )
    return {**shape, **normalised, **scaling, **columns, **fields}


def recorded_inputs(federation: Mapping[str, Any] | None, folder: Path | None) -> dict[str, Any]:
    """The description of a model's inputs, as recorded in a run's folder."""
    if federation is None or "inputs" not in federation:
        raise UserError(
            f"{folder} does not record the model's inputs, because about.json is missing, damaged or from an earlier "
            "version; repeat the run in another folder"
        )
    inputs: dict[str, Any] = federation["inputs"]
    return inputs


def command() -> str:
    """The command line that started this process, without Flower's token and without the path of the program."""
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    program = "python -m fedskew" if program == "__main__.py" else shlex.quote(program)
    return " ".join([program, *map(shlex.quote, _without_secrets(sys.argv[1:]))])


def _without_secrets(words: list[str]) -> list[str]:
    """Hide the token that Flower passes to its apps on the command line."""
    return ["hidden" if before == "--token" else word for before, word in zip(["", *words], words, strict=False)]


def versions() -> Mapping[str, str]:
    """The versions of Python, fedskew and the `PACKAGES` that have metadata."""
    found = {"python": platform.python_version(), "fedskew": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a copy without metadata
            continue
    return found


def machine(device: str) -> Mapping[str, str]:
    """Describe this machine. `gpu` is the name of the first GPU in `device`."""
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _processor(),
        "cores": str(os.cpu_count() or 0),
        "device": device,
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(torch.device(device.partition(",")[0]))
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        named = []
    return named[0] if named else platform.processor()
