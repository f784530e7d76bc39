"""Every public loss against its formula, written here once more in plain Python, and its behaviour at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedskew import losses
from fedskew.losses import IGNORE

# -- the formulas, term by term ---------------------------------------------------------------------------

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


def groups_of(classes: int) -> tuple[tuple[int, ...], ...]:
    return ((0, 1),) if classes == 2 else ((0, 1), tuple(range(1, classes)))


def expected_partial(z: Rows, teacher: Rows, y: Sequence[int], n: Sequence[int], reverse: bool = False) -> float:
    groups, per_sample = groups_of(len(n)), []
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
    groups = groups_of(z.shape[-1])
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


# -- batches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    logits: Tensor
    teacher: Tensor
    targets: Tensor
    counts: Tensor

    def value(self, name: str) -> float:
        return float(LOSSES[name][0](self.logits, self.teacher, self.targets, self.counts))

    def expected(self, name: str) -> float:
        z, t = self.logits.tolist(), self.teacher.tolist()
        return LOSSES[name][1](z, t, self.targets.tolist(), self.counts.tolist())

    def gradient(self, name: str) -> Tensor:
        leaf = self.logits.detach().clone().requires_grad_()
        loss = LOSSES[name][0](leaf, self.teacher, self.targets, self.counts)
        (gradient,) = torch.autograd.grad(loss, leaf, materialize_grads=True)
        return gradient

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.logits.to(dtype), self.teacher.to(dtype), self.targets, self.counts)

    def padded(self) -> Batch:
        rows = torch.full((2, self.logits.shape[1]), 3.0, dtype=self.logits.dtype)
        rows[1, 0] = -5.0
        ignored = torch.tensor([IGNORE, IGNORE])
        return Batch(
            torch.cat([self.logits, rows]),
            torch.cat([self.teacher, -rows]),
            torch.cat([self.targets, ignored]),
            self.counts,
        )


def batch(
    logits: Rows, targets: Sequence[int], counts: Sequence[int], teacher: Rows | None = None, dtype: str = "float64"
) -> Batch:
    z = torch.tensor(logits, dtype=getattr(torch, dtype))
    t = torch.zeros_like(z) if teacher is None else torch.tensor(teacher, dtype=z.dtype)
    return Batch(z, t, torch.tensor(targets), torch.tensor(counts))


@st.composite
def batches(draw: st.DrawFn, size: float = 6.0, classes: int | None = None, rows: int | None = None) -> Batch:
    """A client's counts, none of them or all but one zero, and a batch of labels that it has."""
    c = draw(st.integers(2, 6)) if classes is None else classes
    b = draw(st.integers(1, 4)) if rows is None else rows
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 500]), min_size=c, max_size=c).filter(any))
    targets = draw(st.lists(st.sampled_from(np.flatnonzero(counts).tolist()), min_size=b, max_size=b))
    numbers = arrays(np.float64, (b, c), elements=st.floats(-size, size))
    return Batch(
        torch.from_numpy(draw(numbers)), torch.from_numpy(draw(numbers)), torch.tensor(targets), torch.tensor(counts)
    )


GENERIC = batch(
    [[0.3, -1.2, 0.8, 2.0, -0.4], [1.1, 0.2, -0.7, 0.5, 0.9], [-0.6, 1.7, 0.1, -1.5, 0.6], [0.4, 0.25, -2.2, 1.3, 1.2]],
    [0, 2, 0, 1],
    [6, 2, 1, 0, 0],
    [[-0.2, 0.7, 1.4, -0.9, 0.3], [0.6, -1.1, 0.5, 0.2, 1.8], [1.0, 0.4, -0.3, 0.9, -1.6], [-0.8, 1.2, 0.1, 0.6, -0.5]],
)


# -- value and gradient -----------------------------------------------------------------------------------


@every_loss
@given(batch=batches())
@settings(max_examples=20)
def test_value_is_the_formula(name: str, batch: Batch) -> None:
    assert batch.value(name) == pytest.approx(batch.expected(name), rel=1e-11, abs=1e-11)


