"""Methods in stages: what each stage trains, on whom, and what is concluded after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedskew.methods.parts import Objective, Part


@dataclass(frozen=True)
class Survey:
    """What the clients told the server of their own training data, once."""

    label_counts: npt.NDArray[np.int64]
    """[clients, C]."""
    probability: npt.NDArray[np.float64] | None = None
    """[C, C]: mean predicted probability of each class over all samples of a true class; NaN rows: no sample. Only of a
    survey of predictions."""

    def recorded(self) -> dict[str, Any]:
        """What a round's row tells of it, to be looked at: the probabilities, and nobody's label counts."""
        if self.probability is None:
            return {}
        rows = [[float(f"{p:.6g}") if np.isfinite(p) else None for p in row] for row in self.probability]
        return {"survey": {"probability": rows}}


@dataclass(frozen=True)
class Stage:
    """Some rounds with one objective, from one model to the next."""

    name: str
    rounds: int
    objective: Objective
    model: str = "global"
    """The model that is trained; a name not met before starts as a copy of the global model."""
    concatenates: tuple[str, ...] = ()
    """Train only a head on the frozen encoders of these models, side by side: from here on, that is `model`."""
    new_head: bool = False
    """Whether that head starts anew, rather than as the models' heads side by side."""
    labels: tuple[int, ...] | None = None
    """Train on samples of these labels only; clients without any stay out."""
    clients: tuple[int, ...] | None = None
    """Only these take part, as many a round as is their share of the clients of a round, and at least one."""
    cohort: Literal["clients", "pooled", "alone"] = "clients"
    """`pooled`: in place of a round's clients, one that has as many samples as they, drawn from all clients' samples.
    `alone`: each client goes on from its own model; none are averaged, and what is tested are all clients' models."""
    local_epochs: int | None = None
    """Instead of the run's."""
    local_batches: int | None = None
    """Once over so many batches, drawn anew each round, instead of epochs over all of the client's samples."""
    average: Literal["samples", "uniform"] | None = None
    """Instead of the run's."""
    cost: float = 1.0
    """Of a sample's visit, in forward and backward passes of the whole model."""
    survey: Literal["labels", "predictions"] | None = None
    """What every client reports at the end; the schedule concludes from it."""


Notes = dict[str, Any]
"""What a schedule concluded so far: JSON, kept in the checkpoint."""


@dataclass(frozen=True)
class Schedule(Part):
    """A method in stages; it takes the place of the objective."""

    needs_features: ClassVar[bool] = False
    """As an objective's."""
    stands_alone: ClassVar[bool] = False
    """Whether it sets the solver and the server rule, too, so that nothing can be combined with it."""

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:
        """The stages as far as they are known: called again after each, with what was concluded."""
        raise NotImplementedError

    def conclude(self, stage: Stage, survey: Survey) -> Notes:  # noqa: ARG002
        """What a surveyed stage taught."""
        return {}
