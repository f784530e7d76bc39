"""Read YAML, and check the values of single keys.

PyYAML reads the YAML, with two changes: 1e-3 is a number, and a repeated key is an error. A check takes a key and a raw
value. It returns the typed value, or raises a UserError that names the key, the value and what was expected. Text such
as "1e-3" is accepted as a number, because shells pass numbers as text.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from fedskew.errors import UserError, nearest


class _Loader(yaml.SafeLoader):
    """A safe loader that reads YAML 1.2 floats and refuses repeated keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()  # of the keys as written: later, `<<` adds those of another mapping
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is repeated", key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+\Z"),
    list("-+.0123456789"),
)


def parse_yaml(source: str, where: str) -> Any:
    """Parse YAML. Error messages begin with `where`."""
    try:
        return yaml.load(source, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise UserError(f"{where}:{position} {error.problem or error.context}; expected YAML") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        raise UserError(f"{where}: {error}; expected YAML") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested too deeply; expected YAML") from error


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; expected a YAML text file") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_yaml(source, str(path))


Check = Callable[[str, Any], Any]
"""Takes a key and a raw value. Returns the typed value, or raises a UserError."""

_LARGEST = 2**63 - 1
"""The largest int64. numpy and torch store integers as int64 by default."""


def invalid_value(key: str, value: object, expected: str, hint: str | None = None) -> UserError:
    """Make the error for an invalid value."""
    meant = f"; did you mean {hint!r}?" if hint else ""
    return UserError(f"{key} is {value!r}; expected {expected}{meant}")


def integer(minimum: int) -> Check:
    """Accept a whole number of at least `minimum`. 1e2 and 100.0 are 100."""

    def check(key: str, value: Any) -> int:
        number = _number(value)
        if number is None or not math.isfinite(number) or number != int(number) or number < minimum:
            raise invalid_value(key, value, f"a whole number of at least {minimum}")
        if number > _LARGEST:
            raise invalid_value(key, value, f"a whole number of at most {_LARGEST}")
        return int(number)

    return check


def real(
    *, above: float | None = None, at_least: float | None = None, below: float | None = None,
    at_most: float | None = None,
) -> Check:  # fmt: skip
    """Accept a finite number within bounds."""
    bounds = {"above": above, "of at least": at_least, "below": below, "of at most": at_most}
    words = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    expected = f"a finite number {words}".rstrip()

    def check(key: str, value: Any) -> float:
        number = _number(value)
        if (
            number is None
            or not math.isfinite(number)
            or (above is not None and not number > above)
            or (at_least is not None and not number >= at_least)
            or (below is not None and not number < below)
            or (at_most is not None and not number <= at_most)
        ):
            raise invalid_value(key, value, expected)
        return float(number)

    return check


def flag(key: str, value: Any) -> bool:
    """Accept true or false."""
    if not isinstance(value, bool):
        raise invalid_value(key, value, "true or false")
    return value


def text(key: str, value: Any) -> str:
    """Accept a name or a path."""
    if not isinstance(value, str) or not value.strip():
        raise invalid_value(key, value, "a name")
    return value.strip()


def folder(key: str, value: Any) -> Path:
    """Accept the path of a folder, which need not exist."""
    if not isinstance(value, str | PathLike):
        raise invalid_value(key, value, "the path of a folder")
    return Path(value)


_CLASS_NAME = "a name, in quotes if YAML reads it as something else"
"""What a class is expected to be. YAML reads yes as true, for example."""


def label(key: str, value: Any) -> str:
    """Accept the name of a class, which may be a whole number."""
    value = _without_numpy(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise invalid_value(key, value, _CLASS_NAME)
    return text(key, str(value))


def choice(*choices: str) -> Check:
    """Accept one of these words."""

    def check(key: str, value: Any) -> str:
        if value not in choices:
            hint = None if value is None else nearest(str(value), choices)
            raise invalid_value(key, value, f"one of {', '.join(choices)}", hint)
        return str(value)

    return check


def device(key: str, value: Any) -> str:
    """Accept auto, cpu, mps, cuda, cuda:N, a list of GPUs, or cuda:all."""
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|mps|cuda(:\d+|:all)?|cuda:\d+(,cuda:\d+)+", value):
        hint = "cuda" if "gpu" in str(value).lower() else nearest(str(value), ("auto", "cpu", "cuda", "mps"))
        raise invalid_value(key, value, "auto, cpu, mps, cuda, cuda:N, cuda:all or a list such as cuda:0,cuda:1", hint)
    devices = value.split(",")
    if len(set(devices)) < len(devices):
        raise invalid_value(key, value, "each device once")
    return value


def names(key: str, value: Any) -> tuple[str, ...]:
    """Accept a list of names. `crop,flip` is a list of two."""
    if isinstance(value, str):
        value = [name for name in value.split(",") if name.strip()]
    if not isinstance(value, list | tuple):
        raise invalid_value(key, value, "a list of names")
    return tuple(text(key, name) for name in value)


def weights_setting(key: str, value: Any) -> str | dict[str, float]:
    """Accept balanced, counts, the path of a file, or a mapping of classes to weights."""
    if isinstance(value, Mapping):
        return weights_by_class(key, value)
    words = ("balanced", "counts")
    if not isinstance(value, str) or not (value in words or Path(value).suffix.lower() in WEIGHT_FILES):
        expected = f"balanced, counts, a file ({', '.join(WEIGHT_FILES)}) or a mapping of classes to weights"
        raise invalid_value(key, value, expected, nearest(str(value), words))
    return value


WEIGHT_FILES = (".csv", ".json", ".yaml", ".yml")
"""The kinds of files that class weights are read from."""


def weights_by_class(what: str, value: Mapping[Any, Any]) -> dict[str, float]:
    """Check weights by class: finite numbers of at least 0, and at least one above 0. Errors begin with `what`."""
    weights: dict[str, float] = {}
    for name, weight in value.items():
        name = _without_numpy(name)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise invalid_value(f"{what}: a class", name, _CLASS_NAME)
        if str(name) in weights:
            raise UserError(f"{what}: class {str(name)!r} is repeated; expected one weight per class")
        weights[str(name)] = real(at_least=0)(f"{what}: the weight of {str(name)!r}", weight)
    if not any(weights.values()):
        raise invalid_value(what, value, "at least one weight above 0")
    return weights


def optional(check: Check) -> Check:
    """Accept None, or a value that passes `check`."""
    return lambda key, value: None if value is None else check(key, value)


def parameters(key: str, value: Any) -> dict[str, Any]:
    """Accept parameters of a dataset, a partition or a method: finite scalars, text, or lists of them, by name.

    A nested mapping becomes dotted names: {fedprox: {mu: 0.1}} becomes {fedprox.mu: 0.1}.
    """
    if not isinstance(value, dict):
        raise invalid_value(key, value, "a mapping of names to values")
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if not isinstance(name, str) or not name:
            raise invalid_value(f"a name in {key}", name, "text")
        if isinstance(item, dict):
            inner = {f"{name}.{part}": v for part, v in parameters(f"{key}.{name}", item).items()}
        else:
            inner = {name: _check_parameter(f"{key}.{name}", item)}
        repeated = flat.keys() & inner.keys()
        if repeated:
            raise UserError(f"{key}.{min(repeated)} is set twice; expected once")
        flat.update(inner)
    return flat


def _check_parameter(key: str, value: Any) -> Any:
    value = _without_numpy(value)
    if isinstance(value, list | tuple):
        return [_check_parameter(key, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid_value(key, value, "a finite number")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise invalid_value(key, value, "a number, text, true, false or a list of them")
    return value


def _number(value: Any) -> int | float | None:
    """Convert to a number, or return None. true and false are not numbers."""
    value = _without_numpy(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        for convert in (int, float):
            try:
                return _number(convert(value))
            except ValueError:
                continue
        return None
    try:
        return value if abs(value) <= _LARGEST else float(value)
    except OverflowError:
        return math.inf


def _without_numpy(value: Any) -> Any:
    """Return a numpy number as a Python number, which YAML and JSON can store. Other values are not changed."""
    numpy = sys.modules.get("numpy")  # not imported here, because `fedskew --help` does not need it
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value
