"""Methods in stages: a `Schedule` lists `Stage`s, and may base later stages on a `Survey` of the clients.

PKD (pkd.py) warms up, trains one expert per group of confused classes, and distils. FedConcat (fedconcat.py) trains one
encoder per cluster of clients, and then a head on all encoders. CCVR (ccvr.py) is a `Calibration`: a last round that
follows the rounds of any objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fedskew.errors import UserError
from fedskew.methods.hook_results import wrong_stage, wrong_stages
from fedskew.methods.parts import Objective, Part, ServerRule, Tensors, check_companions


@dataclass(frozen=True)
class Survey:
    """What all clients report about their training data at the end of a stage, if its `survey` is set."""

    label_counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """[clients, C]: each client's number of samples per class. Empty if the stage's `survey` is a `Part`."""
    probability: npt.NDArray[np.float64] | None = None
    """[C, C]: for each true class (row), the mean predicted probability of every class; NaN for a class without
    samples. Only in a survey of predictions."""
    answers: Tensors = field(default_factory=dict)
    """The results of the hook `uplink`, if the `survey` is a `Part`. The first axis runs over `clients`."""
    clients: tuple[int, ...] = ()
    """The numbers of the clients that answered, if the `survey` is a `Part`."""
    key: int = 0
    """A random key, for `fedskew.randomness`. It depends on the seed, the model and the round. 0 if the `survey` is
    not a `Part`."""

    def to_record(self) -> dict[str, Any]:
        """Return what the run records of the survey: the mean probabilities, but no client's label counts."""
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
    """Whether the head on concatenated encoders starts with random weights, not as the models' concatenated heads."""
    labels: tuple[int, ...] | None = None
    """Train only on samples with these labels. Clients without such samples do not take part."""
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
    """Overrides the run's `local_epochs`. With 0, clients train nothing: they only run the hooks `opening` and
    `closing` over their data. The method's solver and weighting are then not used."""
    local_batches: int | None = None
    """Train on this many batches, drawn anew each round, instead of `local_epochs` over all samples. A client with
    fewer samples trains once on all of them."""
    average: Literal["samples", "uniform"] | None = None
    """Overrides the run's `average`."""
    cost: float = 1.0
    """The cost of training on one sample. 1 is a forward and a backward pass of the whole model."""
    server: ServerRule | None = None
    """Replaces the method's server rule in this stage."""
    survey: Literal["labels", "predictions"] | Part | None = None
    """What every client reports at the end of the stage, for `Schedule.conclude`: its label counts (`labels`), its
    label counts and mean predictions (`predictions`), or what the hook `uplink` of a part returns."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stage's own parts: those of its objective, its server rule and its survey."""
        others = (self.server, self.survey if isinstance(self.survey, Part) else None)
        return (*self.objective.members, *(member for part in others if part is not None for member in part.members))


Notes = dict[str, Any]
"""The conclusions of a schedule so far, as JSON values. Checkpoints save them."""


@dataclass(frozen=True)
class Schedule(Part):
    """Divides a run into stages, each with its own objective. In a method, it takes the place of the objective."""

    multi_label: ClassVar[bool] = False
    takes_class_weights: ClassVar[bool] = False
    """As in `Objective`, for the objectives of all stages."""
    stands_alone: ClassVar[bool] = False
    """Whether the method is a reference bound, which cannot be combined with anything."""
    trains_clients: ClassVar[bool] = True
    """Whether clients train. If they only send statistics of their data, the method cannot be combined with another."""
    trains_encoders: ClassVar[bool] = False
    """Whether the method must train encoders. Then a run that trains only the head is refused."""

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:
        """Return the stages known so far. Called again when a stage has added conclusions to `notes`."""
        raise NotImplementedError

    def conclude(self, stage: Stage, survey: Survey) -> Notes:  # noqa: ARG002
        """Draw conclusions from the survey at the end of `stage`. They are added to `notes`."""
        return {}


