"""The forms of requests for training and for the surveys of methods.

A site refuses any other form with a short reason, before it uses the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedskew.errors import UserError
from fedskew.flower.wire import MAX_SAMPLES, Facts, is_count, one_line

Check = tuple[Callable[[object], bool], str]
"""Whether a value has the right form, and that form in words."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_yes_or_no(value: object) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_list_of_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(item, int | float) for item in value)


def _or_none(check: Check) -> Check:
    is_right, expected = check
    return lambda value: value is None or is_right(value), f"{expected} or None"


_COUNT: Check = (is_count, f"a whole number from 0 to {MAX_SAMPLES}")
_TEXT: Check = (_is_text, "text")
_FLAG: Check = (_is_yes_or_no, "true or false")
_MAPPING: Check = (_is_mapping, "named values")
_NAMES: Check = (_is_list_of_names, "a list of names")
_PAIR: Check = _or_none((_is_pair, "clip and noise multiplier"))

_TRAINING: Mapping[str, Check] = {
    "run": _TEXT,
    "client": _COUNT,
    "stage": _COUNT,
    "notes": _MAPPING,
    "companions": _NAMES,
    "local": _MAPPING,
    "key": _MAPPING,
    "kept": _or_none(_COUNT),
    "oldest": _COUNT,
    "share_loss": _FLAG,
    "noise": _PAIR,
}
"""What a request for training must have."""
_OPTIONAL: Mapping[str, Check] = {"central_noise": _PAIR, "local_tests": _FLAG, "tests": _or_none(_MAPPING)}
"""What a request for training can have in addition, besides `secure`, which `secure/site.py` checks."""
_TESTS: Mapping[str, Check] = {
    "detail": _TEXT,
    "labels": _or_none((_is_list_of_counts, "a list of labels")),
    "frozen": _NAMES,
    "model": _TEXT,
    "round": _COUNT,
    "notes": _MAPPING,
}
"""What the entry `tests` of a request for training must have."""
_LABEL_SURVEY: Mapping[str, Check] = {"predictions": _FLAG}
_STAGE_SURVEY: Mapping[str, Check] = {
    "client": _COUNT,
    "stage": _COUNT,
    "notes": _MAPPING,
    "local": _MAPPING,
    "key": _MAPPING,
}


def require_training_form(facts: Facts) -> None:
    """Refuse a request for training that lacks a value, or that has a value of another form."""
    _require(facts, _TRAINING, "training")
    _require(facts, {key: check for key, check in _OPTIONAL.items() if key in facts}, "training")
    _require(facts["key"], {"round": _COUNT}, "training")
    if facts.get("tests") is not None:
        _require(facts["tests"], _TESTS, "training")


def require_survey_form(facts: Facts) -> None:
    """Refuse a request for a method's survey that lacks a value, or that has a value of another form.

    A request with a `stage` is for that stage's own survey. Any other request is for label counts and, if `predictions`
    is true, for mean predictions.
    """
    if "stage" in facts:
        _require(facts, _STAGE_SURVEY, "a survey")
        _require(facts["key"], {"round": _COUNT}, "a survey")
        return
    _require(facts, _LABEL_SURVEY, "a survey")
    if "notes" in facts:
        _require(facts, {"notes": _MAPPING}, "a survey")


def _require(facts: Facts, checks: Mapping[str, Check], purpose: str) -> None:
    for key, (is_right, expected) in checks.items():
        if key not in facts:
            raise UserError(f"the server's request for {purpose} lacks {key!r}; expected {expected}")
        if not is_right(facts[key]):
            raise UserError(f"the server sets {key} to {one_line(repr(facts[key]))}; expected {expected}")
