"""Every loss term of the papers: pure functions of one client's batch.

Each takes the logits of one batch `[B, C]`, returns a scalar (the mean over the batch), is exact in float64,
differentiable without NaN in every edge case, and free of Python branches on tensor values, so that
`torch.func.vmap` lifts it over many clients.

A target of `IGNORE` (−100, PyTorch's own convention) marks a row that pads a short batch: it counts for
nothing. `label_counts` holds the client's number of training samples per class; a class with count 0 is
*vacant*, one above the mean count n/C is a *majority* class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

IGNORE = -100

MajorityRule = Literal["code", "paper"]
SuppressVariant = Literal["lade", "paper"]
GammaMode = Literal["paper", "normalised"]
VacantMode = Literal["exclude", "code"]
MeanOver = Literal["batch", "active"]


# -- the pieces that the losses share ---------------------------------------------------------------------


def _valid(targets: Tensor) -> Tensor:
    return targets != IGNORE


def _index(targets: Tensor) -> Tensor:
    """Targets that can index classes: padded rows point at class 0 and are masked out by `batch_mean`."""
    return targets.clamp(min=0)


def batch_mean(per_sample: Tensor, targets: Tensor | None) -> Tensor:
    """The mean over the rows that do not pad the batch."""
    if targets is None:
        return per_sample.mean()
    valid = _valid(targets)
    return torch.where(valid, per_sample, 0.0).sum() / valid.sum().clamp(min=1)


def _members(logits: Tensor, group: Sequence[int]) -> Tensor:
    """[C]: which classes are of the group. A list as an index would be copied from the host at every step, which a
    CUDA graph cannot repeat."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return torch.stack([classes == c for c in group]).any(dim=0)


def _is_target(logits: Tensor, targets: Tensor) -> Tensor:
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return classes == _index(targets).unsqueeze(-1)


def _negative_log_likelihood(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    picked = log_probabilities.gather(-1, _index(targets).unsqueeze(-1)).squeeze(-1)
    return batch_mean(-picked, targets)


def _log_softmax_over(logits: Tensor, support: Tensor) -> Tensor:
    """Log-softmax restricted to `support`; 0 elsewhere. Rows with an empty support get the full softmax,
    which keeps gradients finite: the caller must give them weight 0."""
    support = support.expand_as(logits)
    safe = support | ~support.any(dim=-1, keepdim=True)
    return logits.masked_fill(~safe, -math.inf).log_softmax(dim=-1).masked_fill(~safe, 0.0)


def _restricted_kl(teacher: Tensor, student: Tensor, teacher_support: Tensor, student_support: Tensor) -> Tensor:
    """KL(teacher ‖ student) per sample, each softmax over its own support; 0 where the teacher's is empty."""
    log_p = _log_softmax_over(teacher.detach(), teacher_support)
    log_q = _log_softmax_over(student, student_support)
    divergence = torch.where(teacher_support, log_p.exp() * (log_p - log_q), 0.0).sum(dim=-1)
    return torch.where(teacher_support.any(dim=-1), divergence, 0.0)


def class_masks(targets: Tensor, classes: int) -> Tensor:
    """`[B, C]` booleans: which class each row has; none, if it pads."""
    return targets.unsqueeze(-1) == torch.arange(classes, device=targets.device)


def class_probabilities(label_counts: Tensor, like: Tensor) -> Tensor:
    """p(c) = n_c / n in the dtype of `like`."""
    counts = label_counts.to(like.dtype)
    return counts / counts.sum()


def majority_classes(label_counts: Tensor, rule: MajorityRule = "code") -> Tensor:
    """Which classes are the client's majority.

    `code`: count > n/C over all C classes, strictly, as FedLMD's program does; `paper`: count ≥ n over the
    number of classes present.
    """
    counts = label_counts.to(torch.float64)
    if rule == "code":
        return counts * counts.shape[-1] > counts.sum()
    present = (counts > 0).sum()
    return counts * present >= counts.sum()


# -- cross entropies --------------------------------------------------------------------------------------


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """CE(z, y): FedAvg's loss."""
    return _negative_log_likelihood(logits.log_softmax(dim=-1), targets)


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.1) -> Tensor:
    """CE against (1 − μ)·one-hot + μ/C: label smoothing."""
    log_p = logits.log_softmax(dim=-1)
    return (1 - smoothing) * _negative_log_likelihood(log_p, targets) - smoothing * batch_mean(log_p.mean(-1), targets)


