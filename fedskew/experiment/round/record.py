"""The row that is recorded about a round, and how it is made.

A new metric per round is one field of `RoundRow`, set in `RoundRecord.row`, or in `evaluate.py` if it comes from an
evaluation. Give it a default that means "not recorded", so that older runs stay readable. It is then in
`rounds.jsonl`, in `result.history` and available to every reader of `fedskew.results`. To show it in
`Result.to_frame()`, also add its name to `_frame_line` in `result.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedskew.data.federation import Federation
from fedskew.engine import ModelState, RoundResult, RoundWork
from fedskew.experiment.config import Config
from fedskew.gaussian_privacy import DELTA, epsilon
from fedskew.methods.example_privacy import EXAMPLE_SENSITIVITY, gradients_per_sample
from fedskew.methods.parts import data_pass_cost
from fedskew.methods.personal import mean_gradients
from fedskew.metrics.confusion import Evaluation

if TYPE_CHECKING:
    from fedskew.experiment.round.aggregate import Aggregated
    from fedskew.experiment.round.plan import RoundPlan


@dataclass(frozen=True)
class RoundRow:
    """What happened in one round. Row 0 has only the evaluation of the initial model."""

    round: int
    """Number of the round, counted over all stages."""
    stage: str = "train"
    model: str = "global"
    """Name of the model that was trained. PKD's experts have their own names."""
    model_round: int = 0
    """Number of the round, counted for this model only, as in papers."""
    clients: list[int] = field(default_factory=list)
    lr: float | None = None
    loss: float | None = None
    """Mean local loss. None if every update was discarded, if nobody trained, or if the sites do not share losses."""
    diverged: list[int] = field(default_factory=list)
    """Clients whose updates were discarded because they were not finite.

    These are all participants if the server's step with the finite updates was not finite.
    """
    visits: int = 0
    """Samples trained on. A sample counts once per epoch."""
    tally: dict[str, float] = field(default_factory=dict)
    """Counts that the method keeps during training."""
    compute: float = 0.0
    """Local computation, in units of a FedAvg round."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Decisions of the method between stages, such as PKD's groups."""
    survey: dict[str, Any] | None = None
    """After a stage that surveys the clients' predictions: the mean probabilities by true class."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that participants received (`down`) and sent (`up`). Empty in runs of versions that did not count them."""
    evaluation: Evaluation | None = None
    """Evaluation of the trained model on the test set. None if this round was not evaluated. Without a global model, it
    has the sum of the confusion matrices of all clients' models: see `Evaluation`."""
    domain_accuracy: dict[str, float | None] | None = None
    """Accuracy by domain, for datasets with domains."""
    client_accuracy: list[float] | None = None
    """For methods without a global model: accuracy of each client's own model. Clients without samples are left out."""
    local: list[dict[str, Any]] | None = None
    """With `eval_local`: the accuracies of each participant's model before and after its update."""
    local_before: list[float | None] | None = None
    """With `eval_local`: class accuracies of the model that was sent."""
    drift_diversity: float | None = None
    """With `eval_local`: see `metrics.drift`. None if it is infinite, or if every update was discarded."""
    client_tests: dict[str, list[float | None]] | None = None
    """Accuracies on each client's held-out samples: with `client_test`, or on Flower with `local_tests` or Ditto.

    `Result.client_tests` explains the keys. A value is None if the client was not evaluated.
    """
    sites: dict[str, dict[str, Any]] | None = None
    """On Flower: the evaluation at each site that reports one."""
    time: dict[str, float] = field(default_factory=dict)
    """Seconds per step: `train`, `server`, `evaluate`. Empty in runs of versions that did not measure them."""
    failed: dict[str, str] | None = None
    """On Flower: why a participant's update is missing or was discarded, by the site's name."""
    absent: list[str] | None = None
    """On Flower: names of the sites that were not connected when the round began."""
    privacy: dict[str, Any] | None = None
    """With noise: kind, ε and δ of the differential privacy so far.

    The kind `example` protects one training sample. The kinds `central` and `local`, on Flower, protect a whole site.
    """
    seconds: float = 0.0
    """Duration of the round."""

    @property
    def is_global(self) -> bool:
        """Whether this round trained the global model, rather than an expert or a cluster's model."""
        return self.model == "global"

    @property
    def is_evaluated(self) -> bool:
        """Whether the row has an evaluation of the global model. Only such rows make up accuracy curves."""
        return self.is_global and self.evaluation is not None

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set. Raises ValueError for a row without an evaluation."""
        return self.required_evaluation.accuracy

    @property
    def required_evaluation(self) -> Evaluation:
        """The row's evaluation. Raises ValueError if there is none."""
        if self.evaluation is None:
            raise ValueError(f"round {self.round} was not evaluated")
        return self.evaluation

    @property
    def bytes_moved(self) -> int:
        """Bytes in both directions."""
        return sum(self.bytes.values())

    def to_json(self) -> dict[str, Any]:
        """The row as in `rounds.jsonl`. Optional values that were not recorded are left out."""
        names = [f.name for f in fields(self)] if self.round else ["round", "evaluation", "seconds"]
        nullable = {"lr", "loss"} | ({"drift_diversity"} if self.local is not None else set())
        values = {name: getattr(self, name) for name in names}
        if self.evaluation is not None:
            values["evaluation"] = self.evaluation.to_json()
        return {name: value for name, value in values.items() if value is not None or name in nullable}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoundRow:
        """Read a row of any version. Unknown keys are ignored, and missing ones get their defaults."""
        names = {f.name for f in fields(cls)}
        values = {name: value for name, value in data.items() if name in names and value is not None}
        if not isinstance(values.get("round"), int) or isinstance(values["round"], bool):
            raise ValueError("the row has no whole number `round`")
        if "evaluation" in values:
            values["evaluation"] = Evaluation.from_json(values["evaluation"])
        return cls(**values)


