"""Every loss term of the papers: pure functions of one client's batch.

Each takes the logits of one batch `[B, C]`, returns a scalar (the mean over the batch), is exact in float64,
differentiable without NaN in every edge case, and free of Python branches on tensor values, so that
`torch.func.vmap` lifts it over many clients.

A target of `IGNORE` (−100, PyTorch's own convention) marks a row that pads a short batch: it counts for
nothing. `label_counts` holds the client's number of training samples per class; a class with count 0 is
*vacant*, one above the mean count n/C is a *majority* class.
"""

from __future__ import annotations

from fedskew.losses.batches import IGNORE, batch_mean, class_masks
from fedskew.losses.classifier_rows import gravitation
from fedskew.losses.cross_entropies import (
    GammaMode,
    VacantMode,
    batch_class_cross_entropy,
    calibrated_cross_entropy,
    cross_entropy,
    focal_cross_entropy,
    group_cross_entropy,
    margin_cross_entropy,
    own_label_cross_entropy,
    restricted_softmax_cross_entropy,
    smoothed_cross_entropy,
    unbalanced_cross_entropy,
)
from fedskew.losses.divergences import (
    distillation,
    label_masking_distillation,
    not_true_distillation,
    present_distillation,
    target_distillation,
    teacher_free_label_masking,
    teacher_free_not_true,
    vacant_distillation,
)
from fedskew.losses.experts import MeanOver, Taught, active_experts, partial_distillation
from fedskew.losses.features import class_decorrelation, decorrelation, model_contrast
from fedskew.losses.label_counts import MajorityRule, class_probabilities, majority_classes
from fedskew.losses.prototypes import centre_cross_entropy, prototype_contrast, prototype_distance, prototype_margin
from fedskew.losses.suppression import SuppressVariant, logit_suppression

__all__ = [
    "IGNORE",
    "GammaMode",
    "MajorityRule",
    "MeanOver",
    "SuppressVariant",
    "Taught",
    "VacantMode",
    "active_experts",
    "batch_class_cross_entropy",
    "batch_mean",
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
    "restricted_softmax_cross_entropy",
    "smoothed_cross_entropy",
    "target_distillation",
    "teacher_free_label_masking",
    "teacher_free_not_true",
    "unbalanced_cross_entropy",
    "vacant_distillation",
]