@every_loss
def test_gradient_is_that_of_the_value(name: str) -> None:
    def loss(z: Tensor) -> Tensor:
        return LOSSES[name][0](z, GENERIC.teacher, GENERIC.targets, GENERIC.counts)

    assert torch.autograd.gradcheck(loss, GENERIC.logits.clone().requires_grad_(), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("name", [*DIVERGENCES, "partial reverse"])
def test_teacher_gets_no_gradient(name: str) -> None:
    teacher = GENERIC.teacher.clone().requires_grad_()
    z = GENERIC.logits.clone().requires_grad_()
    loss = LOSSES[name][0](z, teacher, GENERIC.targets, GENERIC.counts)
    assert torch.autograd.grad(loss, teacher, allow_unused=True)[0] is None


def test_the_papers_gradient_of_the_calibrated_loss_is_p_weighted_softmax_minus_one_hot() -> None:
    p = GENERIC.counts.double() / GENERIC.counts.sum()
    weighted = p * GENERIC.logits.exp()
    one_hot = torch.nn.functional.one_hot(GENERIC.targets, 5)
    expected = (weighted / weighted.sum(1, keepdim=True) - one_hot) / len(GENERIC.targets)
    torch.testing.assert_close(GENERIC.gradient("calibrated"), expected, rtol=1e-12, atol=1e-15)


def test_group_cross_entropy_leaves_other_classes_out() -> None:
    z, y = GENERIC.logits, torch.tensor([1, 3, 3, 1])
    rows = [[row[1], row[3]] for row in z.tolist()]
    expected = weighted_ce(rows, [0, 1, 1, 0], one, one)
    assert float(losses.group_cross_entropy(z, y, (1, 3))) == pytest.approx(expected, rel=1e-14)
    leaf = z.clone().requires_grad_()
    losses.group_cross_entropy(leaf, y, (3, 1)).backward()
    assert leaf.grad is not None
    assert (leaf.grad[:, [0, 2, 4]] == 0).all()


# -- properties -------------------------------------------------------------------------------------------


@every_loss
@given(batch=batches())
@settings(max_examples=12)
def test_padded_rows_change_neither_value_nor_gradient(name: str, batch: Batch) -> None:
    padded = batch.padded()
    assert padded.value(name) == pytest.approx(batch.value(name), rel=1e-13, abs=1e-13)
    gradient = padded.gradient(name)
    torch.testing.assert_close(gradient[:-2], batch.gradient(name), rtol=1e-12, atol=1e-14)
    assert (gradient[-2:] == 0).all()


@every_loss
def test_a_batch_of_padding_only_is_zero_with_zero_gradient(name: str) -> None:
    nothing = Batch(GENERIC.logits, GENERIC.teacher, torch.full((4,), IGNORE), GENERIC.counts)
    assert nothing.value(name) == 0
    assert (nothing.gradient(name) == 0).all()


@every_loss
@given(batch=batches(size=1e4), scale=st.sampled_from([1.0, 1e-30]), dtype=st.sampled_from(["float64", "float32"]))
@settings(max_examples=12)
def test_value_and_gradient_are_finite(name: str, batch: Batch, scale: float, dtype: str) -> None:
    scaled = Batch(batch.logits * scale, batch.teacher * scale, batch.targets, batch.counts).to(getattr(torch, dtype))
    assert math.isfinite(scaled.value(name))
    assert scaled.gradient(name).isfinite().all()


@every_loss
@given(batch=batches())
@settings(max_examples=12)
def test_float32_is_close_to_float64(name: str, batch: Batch) -> None:
    single = batch.to(torch.float32)
    assert single.logits.dtype == single.gradient(name).dtype == torch.float32
    exact = single.to(torch.float64)  # the same logits: ties must not break otherwise
    largest_factor = 500 * batch.logits.shape[1]  # FedGR's n/n_c multiplies logits and their rounding
    assert single.value(name) == pytest.approx(exact.value(name), rel=1e-5, abs=1e-6 * largest_factor)
    torch.testing.assert_close(single.gradient(name).double(), exact.gradient(name), rtol=1e-2, atol=1e-3)


@every_loss
@given(clients=st.lists(batches(classes=4, rows=3), min_size=2, max_size=3))
@settings(max_examples=8)
def test_vmap_over_clients_is_a_loop_over_clients(name: str, clients: list[Batch]) -> None:
    loss = LOSSES[name][0]
    clients = [clients[0].padded(), *(client.padded() for client in clients[1:])]
    stacked = [torch.stack(t) for t in zip(*((c.logits, c.teacher, c.targets, c.counts) for c in clients), strict=True)]
    lifted = torch.func.vmap(torch.func.grad_and_value(loss))
    gradients, values = lifted(*stacked)
    torch.testing.assert_close(values, torch.tensor([c.value(name) for c in clients], dtype=torch.float64))
    torch.testing.assert_close(gradients, torch.stack([c.gradient(name) for c in clients]))


@pytest.mark.parametrize("name", [*DIVERGENCES, "partial reverse"])
@given(batch=batches())
@settings(max_examples=20)
def test_a_divergence_is_not_negative(name: str, batch: Batch) -> None:
    assert batch.value(name) >= -1e-12


@pytest.mark.parametrize("name", ["all classes", "present", "target", "vacant", "not true", "partial"])
@given(batch=batches())
@settings(max_examples=12)
def test_a_student_that_agrees_with_its_teacher_pays_nothing(name: str, batch: Batch) -> None:
    same = Batch(batch.logits, batch.logits, batch.targets, batch.counts)
    if name == "partial" and batch.logits.shape[1] > 2:
        same_experts = torch.stack([batch.logits, batch.logits])
        value = losses.partial_distillation(batch.logits, batch.targets, same_experts, groups_of(len(batch.counts)))
        assert float(value) == pytest.approx(0, abs=1e-15)
    else:
        assert same.value(name) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@given(batch=batches(), shift=st.floats(-5, 5))
@settings(max_examples=12)
def test_a_constant_added_to_all_logits_of_a_sample_changes_nothing(name: str, batch: Batch, shift: float) -> None:
    grid = (batch.logits * 1024).round() / 1024  # exact sums: a shift must not create or break ties
    step = round(shift * 1024) / 1024
    before = Batch(grid, batch.teacher, batch.targets, batch.counts)
    after = Batch(grid + step, batch.teacher, batch.targets, batch.counts)
    assert after.value(name) == pytest.approx(before.value(name), rel=1e-11, abs=1e-11)


# -- FedVLS -----------------------------------------------------------------------------------------------


def present_shifted(batch: Batch, shift: float) -> Batch:
    return Batch(batch.logits + shift * (batch.counts > 0).double(), batch.teacher, batch.targets, batch.counts)


@given(batch=batches(), shift=st.floats(-1e3, 1e3))
@settings(max_examples=12)
def test_calibration_and_vacant_distillation_ignore_a_shift_of_all_present_logits(batch: Batch, shift: float) -> None:
    moved = present_shifted(batch, shift)
    for name in ("calibrated", "vacant"):
        assert moved.value(name) == pytest.approx(batch.value(name), rel=1e-9, abs=1e-9)


@given(batch=batches(), shift=st.floats(0, 1e6))
@settings(max_examples=12)
def test_the_papers_suppression_follows_that_shift_down_without_bound(batch: Batch, shift: float) -> None:
    y, n = batch.targets.tolist(), batch.counts.tolist()
    slope = sum(n[c] for c in range(len(n)) if any(target != c for target in y)) / sum(n)
    expected = batch.value("suppression paper") - slope * shift
    assert present_shifted(batch, -shift).value("suppression paper") == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_with_weight_one_the_papers_objective_therefore_has_no_minimum() -> None:
    def objective(shift: float) -> float:
        moved = present_shifted(GENERIC, shift)
        return sum(moved.value(name) for name in ("calibrated", "vacant", "suppression paper"))

    assert objective(-1e6) < -0.9e6


@given(batch=batches(), shift=st.floats(0, 1e6))
@settings(max_examples=12)
def test_the_programs_suppression_has_a_floor_for_classes_in_the_batch(batch: Batch, shift: float) -> None:
    y = batch.targets.tolist()
    counts = torch.tensor([n if c in y else 0 for c, n in enumerate(batch.counts.tolist())])
    inside = Batch(batch.logits, batch.teacher, batch.targets, counts)
    floor = sum(counts.tolist()[c] / sum(counts.tolist()) * math.log(y.count(c) / len(y)) for c in set(y))
    assert present_shifted(inside, -shift).value("suppression lade") >= floor - 1e-9


def test_the_floor_is_reached_far_down() -> None:
    client = batch([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [0, 0, 1], [3, 1])
    expected = 3 / 4 * math.log(2 / 3) + 1 / 4 * math.log(1 / 3)
    assert present_shifted(client, -1e3).value("suppression lade") == pytest.approx(expected, rel=1e-12)


def test_no_vacant_class_gives_exactly_zero_distillation_and_zero_gradient() -> None:
    full = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.tensor([6, 2, 1, 1, 3]))
    assert full.value("vacant") == 0
    assert (full.gradient("vacant") == 0).all()


def test_one_vacant_class_gives_exactly_zero_distillation_and_zero_gradient() -> None:
    nearly = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.tensor([6, 2, 1, 1, 0]))
    assert nearly.value("vacant") == 0
    assert (nearly.gradient("vacant") == 0).all()