def focal_cross_entropy(logits: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    """−(1 − p_y)^γ·log p_y: the focal loss, which turns from samples that are already right."""
    log_p = logits.log_softmax(dim=-1).gather(-1, _index(targets).unsqueeze(-1)).squeeze(-1)
    wrong = (-torch.expm1(log_p)).clamp(min=1e-12)  # a power below 1 has no slope at 0
    return batch_mean(-(wrong**gamma) * log_p, targets)


def calibrated_cross_entropy(logits: Tensor, targets: Tensor, label_counts: Tensor) -> Tensor:
    """CE(z + log p, y), vacant classes out of the softmax (FedVLS Eq. 2)."""
    return cross_entropy(logits + class_probabilities(label_counts, logits).log(), targets)


def margin_cross_entropy(logits: Tensor, targets: Tensor, label_counts: Tensor, tau: float) -> Tensor:
    """CE(z_c − τ·n_c^(−1/4), y): FedLC's calibrated margin; a vacant class has an infinite one and drops out."""
    margin = tau * label_counts.to(logits.dtype).pow(-0.25)
    return cross_entropy(logits - margin if tau else logits, targets)


def restricted_softmax_cross_entropy(
    logits: Tensor, targets: Tensor, label_counts: Tensor, alpha: float, soft: bool = False
) -> Tensor:
    """CE(α_c·z_c, y): FedRS scales the logits of vacant classes by α, those present by 1.

    `soft`: α_c = α + (1 − α)·n_c/max n, as in the authors' later program.
    """
    counts = label_counts.to(logits.dtype)
    share = counts / counts.max() if soft else (counts > 0).to(logits.dtype)
    return cross_entropy(logits * (alpha + (1 - alpha) * share), targets)


def unbalanced_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    gamma: GammaMode = "paper",
    vacant: VacantMode = "exclude",
) -> Tensor:
    """CE(γ_c·z_c, y) over the client's own labels (FedGR Eq. 3).

    `gamma="paper"`: γ_c = n/n_c. `"normalised"`: γ_c = n_min/n_c, at most 1, as in the published program.
    `vacant="code"` keeps vacant classes in the softmax with the program's γ (0.25·n_min/n_max, on the
    scale of the chosen γ).
    """
    counts = label_counts.to(logits.dtype)
    present = counts > 0
    smallest = torch.where(present, counts, math.inf).min()
    scale = counts.sum() if gamma == "paper" else smallest
    factor = scale / torch.where(present, counts, 4.0 * counts.max())
    scaled = factor * logits
    if vacant == "exclude":
        scaled = scaled.masked_fill(~present, -math.inf)
    return cross_entropy(scaled, targets)


def batch_class_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """CE with the softmax restricted to the classes that the batch has (BalanceFL); 0 if that is one."""
    present = class_masks(targets, logits.shape[-1]).any(dim=0)
    return cross_entropy(logits.masked_fill(~present, -math.inf), targets)


def own_label_cross_entropy(logits: Tensor, targets: Tensor, label_counts: Tensor) -> Tensor:
    """CE with the softmax restricted to the classes that the client has (FedGC); 0 if that is one."""
    return cross_entropy(logits.masked_fill(label_counts == 0, -math.inf), targets)


def group_cross_entropy(logits: Tensor, targets: Tensor, group: Sequence[int]) -> Tensor:
    """CE with the softmax restricted to the classes of `group`: how a PKD expert learns."""
    return cross_entropy(logits.masked_fill(~_members(logits, group), -math.inf), targets)


# -- distillation -----------------------------------------------------------------------------------------


def vacant_distillation(
    logits: Tensor, teacher_logits: Tensor, label_counts: Tensor, targets: Tensor | None = None
) -> Tensor:
    """KL(teacher ‖ student) over the vacant classes (FedVLS Eq. 3, with the sign that makes it a divergence).

    Zero, with zero gradient, when no or one class is vacant. `targets` only tells which rows pad the batch.
    """
    vacant = (label_counts == 0).expand_as(logits)
    return batch_mean(_restricted_kl(teacher_logits, logits, vacant, vacant), targets)


def distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(teacher ‖ student) over all classes (FedAvg+KD). `targets` only tells which rows pad the batch."""
    everything = torch.ones_like(logits, dtype=torch.bool)
    divergence = _restricted_kl(teacher_logits / temperature, logits / temperature, everything, everything)
    return temperature**2 * batch_mean(divergence, targets)


def present_distillation(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, label_counts: Tensor, temperature: float = 1.0
) -> Tensor:
    """τ²·KL(teacher ‖ student), both over the client's own classes (FedEKD). `targets`: as in `distillation`."""
    present = (label_counts > 0).expand_as(logits)
    divergence = _restricted_kl(teacher_logits / temperature, logits / temperature, present, present)
    return temperature**2 * batch_mean(divergence, targets)


def target_distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(b^g ‖ b), b = (p_y, 1 − p_y): what the models say of the target against all else (DKD's TCKD)."""
    teacher, student = (_target_and_rest(z / temperature, targets) for z in (teacher_logits, logits))
    both = torch.ones_like(student, dtype=torch.bool)
    return temperature**2 * batch_mean(_restricted_kl(teacher, student, both, both), targets)


def _target_and_rest(logits: Tensor, targets: Tensor) -> Tensor:
    """`[B, 2]`: logits of the same probability for the target and for all other classes together."""
    target = logits.gather(-1, _index(targets).unsqueeze(-1)).squeeze(-1)
    rest = logits.masked_fill(_is_target(logits, targets), -math.inf).logsumexp(dim=-1)
    return torch.stack([target, rest], dim=-1)


def not_true_distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(teacher ‖ student), both over the classes other than the target (FedNTD)."""
    others = ~_is_target(logits, targets)
    divergence = _restricted_kl(teacher_logits / temperature, logits / temperature, others, others)
    return temperature**2 * batch_mean(divergence, targets)


def teacher_free_not_true(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """`not_true_distillation` with a teacher that is uniform over the classes other than the target (FedNTD-Tf)."""
    return not_true_distillation(logits, torch.zeros_like(logits), targets, temperature)


def label_masking_distillation(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    temperature: float = 1.0,
    majority_rule: MajorityRule = "code",
) -> Tensor:
    """τ²·KL(teacher ‖ student), the teacher without majority classes and target, the student without the target.

    FedLMD Eqs. 3–6. A sample whose target is the only minority class has no teacher left and costs nothing.
    """
    others = ~_is_target(logits, targets)
    minority = others & ~majority_classes(label_counts, majority_rule)
    divergence = _restricted_kl(teacher_logits / temperature, logits / temperature, minority, others)
    return temperature**2 * batch_mean(divergence, targets)


def teacher_free_label_masking(
    logits: Tensor,
    targets: Tensor,
    label_counts: Tensor,
    temperature: float = 1.0,
    majority_rule: MajorityRule = "code",
) -> Tensor:
    """`label_masking_distillation` with a teacher that is uniform over the minority classes (FedLMD-Tf)."""
    return label_masking_distillation(
        logits, torch.zeros_like(logits), targets, label_counts, temperature, majority_rule
    )


def partial_distillation(
    logits: Tensor,
    targets: Tensor,
    expert_logits: Tensor,
    groups: Sequence[Sequence[int]],
    temperature: float = 3.0,
    reverse: bool = False,
    mean_over: MeanOver = "batch",
) -> Tensor:
    """KL(expert ‖ student) within the group, for samples confused inside a weak-class group (PKD Eq. 1).

    Expert g (`expert_logits[g]`) is active for a sample whose target and wrong prediction both lie in group
    g; where two groups qualify, the first. `reverse`: KL(student ‖ expert). `mean_over`: the whole batch, or the
    samples that are taught.
    """
    active = active_experts(logits, targets, groups)
    total = torch.zeros_like(logits[..., 0])
    for expert, group in enumerate(groups):
        expert_own, own = (torch.stack([z[..., c] for c in group], dim=-1) for z in (expert_logits[expert], logits))
        log_p = (expert_own.detach() / temperature).log_softmax(dim=-1)
        log_q = (own / temperature).log_softmax(dim=-1)
        first, second = (log_q, log_p) if reverse else (log_p, log_q)
        total = total + active[expert] * (first.exp() * (first - second)).sum(dim=-1)
    taught = targets if mean_over == "batch" else torch.where(active.any(dim=0), targets, IGNORE)
    return batch_mean(total, taught)


def active_experts(logits: Tensor, targets: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """`[G, B]` booleans: which expert teaches which sample; at most one each."""
    membership = torch.stack([_members(logits, group) for group in groups])
    wrong = (logits.argmax(dim=-1) != targets) & _valid(targets)
    both = membership[:, _index(targets)] & membership[:, logits.argmax(dim=-1)] & wrong
    return both & (both.cumsum(dim=0) == 1)


# -- regularisers -----------------------------------------------------------------------------------------


def logit_suppression(
    logits: Tensor, targets: Tensor, label_counts: Tensor, variant: SuppressVariant = "lade"
) -> Tensor:
    """Σ_c p(c)·ℓ_c, which pushes down the logits of present classes on samples of other classes (FedVLS Eq. 4–5).

    `paper`: ℓ_c = log of the mean over the batch of 1[y≠c]·e^z_c; it has no lower bound. `lade`, the published
    program: logits shifted by −log p(c) + log 1/C, and a sample of class c adds e^0 instead of nothing, which
    gives the term a floor. A class without negatives in the batch is skipped (`paper`) or gives 0 (`lade`).
    """
    p = class_probabilities(label_counts, logits)
    valid = _valid(targets).unsqueeze(-1)
    negatives = ~_is_target(logits, targets) & valid
    if variant == "lade":
        shifted = logits - (p + 1e-9).log() + math.log(1 / logits.shape[-1] + 1e-9)
        terms = torch.where(negatives, shifted, 0.0).masked_fill(~valid, -math.inf)
        counted = (p > 0) & valid.any()
    else:
        counted = (p > 0) & negatives.any(dim=0)
        terms = logits.masked_fill(~negatives, -math.inf)
    terms = torch.where(counted, terms, 0.0)
    per_class = terms.logsumexp(dim=0) - valid.sum().clamp(min=1).to(logits.dtype).log()
    return torch.where(counted, p * per_class, 0.0).sum()


def model_contrast(
    features: Tensor, global_features: Tensor, previous_features: Tensor, targets: Tensor, temperature: float = 0.5
) -> Tensor:
    """−log of e^(s/τ) over e^(s/τ) + e^(s'/τ), s and s' the cosines with the global and the previous model (MOON).

    Features of zero length have a cosine of 0 with everything. `targets` only tells which rows pad the batch.
    """
    own, common, previous = (_directions(f) for f in (features, global_features.detach(), previous_features.detach()))
    closer = (own * (common - previous)).sum(dim=-1) / temperature
    return batch_mean(-torch.nn.functional.logsigmoid(closer), targets)


def _directions(features: Tensor) -> Tensor:
    return torch.nn.functional.normalize(features.flatten(1), dim=-1, eps=1e-8)


def prototype_contrast(
    features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor, temperature: float = 0.02
) -> Tensor:
    """−log of Σ e^(cos/τ) over the prototypes of the sample's class over the same of all classes (FPL).

    `prototypes[C, P, d]`, of which `known[C, P]` are; a sample whose class has none counts as 0 in the mean.
    """
    cosines = _directions(features) @ _directions(prototypes.detach().flatten(0, 1)).T / temperature
    own = (class_masks(targets, len(known)).unsqueeze(-1) & known).flatten(1)
    contrast = _masked_lse(cosines, known.flatten().expand_as(own)) - _masked_lse(cosines, own)
    return batch_mean(torch.where(own.any(dim=-1), contrast, 0.0), targets)


def prototype_distance(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """The mean square of f − m_y, m_y the mean of the class's prototypes (FPL); else as in `prototype_contrast`."""
    present = known.to(prototypes.dtype).unsqueeze(-1)
    means = (prototypes.detach() * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)
    squares = (features.flatten(1) - means[_index(targets)]).square().mean(dim=-1)
    return batch_mean(torch.where(known.any(dim=-1)[_index(targets)], squares, 0.0), targets)


def prototype_margin(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """max(0, ‖g_c − g_c'‖ − ‖f̄_c − g_c'‖), the mean over the classes c of the batch and all others (FedMR, inter term).

    `prototypes[C, d]` are the g_c, `known[C]` tells which there are; pairs without both cost nothing.
    """
    x, g = features.flatten(1), prototypes.detach()
    members = class_masks(targets, len(known)).to(x.dtype)
    means = members.T @ x / members.sum(dim=0).clamp(min=1).unsqueeze(-1)
    here = (members.sum(dim=0) > 0) & known
    pairs = here.unsqueeze(-1) & known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    shortfall = (_distances(g, g) - _distances(means, g)).clamp(min=0)
    return torch.where(pairs, shortfall, 0.0).sum() / pairs.sum().clamp(min=1)


def _distances(some: Tensor, others: Tensor) -> Tensor:
    """‖a − b‖ of every pair, with a slope of 0 where they coincide."""
    squares = (some.unsqueeze(1) - others).square().sum(dim=-1)
    apart = squares > 0
    return torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0)


def decorrelation(features: Tensor, targets: Tensor) -> Tensor:
    """The mean square of the off-diagonal of XᵀX, over N; X the N standardised features (FedDecorr).

    0 for a batch of one. `targets` only tells which rows pad the batch.
    """
    valid = _valid(targets)
    return _off_diagonal(features, valid.unsqueeze(-1) & valid)


def class_decorrelation(features: Tensor, targets: Tensor) -> Tensor:
    """The same class by class, summed, over the samples of classes that are in the batch twice (FedMR's intra term)."""
    valid = _valid(targets)
    return _off_diagonal(features, (targets.unsqueeze(-1) == targets) & valid.unsqueeze(-1) & valid)


def _off_diagonal(features: Tensor, alike: Tensor) -> Tensor:
    """Σ over groups of rows of the mean square off the diagonal of XᵀX, over the rows used; `alike[B, B]`: one group.

    ‖XᵀX‖ = ‖XXᵀ‖, so no d×d matrix is made.
    """
    x, width = features.flatten(1), features[0].numel()
    together = alike.to(x.dtype)
    size = together.sum(dim=-1, keepdim=True)
    used = size > 1
    centred = x - together @ x / size.clamp(min=1)
    variance = together @ centred.square() / (size - 1).clamp(min=1)
    standard = torch.where(used, centred / (variance + 1e-8).sqrt(), 0.0)
    squares = standard.square()
    whole = ((standard @ standard.transpose(-1, -2)).square() * together).sum()
    diagonal = (squares * (together @ squares)).sum()
    return (whole - diagonal) / max(width * (width - 1), 1) / used.sum().clamp(min=1)


def gravitation(classifiers: Tensor, present: Tensor, attraction: bool = True) -> Tensor:
    """FedGR's server regulariser −Σ_k Σ_{i∈Y_k} (log A + log R), before its weight λ (Eq. 9); without attraction only
    −Σ log R, FedGC's.

    `classifiers[K, C, d]` holds each participant's classification rows, `present[K, C]` whose labels they are.
    A draws row i of client k to the same label's rows elsewhere, R drives it from the other labels' rows; the
    row itself is a constant in its own terms. A label that no other participant owns has no attraction.
    """
    clients, classes, _ = classifiers.shape
    present = present.to(torch.bool)
    same_label = torch.eye(classes, dtype=torch.bool, device=classifiers.device).unsqueeze(1)
    total = classifiers.new_zeros(())
    for k in range(clients):
        row = classifiers[k].detach()
        similarity = torch.einsum("id,zjd->izj", row, classifiers)
        elsewhere = present.clone()
        elsewhere[k] = False
        attracting = elsewhere & same_label  # [C, K, C]: label i of another client
        repelling = elsewhere & ~same_label
        attracted = _masked_lse(similarity, attracting) - _masked_lse(similarity, elsewhere.expand_as(attracting))
        own = (row * row).sum(dim=-1)
        repulsion = own - torch.logaddexp(own, _masked_lse(similarity, repelling))
        has_attraction = present[k] & attracting.flatten(1).any(dim=1)
        has_repulsion = present[k] & repelling.flatten(1).any(dim=1)
        if attraction:
            total = total - torch.where(has_attraction, attracted, 0.0).sum()
        total = total - torch.where(has_repulsion, repulsion, 0.0).sum()
    return total


def _masked_lse(values: Tensor, mask: Tensor) -> Tensor:
    """Log-sum-exp over all but the first axis where `mask`; finite (and to be ignored) where it is empty."""
    mask = mask.flatten(1)
    safe = mask | ~mask.any(dim=1, keepdim=True)
    return values.flatten(1).masked_fill(~safe, -math.inf).logsumexp(dim=1)