class RoundRecord:
    """Makes the rows of one run's rounds."""

    def __init__(self, federation: Federation, config: Config) -> None:
        self._federation, self._config = federation, config

    def row(self, plan: RoundPlan, result: RoundResult, aggregated: Aggregated) -> RoundRow:
        """Make the row of a round."""
        stage, after, report = plan.stage, aggregated.after, aggregated.report
        finite, visits = report.finite, result.visits
        has_traffic = stage.cohort == "clients"  # clients that train alone, or pooled data, send nothing
        weights = visits[finite] + 1e-9  # a mean needs a positive sum, even if no client had a sample
        has_loss = finite.any() and plan.work.local.epochs
        return RoundRow(
            round=after.round,
            stage=stage.name,
            model=stage.model,
            model_round=plan.start.rounds + 1,
            clients=[] if stage.cohort == "pooled" else plan.clients.tolist(),
            lr=plan.work.local.lr,
            loss=float(np.average(report.loss[finite], weights=weights)) if has_loss else None,
            diverged=plan.clients[~finite].tolist(),
            visits=int(visits.sum()),
            tally=report.tally,
            compute=self._compute(plan, int(visits.sum()), report.tally),
            notes=after.notes,
            **({} if after.survey is None else after.survey.to_record()),
            bytes=traffic(plan.work, result, stage.concatenates) if has_traffic else {"down": 0, "up": 0},
            privacy=example_privacy(plan.work, plan.start.rounds + 1) if plan.work.local.is_private else None,
        )

    def _compute(self, plan: RoundPlan, visits: int, tally: dict[str, float]) -> float:
        """Local computation, in units of a FedAvg round."""
        forwards = plan.stage.objective.extra_forwards(visits, tally) if visits else 0.0
        passes = data_pass_cost(plan.parts) * sum(map(len, plan.participants.samples))
        gradients: float = plan.work.solver.gradients()
        if plan.work.personal is not None:
            gradients = mean_gradients(plan.work.personal, plan.work.solver, plan.work.local.epochs)
        # `spent` is in training steps on one sample. A forward pass costs a third of a step.
        spent = visits * plan.stage.cost * gradients + forwards / 3 + passes
        return spent / self._fedavg_visits(plan)

    def _fedavg_visits(self, plan: RoundPlan) -> float:
        """Samples that a FedAvg round with the same clients would train on.

        If the stage leaves out clients or classes, this is the expected number for a round with all of them.
        """
        sizes = self._federation.sizes
        if plan.stage.labels is None and plan.stage.clients is None:
            return self._config.local_epochs * float(plan.participants.sizes.sum())
        participants = min(self._config.clients_per_round or len(sizes), len(sizes))
        return self._config.local_epochs * float(sizes.mean()) * participants


def example_privacy(work: RoundWork, rounds: int, delta: float = DELTA) -> dict[str, Any]:
    """Return ε and δ for one sample of a client that took part in `rounds` rounds like `work`."""
    gradients = rounds * gradients_per_sample(work.solver, work.personal, work.local.epochs)
    spent = epsilon(gradients, work.local.example_privacy[1], delta, EXAMPLE_SENSITIVITY)
    return {"kind": "example", "epsilon": spent, "delta": delta}


def traffic(work: RoundWork, result: RoundResult, frozen: Sequence[str] = ()) -> dict[str, int]:
    """Count the bytes that all participants receive (`down`) and send (`up`), from the sizes of the tensors.

    `frozen` names the models that this stage concatenates. Models of earlier stages (PKD's experts, FedConcat's frozen
    encoders) count in every round, because the server cannot know whether a client still has them. The few bytes of
    label counts and numbers of samples are not counted.
    """
    used = [name for name in work.objective.companions() if name in work.companions]
    earlier = [work.companions[name] for name in (*used, *frozen)]
    received = sum(map(_size, (work.exchanged, *earlier))) + _bytes(work.downlink.values())
    return {
        "down": len(work.assignments) * received,
        "up": _size(result.trained) + _bytes(result.uplink.values()),
    }


def _size(model: ModelState) -> int:
    return _bytes(model.params.values()) + _bytes(model.buffers.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
