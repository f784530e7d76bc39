"""The papers' loss terms once more, term by term in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fedskew import losses

Rows = Sequence[Sequence[float]]
Distribution = dict[int, float]


def softmax_over(row: Sequence[float], classes: Sequence[int], temperature: float = 1.0) -> Distribution:
    total = math.fsum(math.exp(row[c] / temperature) for c in classes)
    return {c: math.exp(row[c] / temperature) / total for c in classes}


def kl(p: Distribution, q: Distribution) -> float:
    return math.fsum(p[c] * math.log(p[c] / q[c]) for c in p)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def weighted_ce(z: Rows, y: Sequence[int], weight: Callable[[int], float], scale: Callable[[int], float]) -> float:
    """−log of weight·e^(scale·z) at the target over its sum, mean over the batch; FedGR's scales need the shift."""
    per_sample = []
    for row, target in zip(z, y, strict=True):
        largest = max(scale(c) * row[c] for c in range(len(row)) if weight(c))
        terms = [weight(c) and weight(c) * math.exp(scale(c) * row[c] - largest) for c in range(len(row))]
        per_sample.append(largest - scale(target) * row[target] + math.log(math.fsum(terms) / weight(target)))
    return mean(per_sample)


def one(_: int) -> float:
    return 1.0


def expected_ce(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, one, one)


def expected_calibrated(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, lambda c: n[c] / sum(n), one)


def expected_batch_classes(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, lambda c: 1.0 if c in y else 0.0, one)


def expected_margin(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, lambda c: math.exp(-0.5 * n[c] ** -0.25) if n[c] else 0.0, one)


def expected_restricted(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, one, lambda c: 1.0 if n[c] else 0.7)


def expected_restricted_soft(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, one, lambda c: 0.7 + 0.3 * n[c] / max(n))


def present_only(n: Sequence[int]) -> Callable[[int], float]:
    return lambda c: 1.0 if n[c] else 0.0


def expected_unbalanced(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, present_only(n), lambda c: sum(n) / n[c] if n[c] else 0.0)


def smallest(n: Sequence[int]) -> int:
    return min(count for count in n if count)


