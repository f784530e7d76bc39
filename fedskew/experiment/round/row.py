"""One row of a run's history: everything that is recorded about one round.

A new metric per round is one field of `RoundRow`, set where the round is recorded (`record.py`) or evaluated
(`test_set.py`). Give it a default that means "not recorded", so that older runs stay readable. It is then in
`rounds.jsonl`, in `result.history`, in `Result.to_frame()` and at hand for every reader of `fedskew.results`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fedskew.metrics.confusion import Evaluation


@dataclass(frozen=True)
class RoundRow:
    """What happened in one round. Row 0 is the evaluation of the initial model and has nothing else."""

    round: int
    """Counts the rounds of all stages."""
    stage: str = "train"
    model: str = "global"
    """Name of the model that was trained; PKD's experts have names of their own."""
    model_round: int = 0
    """Counts the rounds of that model alone, as papers count."""
    clients: list[int] = field(default_factory=list)
    lr: float | None = None
    loss: float | None = None
    """Mean local loss; None if no client's update was finite, or if the sites keep their losses to themselves."""
    diverged: list[int] = field(default_factory=list)
    """Clients whose updates were not finite and were left out."""
    visits: int = 0
    """Sample visits: a sample counts once per epoch."""
    tally: dict[str, float] = field(default_factory=dict)
    """What the method counts during training."""
    compute: float = 0.0
    """Local computation, in FedAvg rounds."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the method decided between stages, for instance PKD's groups."""
    survey: dict[str, Any] | None = None
    """What a stage asked the clients before it began."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Traffic of all participants, `down` and `up`; empty in runs from before it was counted."""
    evaluation: Evaluation | None = None
    """The trained model on the test set; None if this round was not evaluated."""
    domain_accuracy: dict[str, float | None] | None = None
    client_accuracy: list[float] | None = None
    """Accuracy of each client's own model, for methods that have no common one."""
    local: list[dict[str, Any]] | None = None
    """With `eval_local`: each participant's model before and after its update."""
    local_before: list[float | None] | None = None
    """With `eval_local`: class accuracies of the model that was sent."""
    drift_diversity: float | None = None
    """With `eval_local`: see `metrics.drift`; None also if it is infinite."""
    sites: dict[str, dict[str, Any]] | None = None
    """On Flower: the evaluation at each site, as far as the sites report it."""
    time: dict[str, float] = field(default_factory=dict)
    """Seconds by part: `train`, `server`, `evaluate`; empty in runs from before they were measured."""
    failed: dict[str, str] | None = None
    """On Flower: why a site's reply was left out, by the site's name."""
    privacy: dict[str, Any] | None = None
    """On Flower with noise: the privacy spent so far."""
    seconds: float = 0.0

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
        """Accuracy on the test set; only for rows with an evaluation."""
        return self.tested.accuracy

    @property
    def tested(self) -> Evaluation:
        """The evaluation, for callers who know that there is one."""
        if self.evaluation is None:
            raise ValueError(f"round {self.round} was not evaluated")
        return self.evaluation

    @property
    def bytes_moved(self) -> int:
        """Traffic in both directions."""
        return sum(self.bytes.values())

    def to_json(self) -> dict[str, Any]:
        """The row as `rounds.jsonl` has it. Optional values that were not recorded are left out."""
        names = [f.name for f in fields(self)] if self.round else ["round", "evaluation", "seconds"]
        nullable = {"lr", "loss"} | ({"drift_diversity"} if self.local is not None else set())
        values = {name: getattr(self, name) for name in names}
        if self.evaluation is not None:
            values["evaluation"] = self.evaluation.to_json()
        return {name: value for name, value in values.items() if value is not None or name in nullable}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RoundRow:
        """Read a row, also one from an older or newer version: unknown keys are ignored, absent ones get defaults."""
        names = {f.name for f in fields(cls)}
        values = {name: value for name, value in data.items() if name in names and value is not None}
        if not isinstance(values.get("round"), int) or isinstance(values["round"], bool):
            raise ValueError("a row without a whole number `round`")
        if "evaluation" in values:
            values["evaluation"] = Evaluation.from_json(values["evaluation"])
        return cls(**values)