def test_vacant_distillation_reaches_vacant_logits_only() -> None:
    gradient = GENERIC.gradient("vacant")
    assert (gradient[:, :3] == 0).all()
    assert (gradient[:, 3:] != 0).all()


def test_vacant_distillation_needs_no_targets() -> None:
    without = losses.vacant_distillation(GENERIC.logits, GENERIC.teacher, GENERIC.counts)
    assert float(without) == GENERIC.value("vacant")


def test_calibration_gives_vacant_logits_no_gradient() -> None:
    assert (GENERIC.gradient("calibrated")[:, 3:] == 0).all()


def test_calibration_of_an_even_client_is_cross_entropy() -> None:
    even = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.full((5,), 4))
    assert even.value("calibrated") == pytest.approx(even.value("cross_entropy"), rel=1e-14)


def test_a_single_class_client_learns_from_the_vacant_classes_only() -> None:
    single = batch([[0.5, 2.0, -1.0], [1.0, 0.0, 3.0]], [1, 1], [0, 9, 0], [[1.0, 0.0, -1.0], [0.0, 2.0, 1.0]])
    for name in ("calibrated", "suppression paper"):
        assert single.value(name) == 0
        assert (single.gradient(name) == 0).all()
    assert single.value("vacant") > 0
    assert (single.gradient("vacant")[:, 1] == 0).all()


