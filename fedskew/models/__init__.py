"""The catalogue's models, each an encoder and a head, and users' own models."""

from __future__ import annotations

from fedskew.models.adapter import ModelAdapter, own_module
from fedskew.models.base import Classifier, DataShape, Field, has_features
from fedskew.models.catalogue import MODELS, ModelEntry, fits, input_kind, make_model, parameter_count
from fedskew.models.custom import adapted_model

__all__ = [
    "MODELS",
    "Classifier",
    "DataShape",
    "Field",
    "ModelAdapter",
    "ModelEntry",
    "adapted_model",
    "fits",
    "has_features",
    "input_kind",
    "make_model",
    "own_module",
    "parameter_count",
]
