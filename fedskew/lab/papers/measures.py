"""The metrics of the papers' tables, computed from records of runs in the unit that the paper prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedskew.errors import unknown
from fedskew.lab.sweep.records import Record, until
from fedskew.metrics.summary import best, first_round_reaching, mean_of_last, speed_up

_FEDGR_LAST = 50
"""FedGR reports means over this many last rounds."""
_MAP_LAST = 10
"""The tables of the protocol `fedskew` (see RESULTS.md) report means over this many last rounds."""
NEVER = math.inf
"""The value of a run that never reached the target."""


@dataclass(frozen=True)
class MetricInputs:
    """The inputs of a metric."""

    record: Record
    rounds: int
    """Points of the accuracy and F1 curves after this round do not count."""
    baseline: Record | None = None
    """FedAvg's run on the same federation, for metrics that compare with it."""
    client: int = 0
    """The client that is evaluated after its update."""

    @property
    def curve(self) -> list[tuple[int, float]]:
        return until(self.record.curve, self.rounds)


@dataclass(frozen=True)
class Measure:
    """How a metric is computed from the record of a run."""

    read: Callable[[MetricInputs], float | None]
    percent: bool = True
    """Whether the value is a share, which is shown in percent."""
    higher_is_better: bool = True
    needs_baseline: bool = False
    """Whether the metric needs FedAvg's run."""

    def __call__(self, inputs: MetricInputs) -> float | None:
        if self.needs_baseline and inputs.baseline is None:
            return None
        value = self.read(inputs)
        return value if value is None or not self.percent else 100 * value


def measure(metric: str) -> Measure:
    """Return how this metric is computed."""
    if metric not in MEASURES:
        raise unknown("metric", metric, MEASURES)
    return MEASURES[metric]


def _classes(choose: Callable[[list[float]], float]) -> Measure:
    return Measure(lambda inputs: choose(inputs.record.class_accuracy))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _end_of_baseline(inputs: MetricInputs) -> tuple[int, float]:
    """Return the last round of FedAvg's run that counts, and its accuracy. The run may be shorter than the paper's."""
    assert inputs.baseline is not None
    return until(inputs.baseline.curve, inputs.rounds)[-1]


def _rounds_to_baseline(inputs: MetricInputs) -> float | None:
    """Return the first round that reaches FedAvg's final accuracy, within FedAvg's number of rounds.

    Return None if the run is shorter than FedAvg's and has not reached that accuracy yet.
    """
    end, target = _end_of_baseline(inputs)
    reached = first_round_reaching(until(inputs.curve, end), target)
    if reached is not None:
        return float(max(reached, 1))
    return NEVER if inputs.record.rounds >= end else None


def _speed_up_to_baseline(inputs: MetricInputs) -> float | None:
    """FedAvg's number of rounds, divided by the rounds in which the run reaches FedAvg's final accuracy."""
    rounds = _rounds_to_baseline(inputs)
    return rounds if rounds in (None, NEVER) else _end_of_baseline(inputs)[0] / rounds


def _speed_up_to_best(inputs: MetricInputs) -> float:
    assert inputs.baseline is not None
    return speed_up(until(inputs.baseline.curve, inputs.rounds), inputs.curve)


def _stages(inputs: MetricInputs, prefix: str) -> list[dict[str, Any]]:
    stages = inputs.record.content["stages"]
    return [stage for name, stage in stages.items() if name.startswith(prefix)]


def _compute_per_round(prefix: str) -> Measure:
    """Make a metric: the computation per round, in FedAvg rounds, summed over the stages whose name has this prefix."""

    def read(inputs: MetricInputs) -> float | None:
        stages = _stages(inputs, prefix)
        return sum(stage["compute"] / stage["rounds"] for stage in stages) if stages else None

    return Measure(read, percent=False, higher_is_better=False)


def _activation(inputs: MetricInputs) -> float | None:
    """The share of sample visits in PKD's distillation in which an expert (a model for a group of classes) taught."""
    stages = _stages(inputs, "distil")
    return sum(stage.get("distilled", 0.0) for stage in stages) / sum(s["visits"] for s in stages) if stages else None


def _compute_before_distillation(inputs: MetricInputs) -> float | None:
    """The computation of PKD's stages before the distillation, in FedAvg rounds."""
    stages = [*_stages(inputs, "warm-up"), *_stages(inputs, "expert")]
    return sum(stage["compute"] for stage in stages) if stages else None