def test_a_class_without_negatives_in_the_batch_is_skipped_by_the_paper_and_zero_in_the_program() -> None:
    same_label = batch([[0.3, 1.0, -2.0], [2.0, 0.1, 0.4]], [0, 0], [5, 5, 0])
    paper = 0.5 * math.log((math.exp(1.0) + math.exp(0.1)) / 2)  # class 1 only
    assert same_label.value("suppression paper") == pytest.approx(paper, rel=1e-14)
    shift = math.log((1 / 3 + 1e-9) / (0.5 + 1e-9))
    assert same_label.value("suppression lade") == pytest.approx(paper + 0.5 * shift, rel=1e-14)
    for name in ("suppression paper", "suppression lade"):
        assert (same_label.gradient(name)[:, [0, 2]] == 0).all()


def test_a_batch_of_one_suppresses_all_present_classes_but_its_own() -> None:
    alone = batch([[0.3, 1.0, -2.0]], [0], [2, 2, 0])
    assert alone.value("suppression paper") == pytest.approx(0.5 * 1.0)
    torch.testing.assert_close(alone.gradient("suppression paper"), torch.tensor([[0.0, 0.5, 0.0]]).double())


def test_vacant_classes_are_never_suppressed() -> None:
    for name in ("suppression paper", "suppression lade"):
        assert (GENERIC.gradient(name)[:, 3:] == 0).all()


# -- FedLMD and FedNTD ------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [1, 1, 1, 1], [500, 500, 500, 500]])
def test_an_even_client_makes_label_masking_not_true_distillation(counts: list[int]) -> None:
    z, t, y = GENERIC.logits[:, :4], GENERIC.teacher[:, :4], GENERIC.targets
    even = Batch(z, t, y, torch.tensor(counts))
    assert even.value("label masking") == pytest.approx(even.value("not true"), rel=1e-14)