def stage_without_training(name: str, server: ServerRule | None = None) -> Stage:
    """Return a stage of one round in which nobody trains.

    All clients run `opening` and `closing` over their data, and send what the hook `uplink` returns.
    """
    from fedskew.methods.fedavg import CrossEntropy  # fedavg.py imports the catalogue, which imports this module

    return Stage(name, 1, CrossEntropy(), everyone=True, local_epochs=0, server=server)


@dataclass(frozen=True)
class Calibration(ServerRule):
    """A server rule for the last round of a run. All clients send what its hooks compute, and nobody trains.

    It combines with any objective, regulariser, solver, weighting and server rule, which apply to the rounds before the
    last one. It does not combine with a schedule or a personal part. In the last round, `updates.params` are copies of
    the trained global model.
    """


@dataclass(frozen=True)
class SurveyRule(ServerRule):
    """The server rule of an extra round in which clients answer a survey. The result of `aggregate` is not used."""

    survey: Part

    @property
    def members(self) -> tuple[Part, ...]:
        return self.survey.members


def survey_stage(stage: Stage) -> Stage:
    """Return a stage in which all clients answer the survey of `stage`, which must be a part."""
    if not isinstance(stage.survey, Part):
        raise UserError(f"the survey of stage {stage.name!r} is {stage.survey!r}; expected a part")
    answering = stage_without_training(stage.name, SurveyRule(stage.survey))
    return replace(answering, model=stage.model, concatenates=stage.concatenates)


def check_stages(schedule: Schedule, returned: object, method: str) -> Sequence[Stage]:
    """Return the stages of a schedule. Raise `UserError` if they are no stages, or reveal more than it declares."""
    if not isinstance(returned, Sequence) or not len(returned) or not all(isinstance(s, Stage) for s in returned):
        raise wrong_stages(schedule, returned, Stage)
    for stage in returned:
        if not isinstance(stage.objective, Objective):
            raise wrong_stage(schedule, stage.name, "the objective", stage.objective, "expected a fedskew.Objective")
        if not isinstance(stage.rounds, int | np.integer):
            raise wrong_stage(schedule, stage.name, "rounds", stage.rounds, "expected a whole number")
        check_companions(stage.objective)
        check_declared(stage, method, schedule)
    return returned


def check_declared(stage: Stage, method: str, schedule: Schedule) -> None:
    """Refuse a stage that reveals or sends what the schedule does not declare.

    Sites decide by the schedule's declarations whether they take part, before the first stage begins. The declarations
    of the method's other parts do not count for its stages.
    """
    if stage.survey not in (None, "labels", "predictions") and not isinstance(stage.survey, Part):
        raise UserError(
            f"stage {stage.name!r} of method {method!r} has the survey {stage.survey!r}; expected labels, predictions "
            "or a part"
        )
    if (asks := _asks_for_counts(stage)) and "label counts" not in _declared(schedule.members, "reveals"):
        raise UserError(
            f"stage {stage.name!r} of method {method!r} {asks}, which reveals label counts; expected the method's "
            "schedule to declare that in `reveals`"
        )
    for part in stage.parts:
        has = f"stage {stage.name!r} of method {method!r} has {type(part).__name__}"
        for attribute in ("reveals", "sends"):
            if not _declared([part], attribute) <= _declared(schedule.members, attribute):
                raise UserError(
                    f"{has}, which {attribute} {getattr(part, attribute)}; expected the method's schedule to declare "
                    f"that in `{attribute}`"
                )
        if type(part).uplink is not Part.uplink and not part.sends:
            raise UserError(
                f"{has}, which does not declare what its uplink() sends; expected `sends` and `reveals` on that class "
                "and on the method's schedule"
            )


def _declared(parts: Sequence[Part], attribute: str) -> set[str]:
    """Return the items that the parts list in an attribute."""
    return {item for part in parts for item in getattr(part, attribute).split(", ")} - {"", "nothing"}


def _asks_for_counts(stage: Stage) -> str:
    """Say why a stage makes clients report label counts. Empty if it does not."""
    if isinstance(stage.survey, str):
        return f"has the survey {stage.survey!r}"
    return "trains on some labels only" if stage.labels is not None else ""