def _compute_to_worst(target: float) -> Callable[[MetricInputs], float | None]:
    """Make a metric: the computation up to the first evaluation at which the worst class reaches `target`."""

    def read(inputs: MetricInputs) -> float | None:
        return next((compute for compute, worst in inputs.record.compute_curve if worst >= target), None)

    return read


def _local(read: Callable[[MetricInputs, dict[str, Any]], float | None], **how: bool) -> Measure:
    """Make a metric from a record's `local`: what a run with `eval_local` measures on the clients' updates."""

    def compute(inputs: MetricInputs) -> float | None:
        local = inputs.record.content["local"]
        return None if local is None else read(inputs, local)

    return Measure(compute, **how)


def _after(inputs: MetricInputs, local: dict[str, Any]) -> list[float]:
    """The class accuracies after the update of the client in `inputs`."""
    return list(local["after"][str(inputs.client)])


def _mean_after(_: MetricInputs, local: dict[str, Any]) -> float:
    return _mean([_mean(classes) for classes in local["after"].values()])


_DOMAINS = {"mnist": "mnist", "usps": "usps", "svhn": "svhn", "syn": "syn-digits"}
"""The papers' names of the domains of the dataset `digits-domains`, and fedskew's."""


def _best_on(domain: str) -> Callable[[MetricInputs], float | None]:
    def read(inputs: MetricInputs) -> float | None:
        curve = inputs.record.domain_curve(domain)
        return None if curve is None else best(until(curve, inputs.rounds)).accuracy

    return read


def _best_mean_of_domains(inputs: MetricInputs) -> float | None:
    """The mean accuracy over the domains in the best round."""
    curves = [inputs.record.domain_curve(domain) for domain in _DOMAINS.values()]
    known = [until(curve, inputs.rounds) for curve in curves if curve is not None]
    return max(_mean([a for _, a in points]) for points in zip(*known, strict=True)) if known else None


MEASURES: dict[str, Measure] = {
    "best": Measure(lambda inputs: best(inputs.curve).accuracy),
    **{f"best on {name}": Measure(_best_on(domain)) for name, domain in _DOMAINS.items()},
    "best, mean of domains": Measure(_best_mean_of_domains),
    "last": Measure(lambda inputs: inputs.curve[-1][1]),
    "last-10 accuracy": Measure(lambda inputs: mean_of_last(inputs.curve, _MAP_LAST).accuracy),
    "last-50 accuracy": Measure(lambda inputs: mean_of_last(inputs.curve, _FEDGR_LAST).accuracy),
    "last-50 macro-F1": Measure(
        lambda inputs: mean_of_last(until(inputs.record.f1_curve, inputs.rounds), _FEDGR_LAST).accuracy
    ),
    "speed-up": Measure(_speed_up_to_best, percent=False, needs_baseline=True),
    "rounds to FedAvg": Measure(_rounds_to_baseline, percent=False, higher_is_better=False, needs_baseline=True),
    "speed-up over 1000 rounds": Measure(_speed_up_to_baseline, percent=False, needs_baseline=True),
    "best class": _classes(max),
    "mean class": _classes(_mean),
    "worst class": _classes(min),
    "class gap": Measure(
        lambda inputs: max(inputs.record.class_accuracy) - min(inputs.record.class_accuracy), higher_is_better=False
    ),
    "drift diversity": _local(lambda _, local: local["drift_diversity"], percent=False, higher_is_better=False),
    "warm-up compute": _compute_per_round("warm-up"),
    "experts' compute": _compute_per_round("expert"),
    "distillation compute": _compute_per_round("distil"),
    "expert activation": Measure(_activation),
    "compute before distillation": Measure(_compute_before_distillation, percent=False, higher_is_better=False),
    "compute to worst class 50": Measure(_compute_to_worst(0.5), percent=False, higher_is_better=False),
    "before update": _local(lambda _, local: _mean(local["before"])),
    "after update": _local(_mean_after),
    "after update, mean class": _local(lambda inputs, local: _mean(_after(inputs, local))),
    **{f"after update, class {c}": _local(lambda inputs, local, c=c: _after(inputs, local)[c]) for c in range(10)},  # type: ignore[misc]
    **{f"before update, class {c}": _local(lambda _, local, c=c: local["before"][c]) for c in range(10)},  # type: ignore[misc]
    "before update, mean class": _local(lambda _, local: _mean(local["before"])),
}