def test_a_sample_whose_target_is_the_only_minority_class_pays_nothing() -> None:
    client = batch([[0.5, 2.0, -1.0]], [2], [5, 5, 1], [[1.0, 0.0, -1.0]])
    for name in ("label masking", "teacher-free"):
        assert client.value(name) == 0
        assert (client.gradient(name) == 0).all()


@given(batch=batches(classes=2))
@settings(max_examples=12)
def test_two_classes_leave_nothing_to_distil(batch: Batch) -> None:
    for name in ("not true", "label masking", "label masking paper", "teacher-free"):
        assert batch.value(name) == 0
        assert (batch.gradient(name) == 0).all()


def test_all_classes_majority_by_the_papers_rule_leaves_no_teacher() -> None:
    even = Batch(GENERIC.logits, GENERIC.teacher, GENERIC.targets, torch.full((5,), 3))
    assert bool(losses.majority_classes(even.counts, "paper").all())
    assert even.value("label masking paper") == 0
    assert (even.gradient("label masking paper") == 0).all()


def test_a_client_with_every_present_class_alike_has_only_vacant_minorities() -> None:
    counts = torch.tensor([3, 3, 0, 0])
    assert losses.majority_classes(counts).tolist() == [True, True, False, False]
    assert losses.majority_classes(counts, "paper").tolist() == [True, True, False, False]


def test_the_rules_differ_on_a_class_between_the_two_means() -> None:
    counts = torch.tensor([8, 3, 1, 0, 0, 0])  # n/C = 2, n over classes present = 4
    assert losses.majority_classes(counts).tolist() == [True, True, False, False, False, False]
    assert losses.majority_classes(counts, "paper").tolist() == [True, False, False, False, False, False]


def test_a_count_of_exactly_the_mean_is_majority_by_the_papers_rule_only() -> None:
    counts = torch.tensor([4, 2, 3])
    assert losses.majority_classes(counts).tolist() == [True, False, False]
    assert losses.majority_classes(counts, "paper").tolist() == [True, False, True]


def test_majority_classes_that_are_not_the_target_are_pushed_down() -> None:
    client = batch([[0.0, 0.0, 0.0, 0.0]], [0], [5, 5, 0, 0], [[0.0, 0.0, 1.0, 0.0]])
    gradient = client.gradient("label masking")[0]
    assert gradient[0] == 0
    assert gradient[1] > 0


