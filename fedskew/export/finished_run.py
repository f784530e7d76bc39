"""What a run's folder tells of its model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.round.row import RoundRow
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods import make_method
from fedskew.metrics.confusion import Evaluation
from fedskew.models import MODELS, Inputs, check_model, make_model
from fedskew.models.concatenation import count_encoders, with_encoders


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end, and its model, in float32 and in eval mode."""

    folder: Path
    config: Config
    summary: dict[str, Any]
    about: dict[str, Any]
    model: nn.Module
    last_row: RoundRow
    """Of its last round."""

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation.from_json(self.summary["final"])

    @property
    def federation(self) -> dict[str, Any]:
        section: dict[str, Any] = self.about["federation"]
        return section

    @property
    def inputs(self) -> dict[str, Any]:
        """The form of a stored sample."""
        form: dict[str, Any] = self.federation["inputs"]
        return form

    @property
    def classes(self) -> list[str]:
        names: list[str] = self.federation["classes"]
        return names

    @property
    def label_counts(self) -> list[list[int]] | None:
        """Samples by client and class; None where they stayed with the sites."""
        return None if self.sites else self.federation.get("label_counts")

    @property
    def encoders(self) -> int:
        """How many encoders the model has side by side (FedConcat); 0 if it is no such model."""
        return count_encoders(self.model)

    @property
    def sites(self) -> list[str]:
        """Of a federation across machines, their names; none if it was simulated."""
        section = self.config.partition
        return list(section.params.get("names", ())) if section.rule == "sites" else []

    @property
    def privacy(self) -> dict[str, Any] | None:
        """Kind, ε and δ of the noise on the sites' updates; None without noise."""
        return self.last_row.privacy

    @property
    def rebuildable(self) -> bool:
        """Whether fedskew has the model's code, rather than its user."""
        return self.config.model in MODELS

    def samples(self, size: int) -> Tensor:
        """Random ones in the form in which samples are stored."""
        random = torch.Generator().manual_seed(0)
        shape = (size, *self.inputs["shape"])
        if self.inputs["kind"] == "image":
            return torch.randint(256, shape, generator=random, dtype=torch.uint8)
        if self.inputs["kind"] == "text":
            return torch.randint(self.inputs["vocabulary"], shape, generator=random)
        columns = torch.tensor(self.inputs.get("scaling") or [[0.0, 1.0]], dtype=torch.float64)
        return columns[:, 0] + columns[:, 1] * torch.randn(shape, generator=random, dtype=torch.float64)


def read_run(path: str | Path, model: nn.Module | None = None) -> FinishedRun:
    """The run in a folder; `model` is the user's own module, if the run was given one as an object."""
    folder = RunFolder(path)
    config, summary, about = folder.config, folder.summary(), folder.about()
    if summary is None or summary.get("status") != "finished":
        raise UserError(f"{folder.path} is not finished; give its command again, and export it then")
    if about is None or "inputs" not in about.get("federation", {}):
        raise UserError(f"{folder.path} is of an earlier version, which did not note the form of inputs; run it again")
    _require_common_model(config, summary)
    form = about["federation"]["inputs"]
    inputs = Inputs(tuple(form["shape"]), len(about["federation"]["classes"]), form["vocabulary"])
    module = _fresh(config, inputs, folder.path) if model is None else copy.deepcopy(model)
    check_model(module, inputs)
    tensors, noted = folder.load_model()
    module = with_encoders(module, noted.get("encoders", 0)).to("cpu", torch.float32)
    _fill(module, tensors, folder.model_path)
    rows = folder.rounds()
    return FinishedRun(folder.path, config, summary, about, module.eval(), rows[-1])


def _require_common_model(config: Config, summary: dict[str, Any]) -> None:
    """Refuse the run of a method that averages no models."""
    try:
        method = make_method(config.method, config.method_params)
    except UserError:  # an object of the user's program, whose stages nobody knows here
        return
    stages = method.stages(config.rounds, config.local_epochs, summary.get("notes", {}))
    if stages[-1].cohort == "alone":
        raise UserError(f"{config.method!r} leaves every client with a model of its own; there is none to export")


def _fresh(config: Config, inputs: Inputs, folder: Path) -> nn.Module:
    if config.model not in MODELS and ":" not in config.model:
        raise UserError(
            f"the model of {folder} is an object {config.model!r} of your program; export it there: "
            "fedskew.export.export_run(folder, out, model=the_object)"
        )
    return make_model(config.model, inputs, config.seed)


def _fill(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Parameters that the user froze are no part of a run and stay as the factory made them."""
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    for name in sorted((own.keys() - frozen) | tensors.keys()):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise UserError(f"{path} does not fit model {type(module).__name__}: they differ in {name!r}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
