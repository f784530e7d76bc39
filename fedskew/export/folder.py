"""Write the folder of an exported model.

README.md            the model card
model.json           for programs: inputs, classes, label counts, accuracy, the complete configuration
model.safetensors    the weights, named as in the model's state_dict
model.py             the model's code, for built-in models
words.txt            for text models: the vocabulary, if the data can be read here
model.onnx           if requested
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedskew.data import load
from fedskew.errors import UserError, unknown
from fedskew.experiment.storage.files import reporting_os_errors, write_file, write_tensors
from fedskew.export.card import model_card
from fedskew.export.card_disclosures import method_entries
from fedskew.export.card_usage import has_named_columns
from fedskew.export.onnx_file import require_onnx, write_onnx
from fedskew.export.site_model import own_accuracy, site_result
from fedskew.export.source import is_model_source, model_source
from fedskew.methods import make_method
from fedskew.models import MODELS, own_module
from fedskew.models.concatenation import count_encoders
from fedskew.results import Result, load_run

FORMATS = ("onnx",)
"""Formats in addition to safetensors."""
_CODE = "model.py"
_OPTIONAL_FILES = ("model.onnx", _CODE, "words.txt")
"""The files that only some exports have."""


@dataclass(frozen=True)
class Exported:
    """The files that were written."""

    folder: Path
    files: tuple[str, ...]
    """Names of the files in the folder."""
    onnx_difference: float | None
    """Largest difference between the logits of ONNX Runtime and PyTorch, relative to max(1, largest logit)."""
    notices: tuple[str, ...]


def export_run(
    run: str | Path,
    out: str | Path,
    formats: Collection[str] = (),
    model: nn.Module | None = None,
    site: str | None = None,
    kept: Mapping[str, Tensor] | None = None,
    licence: str | None = None,
) -> Exported:
    """Export the model of a finished run. If the run trained your own module, pass an instance of it as `model`.

    With `site`, export that client's or site's own model. The method must have such models. In a federation across
    machines, `kept` is the site's state. `licence` is the model's licence for its card, such as `cc-by-4.0`.
    """
    formats = [formats] if isinstance(formats, str) else formats
    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    if "onnx" in formats:
        require_onnx()
    finished = load_run(run, model)
    _require_exportable(finished, with_global_model=site is None)
    if site is not None:
        finished = site_result(finished, site, kept)
    folder = Path(out)
    _create_folder(folder)
    words, notices = _words(finished)
    difference = write_onnx(finished, folder / "model.onnx") if "onnx" in formats else None
    write_tensors(folder / "model.safetensors", own_module(finished.model).state_dict(), {"classes": finished.classes})
    texts = {
        "model.json": json.dumps(_description(finished, difference, site), indent=2, allow_nan=False) + "\n",
        "README.md": model_card(finished, difference, with_words=bool(words), site=site, licence=licence),
    }
    if words:
        texts["words.txt"] = "\n".join(words) + "\n"
    if finished.config.model in MODELS:
        encoders = count_encoders(finished.model)
        texts[_CODE] = model_source(
            finished.config.model,
            bool(words),
            encoders,
            with_rows=has_named_columns(finished),
            head=finished.config.head,
        )
    for name, text in texts.items():
        write_file(folder / name, text)
    files = ("model.safetensors", *texts, *(("model.onnx",) if difference is not None else ()))
    _remove_others(folder, files)
    return Exported(folder, tuple(sorted(files)), difference, tuple(notices))


def _require_exportable(run: Result, with_global_model: bool) -> None:
    """Refuse a run that is not finished. If the global model is to be exported, also refuse a run without one."""
    if not run.finished:
        raise UserError(f"{run.folder} is not finished; run its command again, then export it")
    _ = run.inputs  # raises a UserError if the folder does not record them
    try:
        method = make_method(run.config.method, run.config.method_params)
    except UserError:  # a user's own method, with unknown stages
        method = None
    if method is not None and with_global_model:
        if method.personal is not None and not method.personal.has_global_model:
            raise UserError(
                f"with method {run.method!r}, every site has its own model, so there is no global model to export; "
                "expected --site NAME"
            )
        stages = method.stages(run.config.rounds, run.config.local_epochs, run.notes)
        if stages[-1].cohort == "alone":
            raise UserError(
                f"{run.method!r} trains a separate model for every client, so there is no global model to export; "
                "expected --site NAME"
            )
    _ = run.model  # raises a UserError if the file is damaged, before anything is written


def _create_folder(folder: Path) -> None:
    """Create the folder. Refuse a folder that has files but is not that of an exported model."""
    with reporting_os_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in folder.iterdir()}
    if names and "model.json" not in names:
        raise UserError(f"{folder} is not empty and is not an exported model; choose another folder")


def _remove_others(folder: Path, files: Collection[str]) -> None:
    """Remove what an earlier export wrote and this one did not: it belongs to another model.

    An export of the user's own model writes no `model.py`, so the user may have put one there. It stays.
    """
    with reporting_os_errors("write", folder):
        for name in _OPTIONAL_FILES:
            path = folder / name
            if name not in files and path.exists() and (name != _CODE or is_model_source(path.read_bytes())):
                path.unlink()


def _words(run: Result) -> tuple[tuple[str, ...], list[str]]:
    """Read a text model's vocabulary from the data. If that is not possible, return a notice instead."""
    if run.inputs["kind"] != "text" or run.inputs.get("fields"):
        return (), []
    if run.sites:
        return (), ["words.txt is left out: only the sites have the vocabulary"]
    try:
        found = load(run.config.data, run.config.data_dir, **run.config.data_params).words
    except UserError as error:
        return (), [f"words.txt is left out: the data cannot be read: {error}"]
    if len(found) + 2 != run.inputs["vocabulary"]:  # besides the words, padding and unknown words have a number
        return (), ["words.txt is left out: the data have changed or have no vocabulary"]
    return found, []


def _description(run: Result, onnx_difference: float | None, site: str | None) -> dict[str, Any]:
    """Return the content of model.json."""
    entries = method_entries(run)
    score = None if site is None else run.site_scores.get(site)
    measured = None if score is None else score.to_json()
    tested = {} if site is None else {"site": site, "site_accuracy": own_accuracy(run, site), "site_score": measured}
    return {
        "format": 1,
        "model": run.config.model,
        "encoders": count_encoders(run.model),
        "inputs": run.inputs,
        "classes": run.classes,
        "method": run.config.method,
        "papers": [entry.paper for entry in entries if entry.paper],
        "sends": [entry.sends for entry in entries] or None,
        "reveals": [entry.revealed for entry in entries] or None,
        "rounds": run.rounds,
        "evaluation": run.evaluation.to_json(),
        **tested,
        "label_counts": None if run.label_counts is None else run.label_counts.tolist(),
        "onnx_difference": onnx_difference,
        "config": run.config.to_mapping(),
        "versions": run.about.get("versions", {}),
    }
