"""Rebuild the final model of a run from its folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.storage.about import recorded_inputs
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.models import MODELS, DataShape, Field, adapted_model, make_model
from fedskew.models.concatenation import with_encoders


def load_model(folder: Path, module_object: nn.Module | None = None) -> nn.Module:
    """Load the model in float32, on the CPU and in eval mode.

    `module_object` is the user's own module. It is needed if the run was started with an object, not a model's name.
    """
    files = RunFolder(folder)
    tensors, meta = files.load_model()
    shape = _data_shape(files)
    if module_object is None:
        module = _make_model(files.config, shape, folder)
    else:
        module = adapted_model(copy.deepcopy(module_object), shape)
    module = with_encoders(module, meta.get("encoders", 0)).to("cpu", torch.float32)
    _fill(module, tensors, files.model_path)
    module.eval()
    return module


def _data_shape(files: RunFolder) -> DataShape:
    federation = (files.about() or {}).get("federation", {})
    inputs = recorded_inputs(federation, files.path)
    fields = tuple(Field(name, tuple(size), is_whole) for name, size, is_whole in inputs.get("fields", ()))
    return DataShape(tuple(inputs["shape"]), len(federation["classes"]), inputs["vocabulary"], fields)


def _make_model(config: Config, shape: DataShape, folder: Path) -> nn.Module:
    if config.model not in MODELS and ":" not in config.model:
        raise UserError(
            f"the model of {folder} is an object of your program, of class {config.model!r}; expected this object in "
            "the call, for instance fedskew.export.export_run(folder, out, model=the_object)"
        )
    return make_model(config.model, shape, config.seed, config.head)


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors into the module. Frozen parameters that are not in the file keep their values."""
    targets = dict(module.named_parameters()) | dict(module.named_buffers())
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    for name in sorted((targets.keys() - frozen) | tensors.keys()):
        if name not in targets or name not in tensors or targets[name].shape != tensors[name].shape:
            raise UserError(f"{path} does not fit model {type(module).__name__}: they differ in {name!r}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
