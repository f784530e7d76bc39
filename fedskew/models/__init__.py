"""Models: an encoder and a head each, by name or of the user's own making."""

from __future__ import annotations

from fedskew.models.base import Classifier, Inputs
from fedskew.models.catalogue import MODELS, ModelEntry, fits, input_kind, make_model, parameter_count

__all__ = [
    "MODELS",
    "Classifier",
    "Inputs",
    "ModelEntry",
    "fits",
    "input_kind",
    "make_model",
    "parameter_count",
]
