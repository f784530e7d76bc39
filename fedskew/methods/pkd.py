"""PKD: trains experts for groups of classes that are confused with one another, and distils them into the global model.

Gan et al., "Partial knowledge distillation for alleviating the inherent inter-class discrepancy in federated
learning", arXiv:2411.15403 (docs/fidelity.md lists every choice made here).

    1. warm-up     FedAvg. Then each client reports how its samples are predicted, and the server finds groups of weak
                   classes: maximal cliques of class pairs whose mutual predicted probability is unusually high
    2. experts     one model per group, by FedAvg on the samples of that group, with cross entropy within the group
    3. distil      FedAvg with L = CE + λ·KL(expert ‖ student) within the group, at temperature T, for samples whose
                   label and wrong prediction lie in one group

Sent to the server: the model and the client's number of samples. Unless the groups are given, also the client's label
counts and, for each true class, the mean predicted probability of every class, once. For each expert, all clients
report how many of their samples have a label of the expert's group. While it distils, a client also sends how many
samples each expert taught. The sites of a federation send the latter numbers only if they share their losses
(`share_loss`).
Extra compute: the experts' training, and one forward pass of an expert for every distilled sample, as the paper counts
it. In fact, every expert runs on every batch of the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.errors import expect
from fedskew.losses import (
    MeanOver,
    TaughtSamples,
    active_experts,
    cross_entropy,
    group_cross_entropy,
    partial_distillation,
)
from fedskew.methods.catalogue import method
from fedskew.methods.fedavg import CrossEntropy
from fedskew.methods.parts import Client, Mode, Objective, Outputs, Reveals, Tensors
from fedskew.methods.stages import Notes, Schedule, Stage, Survey

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GroupCrossEntropy(Objective):
    """The loss of an expert: cross entropy within its group."""

    group: tuple[int, ...] = ()

    sample_by_sample = True
    takes_class_weights = True

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        return group_cross_entropy(out.logits, y, self.group, client.class_weights)


@dataclass(frozen=True)
class PartialDistillation(Objective):
    """Cross entropy, and distillation from an expert for samples confused within its group."""

    groups: Groups = ()
    distill_weight: float = 1.0
    temperature: float = 3.0
    temperature_squared: bool = False
    reverse: bool = False
    mean_over: MeanOver = "batch"
    taught: TaughtSamples = "confused"

    sends = "numbers of distilled samples"
    reveals: ClassVar[Reveals] = "label counts"
    takes_class_weights = True

    def companions(self) -> dict[str, Mode]:
        return {f"expert.{i}": "eval" for i in range(len(self.groups))}

    def loss(self, out: Outputs, y: Tensor, client: Client) -> Tensor:
        experts = torch.stack([out.companions[name].logits for name in self.companions()])
        distilled = partial_distillation(
            out.logits, y, experts, self.groups, self.temperature, self.reverse, self.mean_over, self.taught
        )
        scale = self.temperature**2 if self.temperature_squared else 1.0
        return cross_entropy(out.logits, y, client.class_weights) + self.distill_weight * scale * distilled

    def tally(self, out: Outputs, y: Tensor) -> Tensors:
        """Count the distilled samples, in total and per expert."""
        by_expert = active_experts(out.logits, y, self.groups, self.taught).sum(dim=-1)
        return {"distilled": by_expert.sum(), **{f"expert {i}": by_expert[i] for i in range(len(self.groups))}}

    def extra_forwards(self, visits: float, tally: Mapping[str, float]) -> float:  # noqa: ARG002
        return tally.get("distilled", 0.0)


@method("pkd", paper="Gan et al., arXiv:2411.15403")
@dataclass(frozen=True)
class PKD(Schedule):
    """Experts for groups of weak classes, distilled on samples that the model confuses."""

    distill_weight: float = 1.0
    """λ; the paper's value for CIFAR-10 is 0.5."""
    temperature: float = 3.0
    warmup_rounds: int = 10
    """Rounds before the experts; at most half of the run's rounds, but at least one."""
    expert_rounds: int = 25
    """Rounds per expert, at most as many as the run has. They come on top of the run's rounds."""
    expert_epochs: int | None = None
    """Local epochs of the experts; default: the run's local epochs."""
    groups: Groups = ()
    """Groups of weak classes, such as [[0, 6], [2, 4, 6]]; default: found after the warm-up."""
    group_threshold: float = 2.0
    """Two classes are confused if their mutual probability is more than this many standard deviations above all pairs'
    mean. If no pair is, the most confused pair is the only group."""
    max_groups: int = 10
    """Of the groups found after the warm-up, at most this many are kept: the most confused ones."""
    temperature_squared: bool = False
    """Multiply the distillation term by T², which the paper does not mention."""
    reverse: bool = False
    """Use KL(student ‖ expert), as printed in the paper's Eq. 1."""
    mean_over: MeanOver = "batch"
    """Whether to average the distillation over the whole batch or over the distilled samples."""
    taught: TaughtSamples = "confused"
    """`confused` distils samples mistaken for another class of their group, as in the paper's text. `all` distils all
    samples of the group's classes, as the paper's Table III implies for clients with one class."""

    sends = "label counts and class-to-class mean probabilities once, numbers of distilled samples"
    reveals: ClassVar[Reveals] = "label counts"
    extra_compute = "experts' rounds, 1 expert forward per distilled sample"
    takes_class_weights = True

    def __post_init__(self) -> None:
        expect(self.distill_weight >= 0, "distill_weight", self.distill_weight, "a number ≥ 0")
        expect(self.temperature > 0, "temperature", self.temperature, "a number > 0")
        expect(self.warmup_rounds >= 1, "warmup_rounds", self.warmup_rounds, "a whole number ≥ 1")
        expect(self.expert_rounds >= 1, "expert_rounds", self.expert_rounds, "a whole number ≥ 1")
        expect(self.max_groups >= 1, "max_groups", self.max_groups, "a whole number ≥ 1")
        expect(
            self.expert_epochs is None or self.expert_epochs >= 1,
            "expert_epochs",
            self.expert_epochs,
            "a whole number ≥ 1",
        )
        for group in self.groups:
            expect(
                len(group) >= 2 and len(set(group)) == len(group) and min(group) >= 0,
                "groups",
                self.groups,
                "groups of two or more different classes",
            )

    def check(self, params: Mapping[str, Tensor], classes: int) -> None:  # noqa: ARG002
        for group in self.groups:
            expect(max(group) < classes, "groups", group, f"classes from 0 to {classes - 1}")

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> Sequence[Stage]:
        warmup = min(self.warmup_rounds, max(1, rounds // 2))
        first = Stage("warm-up", warmup, CrossEntropy(), survey=None if self.groups else "predictions")
        if warmup == rounds or not (self.groups or "groups" in notes):
            return [first]
        groups = self.groups or tuple(tuple(group) for group in notes["groups"][: self.max_groups])
        if not groups:
            return [first, Stage("train", rounds - warmup, CrossEntropy())]
        experts = [
            Stage(
                f"expert {i}",
                min(self.expert_rounds, rounds),
                GroupCrossEntropy(group),
                model=f"expert.{i}",
                labels=group,
                local_epochs=self.expert_epochs or local_epochs,
            )
            for i, group in enumerate(groups)
        ]
        distillation = PartialDistillation(
            groups,
            self.distill_weight,
            self.temperature,
            self.temperature_squared,
            self.reverse,
            self.mean_over,
            self.taught,
        )
        return [first, *experts, Stage("distil", rounds - warmup, distillation)]

    def conclude(self, stage: Stage, survey: Survey) -> Notes:  # noqa: ARG002
        assert survey.probability is not None
        groups = weak_groups(survey.probability, self.group_threshold, self.max_groups)
        return {"groups": [list(group) for group in groups]}


def weak_groups(probability: npt.NDArray[np.float64], threshold: float, max_groups: int = 10) -> Groups:
    """Return the groups of classes that are confused with one another unusually often, at most `max_groups`.

    A group is a maximal clique of confused pairs. Connected components would be too large: in Fashion-MNIST, Shirt is
    confused with T-shirt and with Coat, which are not confused with each other. If no pair stands out, the most
    confused pair (the first of equal ones) is the only group. If no pair has a finite probability (a single class, or a
    model that diverged), there is no group.
    """
    mutual, classes = mutual_probability(probability), len(probability)
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes) if np.isfinite(mutual[i, j])]
    if not pairs:
        return ()
    strength = np.array([mutual[pair] for pair in pairs])
    standing_out = strength > confusion_threshold(probability, threshold)
    if not standing_out.any():
        standing_out = np.arange(len(pairs)) == strength.argmax()
    neighbours: dict[int, set[int]] = {c: set() for c in range(classes)}
    for (i, j), stands_out in zip(pairs, standing_out, strict=True):
        if stands_out:
            neighbours[i].add(j)
            neighbours[j].add(i)
    cliques = _maximal_cliques(neighbours, frozenset(), set(neighbours), set())
    return tuple(sorted(sorted(cliques, key=lambda clique: -_confusion_within(clique, mutual))[:max_groups]))


