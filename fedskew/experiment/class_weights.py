"""The setting `class_weights`: read it, and add its weights to a method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedskew.data.csv_files import find_delimiter, read_csv
from fedskew.data.dataset import Dataset
from fedskew.errors import UserError, plural, shorten, unknown
from fedskew.experiment.config.values import read_yaml, weights_by_class
from fedskew.methods import Method
from fedskew.methods.class_weights import (
    BalancedLabelWeights,
    BalancedWeights,
    ClassWeights,
    FederationLabelWeights,
    FederationWeights,
    GivenWeights,
    takes_weights,
)

Setting = str | Mapping[str, float] | None
"""The value of `class_weights`.

`balanced` uses each client's label counts, and `counts` those of the whole federation. Any other value is the path
of a file, weights by class, or None.
"""


def resolve_class_weights(setting: Setting, classes: Sequence[str]) -> str | dict[str, float] | None:
    """Return the weights of a mapping or a file, in the order of the classes.

    Raise `UserError` if a class has no weight, or if a weight belongs to no class. None, `balanced` and `counts` are
    returned unchanged.
    """
    if setting is None or setting in ("balanced", "counts"):
        return setting
    what, weights = "class_weights", setting
    if isinstance(setting, str):
        what = f"class_weights: {setting}"
        weights = _read_file(Path(setting), what, classes)
    assert isinstance(weights, Mapping)
    for name in weights:
        if name not in classes:
            raise UserError(f"{what}: {unknown('class', name, classes)}")
    if missing := [name for name in classes if name not in weights]:
        raise UserError(f"{what}: no weight for {shorten(missing)}; expected one for each of {len(classes)} classes")
    return {name: weights[name] for name in classes}


def with_class_weights(method: Method, setting: Setting, dataset: Dataset) -> Method:
    """Return the method with class weights. `setting` is what `resolve_class_weights` returned."""
    if setting is None:
        return method
    _refuse_unfit(method, setting)
    return replace(method, class_weights=_make_weights(setting, dataset))


def _make_weights(setting: str | Mapping[str, float], dataset: Dataset) -> ClassWeights:
    is_multi_label = dataset.task.name == "multi-label"
    if setting == "balanced":
        return BalancedLabelWeights() if is_multi_label else BalancedWeights()
    if setting == "counts":
        kind = FederationLabelWeights if is_multi_label else FederationWeights
        return kind(len(dataset.classes))
    assert isinstance(setting, Mapping)
    return GivenWeights(tuple(setting[name] for name in dataset.classes))


def _refuse_unfit(method: Method, setting: object) -> None:
    """Raise `UserError` if the method cannot use these weights."""
    given = f"class_weights is {setting!r}" if isinstance(setting, str) else "class_weights is set"
    if not takes_weights(method.objective):
        raise UserError(
            f"{given}, but the loss of method {method.name!r} does not take class weights; expected a method that "
            "trains on a cross entropy, such as fedavg, or your own objective that declares takes_class_weights"
        )
    if method.params.get("weights"):
        raise UserError(
            f"{given}, but method {method.name!r} already has its own parameter 'weights'; expected one of the two"
        )
    if setting == "counts" and any(stage.cohort == "alone" for stage in method.stages(1, 1, {})):
        raise UserError(
            f"class_weights is 'counts', but clients send nothing with method {method.name!r}; "
            "expected balanced, or weights by class"
        )


def _read_file(path: Path, what: str, classes: Sequence[str]) -> dict[str, float]:
    """Read weights by class from a file."""
    if path.suffix.lower() == ".csv":
        return _read_csv(path, what, classes)
    content = _read_json(path, what) if path.suffix.lower() == ".json" else read_yaml(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{what}: expected a mapping of classes to weights, such as {{{classes[0]}: 1.5}}")
    return weights_by_class(what, content)


def _read_json(path: Path, what: str) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, what))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{what}: not JSON ({error})") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _read_csv(path: Path, what: str, classes: Sequence[str]) -> dict[str, float]:
    """Read two columns, class and weight. A first row that names them is skipped."""
    if not path.is_file():
        raise UserError(f"cannot read {path}: {'it is not a file' if path.exists() else 'no such file'}")
    rows = [(line, [cell.strip() for cell in cells]) for line, cells in read_csv(path, find_delimiter(path))]
    for line, cells in rows:
        if len(cells) != 2:
            raise UserError(f"{what}: line {line} has {plural(len(cells), 'cell')}; expected two: class,weight")
    if rows and rows[0][1][0] not in classes and rows[0][1][1].lower().startswith("weight"):
        rows = rows[1:]
    return weights_by_class(what, _unique([(name, weight) for _, (name, weight) in rows], what))


def _unique(pairs: Sequence[tuple[str, object]], what: str) -> dict[str, object]:
    """Make a dictionary of these pairs. Refuse a class that occurs twice."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"{what}: class {name!r} is repeated; expected one weight per class")
        found[name] = value
    return found