def expected_unbalanced_normalised(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    return weighted_ce(z, y, present_only(n), lambda c: smallest(n) / n[c] if n[c] else 0.0)


def expected_unbalanced_code(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    """The published program: ratio to the largest class, 4 for vacant ones, inverted, divided by its maximum."""
    inverse = [1 / (count / max(n) if count else 4.0) for count in n]
    return weighted_ce(z, y, one, lambda c: inverse[c] / max(inverse))


def expected_vacant(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    vacant = [c for c in range(len(n)) if n[c] == 0]
    return mean([kl(softmax_over(t, vacant), softmax_over(s, vacant)) for s, t in zip(z, teacher, strict=True)])


def expected_not_true(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    per_sample = []
    for s, t, target in zip(z, teacher, y, strict=True):
        others = [c for c in range(len(n)) if c != target]
        per_sample.append(kl(softmax_over(t, others, 2.0), softmax_over(s, others, 2.0)))
    return 4.0 * mean(per_sample)


def expected_smoothed(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    per_sample = []
    for row, target in zip(z, y, strict=True):
        q = softmax_over(row, range(len(n)))
        per_sample.append(-math.fsum((0.7 * (c == target) + 0.3 / len(n)) * math.log(q[c]) for c in q))
    return mean(per_sample)


def expected_focal(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    p = [softmax_over(row, range(len(n))) for row in z]
    rest = [math.fsum(q for c, q in row.items() if c != target) for row, target in zip(p, y, strict=True)]
    return mean([-(r**1.5) * math.log(row[target]) for r, row, target in zip(rest, p, y, strict=True)])


def expected_distillation(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    every = range(len(n))
    return 4.0 * mean(
        [kl(softmax_over(t, every, 2.0), softmax_over(s, every, 2.0)) for s, t in zip(z, teacher, strict=True)]
    )


def expected_present(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    own = [c for c in range(len(n)) if n[c]]
    return 4.0 * mean(
        [kl(softmax_over(t, own, 2.0), softmax_over(s, own, 2.0)) for s, t in zip(z, teacher, strict=True)]
    )


def expected_target(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    def pair(row: Sequence[float], target: int) -> Distribution:
        p = softmax_over(row, range(len(n)), 2.0)
        return {0: p[target], 1: math.fsum(q for c, q in p.items() if c != target)}

    return 4.0 * mean([kl(pair(t, target), pair(s, target)) for s, t, target in zip(z, teacher, y, strict=True)])


def majority(n: Sequence[int], rule: str) -> set[int]:
    if rule == "code":
        return {c for c in range(len(n)) if n[c] > sum(n) / len(n)}
    return {c for c in range(len(n)) if n[c] >= sum(n) / len([count for count in n if count])}


def masked(z: Rows, teacher: Rows | None, y: Sequence[int], n: Sequence[int], rule: str, tau: float) -> float:
    """τ²·KL; `teacher` None: uniform with the facts' normaliser C − C_k − 1[y ∉ Y_k]."""
    large, per_sample = majority(n, rule), []
    for i, target in enumerate(y):
        minority = [c for c in range(len(n)) if c not in large and c != target]
        others = [c for c in range(len(n)) if c != target]
        if teacher is None:
            normaliser = len(n) - len(large) - (target not in large)
            p = dict.fromkeys(minority, 1 / max(normaliser, 1))
        else:
            p = softmax_over(teacher[i], minority, tau)
        per_sample.append(kl(p, softmax_over(z[i], others, tau)) if minority else 0.0)
    return tau**2 * mean(per_sample)


def weak_groups(classes: int) -> tuple[tuple[int, ...], ...]:
    return ((0, 1),) if classes == 2 else ((0, 1), tuple(range(1, classes)))


def expected_partial(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int], reverse: bool = False) -> float:
    groups, per_sample = weak_groups(len(n)), []
    for i, target in enumerate(y):
        prediction = max(range(len(n)), key=lambda c: z[i][c])
        active = [g for g, group in enumerate(groups) if target != prediction and {target, prediction} <= set(group)]
        if not active:
            per_sample.append(0.0)
            continue
        sign = 1 if active[0] == 0 else -1  # the second expert's logits are the first's negated
        expert = softmax_over([sign * t for t in teacher[i]], groups[active[0]], 3.0)
        student = softmax_over(z[i], groups[active[0]], 3.0)
        per_sample.append(kl(student, expert) if reverse else kl(expert, student))
    return mean(per_sample)


def expected_suppression_paper(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    total = 0.0
    for c in range(len(n)):
        negatives = [math.exp(row[c]) for row, target in zip(z, y, strict=True) if target != c]
        if n[c] and negatives:
            total += n[c] / sum(n) * math.log(math.fsum(negatives) / len(z))
    return total


def expected_suppression_lade(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int]) -> float:
    total = 0.0
    for c in range(len(n)):
        p = n[c] / sum(n)
        shift = -math.log(p + 1e-9) + math.log(1 / len(n) + 1e-9)
        terms = [math.exp((row[c] + shift) * (target != c)) for row, target in zip(z, y, strict=True)]
        if n[c]:
            total += p * math.log(math.fsum(terms) / len(z))
    return total


def partial(z: Tensor, t: Tensor, y: Tensor, reverse: bool = False) -> Tensor:
    groups = weak_groups(z.shape[-1])
    experts = torch.stack([t, -t])[: len(groups)]
    return losses.partial_distillation(z, y, experts, groups, 3.0, reverse)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Expected = Callable[[Rows, Rows, Sequence[int], Sequence[int]], float]

LOSSES: dict[str, tuple[Loss, Expected]] = {
    "cross_entropy": (lambda z, t, y, n: losses.cross_entropy(z, y), expected_ce),
    "smoothed": (lambda z, t, y, n: losses.smoothed_cross_entropy(z, y, 0.3), expected_smoothed),
    "focal": (lambda z, t, y, n: losses.focal_cross_entropy(z, y, 1.5), expected_focal),
    "calibrated": (lambda z, t, y, n: losses.calibrated_cross_entropy(z, y, n), expected_calibrated),
    "margin": (lambda z, t, y, n: losses.margin_cross_entropy(z, y, n, 0.5), expected_margin),
    "restricted": (lambda z, t, y, n: losses.restricted_softmax_cross_entropy(z, y, n, 0.7), expected_restricted),
    "restricted soft": (
        lambda z, t, y, n: losses.restricted_softmax_cross_entropy(z, y, n, 0.7, soft=True),
        expected_restricted_soft,
    ),
    "unbalanced": (lambda z, t, y, n: losses.unbalanced_cross_entropy(z, y, n), expected_unbalanced),
    "unbalanced normalised": (
        lambda z, t, y, n: losses.unbalanced_cross_entropy(z, y, n, gamma="normalised"),
        expected_unbalanced_normalised,
    ),
    "unbalanced code": (
        lambda z, t, y, n: losses.unbalanced_cross_entropy(z, y, n, gamma="normalised", vacant="code"),
        expected_unbalanced_code,
    ),
    "batch classes": (lambda z, t, y, n: losses.batch_class_cross_entropy(z, y), expected_batch_classes),
    "vacant": (lambda z, t, y, n: losses.vacant_distillation(z, t, n, y), expected_vacant),
    "all classes": (lambda z, t, y, n: losses.distillation(z, t, y, 2.0), expected_distillation),
    "present": (lambda z, t, y, n: losses.present_distillation(z, t, y, n, 2.0), expected_present),
    "target": (lambda z, t, y, n: losses.target_distillation(z, t, y, 2.0), expected_target),
    "not true": (lambda z, t, y, n: losses.not_true_distillation(z, t, y, 2.0), expected_not_true),
    "not true teacher-free": (
        lambda z, t, y, n: losses.teacher_free_not_true(z, y, 2.0),
        lambda z, t, y, n: expected_not_true(z, [[0.0] * len(n)] * len(y), y, n),
    ),
    "label masking": (
        lambda z, t, y, n: losses.label_masking_distillation(z, t, y, n, 2.0),
        lambda z, t, y, n: masked(z, t, y, n, "code", 2.0),
    ),
    "label masking paper": (
        lambda z, t, y, n: losses.label_masking_distillation(z, t, y, n, 2.0, "paper"),
        lambda z, t, y, n: masked(z, t, y, n, "paper", 2.0),
    ),
    "teacher-free": (
        lambda z, t, y, n: losses.teacher_free_label_masking(z, y, n, 2.0),
        lambda z, t, y, n: masked(z, None, y, n, "code", 2.0),
    ),
    "partial": (lambda z, t, y, n: partial(z, t, y), expected_partial),
    "partial reverse": (
        lambda z, t, y, n: partial(z, t, y, reverse=True),
        lambda z, t, y, n: expected_partial(z, t, y, n, reverse=True),
    ),
    "suppression paper": (
        lambda z, t, y, n: losses.logit_suppression(z, y, n, "paper"),
        expected_suppression_paper,
    ),
    "suppression lade": (lambda z, t, y, n: losses.logit_suppression(z, y, n), expected_suppression_lade),
}
DIVERGENCES = [
    *("all classes", "present", "target", "vacant", "not true", "not true teacher-free"),
    *("label masking", "label masking paper", "teacher-free", "partial"),
]
SHIFT_INVARIANT = ["cross_entropy", "smoothed", "focal", "calibrated", "margin", "batch classes", *DIVERGENCES]

every_loss = pytest.mark.parametrize("name", LOSSES)
