"""The loss terms of the papers, as pure functions of one client's batch.

A client's loss takes the logits `[B, C]` or features `[B, d]` of one batch and returns a scalar. Most losses are means
over the batch. `gravitation`, a term of the server, takes the heads of all participants instead. In float64, the values
match the formulas up to rounding errors, and the gradients are finite in every edge case. Python code never branches on
the value of a tensor, so `torch.func.vmap` can map every loss over many clients.

A target of `IGNORE` (−100, PyTorch's convention) marks a row that pads a short batch. Every loss ignores such rows.
`label_counts` holds the client's number of training samples per class. A class with count 0 is *vacant*. By default, a
class above the mean count n/C is a *majority* class (see `majority_classes`).
"""

from __future__ import annotations

from fedskew.losses.cross_entropies import (
    GammaMode,
    SuppressVariant,
    VacantMode,
    balanced_label_weights,
    balanced_weights,
    batch_class_cross_entropy,
    binary_cross_entropy,
    calibrated_cross_entropy,
    class_probabilities,
    cross_entropy,
    focal_cross_entropy,
    group_cross_entropy,
    logit_suppression,
    margin_cross_entropy,
    own_label_cross_entropy,
    restricted_softmax_cross_entropy,
    smoothed_cross_entropy,
    unbalanced_cross_entropy,
)
from fedskew.losses.divergences import (
    MajorityRule,
    MeanOver,
    TaughtSamples,
    active_experts,
    distillation,
    label_masking_distillation,
    majority_classes,
    not_true_distillation,
    partial_distillation,
    present_distillation,
    target_distillation,
    teacher_free_label_masking,
    teacher_free_not_true,
    vacant_distillation,
)
from fedskew.losses.features import (
    centre_cross_entropy,
    class_decorrelation,
    decorrelation,
    gravitation,
    model_contrast,
    prototype_contrast,
    prototype_distance,
    prototype_margin,
)
from fedskew.task import IGNORE, batch_mean, class_masks, real_rows

__all__ = [
    "IGNORE",
    "GammaMode",
    "MajorityRule",
    "MeanOver",
    "SuppressVariant",
    "TaughtSamples",
    "VacantMode",
    "active_experts",
    "balanced_label_weights",
    "balanced_weights",
    "batch_class_cross_entropy",
    "batch_mean",
    "binary_cross_entropy",
    "calibrated_cross_entropy",
    "centre_cross_entropy",
    "class_decorrelation",
    "class_masks",
    "class_probabilities",
    "cross_entropy",
    "decorrelation",
    "distillation",
    "focal_cross_entropy",
    "gravitation",
    "group_cross_entropy",
    "label_masking_distillation",
    "logit_suppression",
    "majority_classes",
    "margin_cross_entropy",
    "model_contrast",
    "not_true_distillation",
    "own_label_cross_entropy",
    "partial_distillation",
    "present_distillation",
    "prototype_contrast",
    "prototype_distance",
    "prototype_margin",
    "real_rows",
    "restricted_softmax_cross_entropy",
    "smoothed_cross_entropy",
    "target_distillation",
    "teacher_free_label_masking",
    "teacher_free_not_true",
    "unbalanced_cross_entropy",
    "vacant_distillation",
]