def test_teacher_free_is_uniform_over_the_minority_without_the_target() -> None:
    client = batch([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [0, 2], [9, 0, 1, 0])
    # minority: 1, 2, 3; for the first sample 1/3 each over three others, for the second 1/2 on two of three
    expected = 4 * (0 + math.log(3 / 2)) / 2
    assert client.value("teacher-free") == pytest.approx(expected, rel=1e-14)


@given(batch=batches())
@settings(max_examples=12)
def test_distillation_never_moves_the_targets_logit(batch: Batch) -> None:
    rows = torch.arange(len(batch.targets))
    for name in ("not true", "label masking", "teacher-free"):
        assert (batch.gradient(name)[rows, batch.targets] == 0).all()


# -- FedLC, FedRS, FedGR's client -------------------------------------------------------------------------


def test_a_margin_of_zero_is_cross_entropy_with_vacant_classes_in() -> None:
    value = losses.margin_cross_entropy(GENERIC.logits, GENERIC.targets, GENERIC.counts, 0.0)
    assert float(value) == GENERIC.value("cross_entropy")


def test_a_margin_takes_vacant_classes_out() -> None:
    assert (GENERIC.gradient("margin")[:, 3:] == 0).all()


@pytest.mark.parametrize("soft", [False, True])
def test_restricted_softmax_with_alpha_one_is_cross_entropy(soft: bool) -> None:
    value = losses.restricted_softmax_cross_entropy(GENERIC.logits, GENERIC.targets, GENERIC.counts, 1.0, soft)
    assert float(value) == GENERIC.value("cross_entropy")


def test_unbalanced_softmax_of_a_balanced_client_scales_logits_by_its_number_of_labels() -> None:
    client = batch([[0.5, 1.5, 9.0]], [0], [7, 7, 0])
    assert client.value("unbalanced") == pytest.approx(math.log(1 + math.exp(2 * 1.0)), rel=1e-14)
    assert client.value("unbalanced normalised") == pytest.approx(math.log(1 + math.exp(1.0)), rel=1e-14)


def test_unbalanced_softmax_with_papers_gamma_can_keep_vacant_classes() -> None:
    z, y, n = torch.tensor([[0.5, 1.5, 2.0]]).double(), torch.tensor([0]), torch.tensor([2, 6, 0])
    kept = losses.unbalanced_cross_entropy(z, y, n, gamma="paper", vacant="code")
    scaled = [8 / 2 * 0.5, 8 / 6 * 1.5, 8 / 24 * 2.0]
    assert float(kept) == pytest.approx(math.log(sum(map(math.exp, scaled))) - scaled[0], rel=1e-14)


def test_a_single_class_client_has_nothing_to_learn_from_its_own_labels() -> None:
    single = batch([[0.5, 2.0, -1.0]], [1], [0, 9, 0])
    for name in ("unbalanced", "unbalanced normalised", "margin"):
        assert single.value(name) == 0
        assert (single.gradient(name) == 0).all()


# -- PKD --------------------------------------------------------------------------------------------------

FASHION = ((0, 6), (2, 4, 6))


def fashion_logits(*predictions: int) -> Tensor:
    return 3 * torch.nn.functional.one_hot(torch.tensor(predictions), 10).double()


def test_an_expert_is_active_where_target_and_wrong_prediction_are_in_its_group() -> None:
    logits = fashion_logits(6, 0, 4, 2, 0, 6, 7)
    targets = torch.tensor([0, 6, 6, 0, 0, 9, 2])
    # Shirt for T-shirt, T-shirt for Shirt: first; Coat for Shirt: second; across groups, right, half outside: none
    expected = [[True, True, False, False, False, False, False], [False, False, True, False, False, False, False]]
    assert losses.active_experts(logits, targets, FASHION).tolist() == expected


def test_where_two_groups_qualify_the_first_teaches() -> None:
    active = losses.active_experts(fashion_logits(1), torch.tensor([0]), ((0, 1), (0, 1, 2)))
    assert active.tolist() == [[True], [False]]
    swapped = losses.active_experts(fashion_logits(1), torch.tensor([0]), ((0, 1, 2), (0, 1)))
    assert swapped.tolist() == [[True], [False]]


def test_without_an_active_sample_partial_distillation_is_zero_with_zero_gradient() -> None:
    logits = fashion_logits(0, 1, 2).requires_grad_()
    value = losses.partial_distillation(logits, torch.tensor([0, 6, 9]), torch.randn(2, 3, 10).double(), FASHION)
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_partial_distillation_is_a_mean_over_the_whole_batch_without_temperature_squared() -> None:
    logits = fashion_logits(6, 1, 1, 1)
    experts = torch.zeros(2, 4, 10).double()
    value = losses.partial_distillation(logits, torch.tensor([0, 1, 1, 1]), experts, FASHION, 3.0)
    student = {0: 1 / (1 + math.e), 6: math.e / (1 + math.e)}
    assert float(value) == pytest.approx(kl({0: 0.5, 6: 0.5}, student) / 4, rel=1e-14)


def test_partial_distillation_moves_logits_of_the_group_only() -> None:
    logits = fashion_logits(4).requires_grad_()
    losses.partial_distillation(logits, torch.tensor([6]), torch.zeros(2, 1, 10).double(), FASHION).backward()
    assert logits.grad is not None
    assert logits.grad[0].nonzero().flatten().tolist() == [2, 4, 6]


def test_ignored_rows_activate_nobody() -> None:
    assert not losses.active_experts(fashion_logits(6), torch.tensor([IGNORE]), FASHION).any()


# -- FedGR's server ---------------------------------------------------------------------------------------


def expected_gravitation(u: np.ndarray, present: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum to minimise and its gradient, from the facts' two lines each."""
    clients, classes, _ = u.shape
    total, gradient = 0.0, np.zeros_like(u)
    for k in range(clients):
        for i in np.flatnonzero(present[k]):
            v = u[k, i].copy()
            others = [(z, j) for z in range(clients) if z != k for j in range(classes) if present[z, j]]
            strength = {(z, j): math.exp(u[z, j] @ v) for z, j in others}
            same = math.fsum(s for (_, j), s in strength.items() if j == i)
            every = math.fsum(strength.values())
            other = math.fsum(s for (_, j), s in strength.items() if j != i)
            if same:
                total -= math.log(same / every)
                for (z, j), s in strength.items():
                    gradient[z, j] += (s / every - (s / same if j == i else 0)) * v
            denominator = math.exp(v @ v) + other
            total -= math.log(math.exp(v @ v) / denominator)
            for (z, j), s in strength.items():
                if j != i:
                    gradient[z, j] += s / denominator * v
    return total, gradient


@st.composite
def heads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    k, c, d = draw(st.integers(1, 4)), draw(st.integers(2, 4)), draw(st.integers(1, 3))
    return draw(arrays(np.float64, (k, c, d), elements=st.floats(-2, 2))), draw(arrays(np.bool_, (k, c)))


def gravitation_and_gradient(u: np.ndarray, present: np.ndarray) -> tuple[float, np.ndarray]:
    leaf = torch.from_numpy(u).requires_grad_()
    value = losses.gravitation(leaf, torch.from_numpy(present))
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), gradient.numpy()


@given(heads())
@settings(max_examples=20)
def test_gravitation_and_its_gradient_are_the_formulas(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    value, gradient = gravitation_and_gradient(*drawn)
    expected, expected_gradient = expected_gravitation(*drawn)
    assert value == pytest.approx(expected, rel=1e-11, abs=1e-11)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-11)


@given(heads())
@settings(max_examples=12)
def test_rows_of_vacant_labels_get_no_correction(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    _, gradient = gravitation_and_gradient(*drawn)
    assert (gradient[~drawn[1]] == 0).all()


def test_a_single_participant_feels_no_gravitation() -> None:
    value, gradient = gravitation_and_gradient(np.ones((1, 3, 2)), np.array([[True, True, False]]))
    assert value == 0
    assert (gradient == 0).all()


def test_a_label_that_nobody_else_owns_is_repelled_but_not_attracted() -> None:
    u = np.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.5, 1.0]]])
    present = np.array([[True, False], [False, True]])
    value, gradient = gravitation_and_gradient(u, present)
    first, second = math.log(1 + math.exp(0.5 - 1.0)), math.log(1 + math.exp(0.5 - 1.25))
    assert value == pytest.approx(first + second, rel=1e-14)
    assert gradient[1, 1] @ u[0, 0] > 0  # minimising moves it against the other label's row


