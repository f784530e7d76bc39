"""The catalogue's models, each an encoder and a head, and users' own models."""

from __future__ import annotations

from fedskew.models.base import Classifier, DataShape, has_features
from fedskew.models.catalogue import MODELS, ModelEntry, fits, input_kind, make_model, parameter_count
from fedskew.models.custom import check_model

__all__ = [
    "MODELS",
    "Classifier",
    "DataShape",
    "ModelEntry",
    "check_model",
    "fits",
    "has_features",
    "input_kind",
    "make_model",
    "parameter_count",
]