def mutual_probability(probability: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how likely two classes are mistaken for each other: the mean of both directions."""
    mutual: npt.NDArray[np.float64] = (probability + probability.T) / 2
    return mutual


def confusion_threshold(probability: npt.NDArray[np.float64], threshold: float) -> float:
    """Return the mutual probability above which a pair stands out: `threshold` standard deviations above the mean."""
    mutual = mutual_probability(probability)[np.triu_indices(len(probability), 1)]
    known = mutual[np.isfinite(mutual)]
    return float(known.mean() + threshold * known.std())


def _confusion_within(clique: tuple[int, ...], mutual: npt.NDArray[np.float64]) -> float:
    """Return the mean mutual probability of a clique's pairs."""
    return float(np.mean([mutual[i, j] for i in clique for j in clique if i < j]))


def _maximal_cliques(
    neighbours: dict[int, set[int]], clique: frozenset[int], candidates: set[int], excluded: set[int]
) -> list[tuple[int, ...]]:
    """Find the maximal cliques of two or more classes, by the Bron–Kerbosch algorithm."""
    if not candidates and not excluded:
        return [tuple(sorted(clique))] if len(clique) > 1 else []
    found = []
    for vertex in sorted(candidates):
        found += _maximal_cliques(
            neighbours, clique | {vertex}, candidates & neighbours[vertex], excluded & neighbours[vertex]
        )
        candidates = candidates - {vertex}
        excluded = excluded | {vertex}
    return found