def test_clients_with_one_common_label_only_are_at_rest() -> None:
    value, gradient = gravitation_and_gradient(np.ones((2, 2, 3)), np.array([[True, False], [True, False]]))
    assert value == 0
    assert (gradient == 0).all()


def test_descending_draws_equal_labels_together_and_drives_different_ones_apart() -> None:
    u = np.random.default_rng(0).normal(size=(3, 2, 4))
    _, gradient = gravitation_and_gradient(u, np.ones((3, 2), dtype=bool))
    moved = u - 0.01 * gradient

    def similarity(rows: np.ndarray, same: bool) -> float:
        pairs = [(k, i, z, j) for k in range(3) for z in range(3) if z != k for i in range(2) for j in range(2)]
        return sum(u[k, i] @ rows[z, j] for k, i, z, j in pairs if (i == j) == same)

    assert similarity(moved, same=True) > similarity(u, same=True)
    assert similarity(moved, same=False) < similarity(u, same=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_rows_do_not_overflow(dtype: torch.dtype) -> None:
    u = 1e3 * torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    leaf = u.requires_grad_()
    value = losses.gravitation(leaf, torch.ones(3, 4, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(value, leaf)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_gravitation_lifts_over_a_batch_of_rounds() -> None:
    rng = np.random.default_rng(1)
    u, present = torch.from_numpy(rng.normal(size=(3, 2, 4, 2))), torch.from_numpy(rng.random((3, 2, 4)) < 0.6)
    lifted = torch.func.vmap(losses.gravitation)(u, present)
    torch.testing.assert_close(lifted, torch.stack([losses.gravitation(a, b) for a, b in zip(u, present, strict=True)]))
