"""Methods in stages: a `Schedule` lists `Stage`s, and may base later stages on a `Survey` of the clients.

PKD (pkd.py) warms up, trains one expert per group of confused classes, and distils. FedConcat (fedconcat.py) trains one
encoder per cluster of clients, and then a head on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedskew.methods.parts import Objective, Part


@dataclass(frozen=True)
class Survey:
    """What all clients report about their training data at the end of a stage, if its `survey` is set."""

    label_counts: npt.NDArray[np.int64]
    """[clients, C]: each client's number of samples per class."""
    probability: npt.NDArray[np.float64] | None = None
    """[C, C]: for each true class (row), the mean predicted probability of every class; NaN for a class without
    samples. None in a survey of labels."""

    def to_record(self) -> dict[str, Any]:
        """Return the part of the survey that the run records: the mean probabilities, but no client's label counts."""
        if self.probability is None:
            return {}
        rows = [[float(f"{p:.6g}") if np.isfinite(p) else None for p in row] for row in self.probability]
        return {"survey": {"probability": rows}}


@dataclass(frozen=True)
class Stage:
    """Consecutive rounds with one objective."""

    name: str
    """The stage's name in the records of the run."""
    rounds: int
    objective: Objective
    model: str = "global"
    """The name of the model to train. A new one starts as a copy of the global model. Later stages can use it."""
    concatenates: tuple[str, ...] = ()
    """Train only a head on the frozen, concatenated encoders of these models. The result becomes `model`."""
    new_head: bool = False
    """Whether the head on concatenated encoders starts with random weights, not as the concatenation of their heads."""
    labels: tuple[int, ...] | None = None
    """Train only on samples with these labels. Clients without any do not take part."""
    clients: tuple[int, ...] | None = None
    """Draw participants only from these clients. Each round draws their share of `clients_per_round`, at least one."""
    cohort: Literal["clients", "pooled", "alone"] = "clients"
    """Who trains in a round.

    `clients`: the round's clients, as in any federated method. `pooled`: one model, on as many samples as the round's
    clients have, drawn from the samples of all clients. `alone`: each client continues its own model, without
    averaging, and the clients' models are evaluated.
    """
    everyone: bool = False
    """All clients take part in every round, whatever `clients_per_round` is."""
    local_epochs: int | None = None
    """Overrides the run's `local_epochs`. With 0, clients train nothing: they only run their passes over the data."""
    local_batches: int | None = None
    """Train on this many batches, drawn anew each round, instead of `local_epochs` over all samples."""
    average: Literal["samples", "uniform"] | None = None
    """Overrides the run's `average`."""
    cost: float = 1.0
    """The cost of training on one sample, in forward and backward passes of the whole model."""
    survey: Literal["labels", "predictions"] | None = None
    """What every client reports at the end of the stage, for `Schedule.conclude`."""


Notes = dict[str, Any]
"""The conclusions of a schedule so far, as JSON values. Checkpoints save them."""


@dataclass(frozen=True)
class Schedule(Part):
    """Divides a run into stages, each with its own objective. In a method, it takes the place of the objective."""

    needs_features: ClassVar[bool] = False
    """As in `Objective`."""
    multi_label: ClassVar[bool] = False
    takes_class_weights: ClassVar[bool] = False
    """As in `Objective`, for the objectives of all stages."""
    stands_alone: ClassVar[bool] = False
    """Whether no solver, server rule or regulariser can be combined with it."""
    trains_clients: ClassVar[bool] = True
    """Whether clients train. If they only send sums of their data, the method cannot be combined with another."""
    trains_encoders: ClassVar[bool] = False
    """Whether the method needs a trained encoder, so that it makes no sense to train only the head."""

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:
        """Return the stages known so far. Called again after each stage, with all conclusions in `notes`."""
        raise NotImplementedError

    def conclude(self, stage: Stage, survey: Survey) -> Notes:  # noqa: ARG002
        """Draw conclusions from the survey at the end of `stage`. They are added to `notes`."""
        return {}
