"""Errors for hooks that return the wrong thing. Each is one line that names the hook and what was expected.

What hooks return is checked when a run is prepared, at the beginning and end of a round, or in the first local step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedskew.errors import UserError, did_you_mean, plural


def named_tensors(part: object, hook: str, returned: object) -> dict[str, Tensor]:
    """Return the tensors by name. Raise `UserError` unless `returned` is a mapping from names to tensors."""
    expected = "expected a dict of tensors by name, which may be empty"
    if not isinstance(returned, Mapping):
        raise UserError(f"{_call(part, hook)} returned {_describe(returned)}; {expected}")
    for name, value in returned.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{_call(part, hook)} returned {_describe(value)} as {name!r}; {expected}")
    return dict(returned)


def wrong_number(part: object, hook: str, returned: object) -> UserError:
    """Make the error for a hook that must return a scalar tensor from which a gradient can be computed."""
    what = _call(part, hook)
    if not isinstance(returned, Tensor):
        return UserError(f"{what} returned {_describe(returned)}; expected a tensor with one number, such as a mean")
    if returned.dim():
        shape = "×".join(map(str, returned.shape))
        return UserError(f"{what} returned a tensor of shape {shape}; expected one number, such as a mean")
    return UserError(f"{what} returned a number without a gradient; expected one that is computed from `out.logits`")


def wrong_tensors(
    part: object, hook: str, returned: object, expected: Mapping[str, Tensor], noun: str = "parameter"
) -> UserError:
    """Make the error for a hook that must return one tensor per expected tensor, with its shape and type.

    `noun` says what the expected tensors are.
    """
    what = _call(part, hook)
    if not isinstance(returned, Mapping):
        return UserError(f"{what} returned {_describe(returned)}; expected a dict with a tensor for each {noun}")
    for name, parameter in expected.items():
        if name not in returned:
            return UserError(f"{what} returned no {name!r}; expected a tensor for each of the {noun}s")
        if (found := _describe(returned[name])) != (wanted := _describe(parameter)):
            return UserError(f"{what} returned {found} as {name!r}; expected {wanted}")
    unknown = next(name for name in returned if name not in expected)
    hint = did_you_mean(str(unknown), expected)
    return UserError(f"{what} returned {unknown!r}, which is not a {noun};{hint} expected only the {noun}s")


def wrong_aggregate(part: object, returned: object, sent: Mapping[str, Tensor]) -> UserError:
    """Make the error for a server rule that does not return the next parameters and the next state."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        found = plural(len(returned), "value") if isinstance(returned, tuple | list) else _describe(returned)
        return UserError(
            f"{_call(part, 'aggregate')} returned {found}; expected two: the next parameters and the state"
        )
    for value, noun in zip(returned, ("the next parameters", "the next state"), strict=True):
        if not isinstance(value, Mapping):
            call, found = _call(part, "aggregate"), _describe(value)
            return UserError(f"{call} returned {found} as {noun}; expected a dict of tensors by name")
    return wrong_tensors(part, "aggregate", returned[0], sent)


def wrong_weights(part: object, returned: object, weights: Tensor) -> UserError:
    """Make the error for a weighting that does not return one number per participant."""
    found = _describe(returned)
    numbers = plural(len(weights), "number")
    return UserError(f"{_call(part, 'weigh')} returned {found}; expected a tensor of {numbers}, one per participant")


def invalid_weights(part: object, weights: Tensor) -> UserError:
    """Make the error for weights that are negative or not finite, or whose sum is not a finite number above 0."""
    numbers = weights.tolist()
    expected = "expected finite numbers of 0 or more, with at least one above 0"
    for participant, number in enumerate(numbers):
        if not 0 <= number < float("inf"):
            return UserError(
                f"{_call(part, 'weigh')} returned {number:g} as the weight of participant {participant}; {expected}"
            )
    return UserError(f"{_call(part, 'weigh')} returned weights whose sum is {sum(numbers):g}; {expected}")


def wrong_tally(part: object, returned: Mapping[str, Tensor]) -> UserError:
    """Make the error for a tally that is not one number per name."""
    name, value = next((name, value) for name, value in returned.items() if value.dim())
    return UserError(f"{_call(part, 'tally')} returned {_describe(value)} as {name!r}; expected one number")


def wrong_perturbation(part: object, returned: object, features: Tensor) -> UserError:
    """Make the error for perturbed features that are not a tensor with the shape of the features."""
    what, expected = _call(part, "perturbed"), _describe(features)
    return UserError(f"{what} returned {_describe(returned)}; expected {expected}, like the features")


def undeclared_state(part: object, name: str) -> UserError:
    """Make the error for a `next_state` with a tensor that `client_state` does not declare."""
    return UserError(f"{_call(part, 'next_state')} returned {name!r}; expected only names that client_state() returns")


def wrong_state(part: object, name: str, returned: Tensor, declared: Tensor) -> UserError:
    """Make the error for a `next_state` with a tensor of another shape or type than `client_state` declares."""
    what, wanted = f"{_call(part, 'next_state')} returned {_describe(returned)} as {name!r}", _describe(declared)
    return UserError(f"{what}; expected {wanted}, as client_state() returns")


ClientTensors = tuple[int, Mapping[str, Tensor]]
"""The number of a client, and what a hook returned for it."""


def different_results(parts: Sequence[object], hook: str, one: ClientTensors, other: ClientTensors) -> UserError:
    """Make the error for a hook whose tensors have other names, shapes or types for one client than for another.

    `parts` have the hook, and at least one of them returned such tensors.
    """
    what = " or ".join(_call(part, hook) for part in parts)
    for (client, tensors), (second, others) in ((one, other), (other, one)):
        if missing := [name for name in tensors if name not in others]:
            return UserError(
                f"{what} returned {missing[0]!r} for client {client}, but not for client {second}; expected the same "
                "names for all clients"
            )
    forms = [{name: _describe(t) for name, t in tensors.items()} for _, tensors in (one, other)]
    name = next(name for name in forms[0] if forms[0][name] != forms[1][name])
    return UserError(
        f"{what} returned {forms[0][name]} as {name!r} for client {one[0]}, but {forms[1][name]} for client "
        f"{other[0]}; expected the same shape and type for all clients"
    )


def without_gradient_call(solver: object) -> UserError:
    """Make the error for a solver that never calls `gradient`. The loss of its step would be unknown."""
    return UserError(f"{_call(solver, 'direction')} did not call gradient(); expected gradient(params) at least once")


def unknown_companion(objective: object, name: str, models: Mapping[str, object]) -> UserError:
    """Make the error for a companion that does not exist."""
    what = _call(objective, "companions")
    if name.startswith("state/"):
        kept = name.removeprefix("state/")
        return UserError(
            f"{what} names {name!r}, but clients keep no model {kept!r}; expected client_state() and next_state() to "
            f"return fedskew.pack({kept!r}, …)"
        )
    choices = ["teacher", *models]
    return UserError(
        f"{what} names {name!r};{did_you_mean(name, choices)} choose from: {', '.join(choices)}, state/NAME"
    )


def wrong_companions(objective: object, returned: object) -> UserError:
    """Make the error for anything but a dict from names of models to their modes."""
    what = _call(objective, "companions")
    for name, mode in returned.items() if isinstance(returned, Mapping) else ():
        if not isinstance(name, str):
            return UserError(f"{what} names {name!r}; expected the name of a model as text, such as 'teacher'")
        if mode not in ("eval", "train"):
            return UserError(f"{what} returned {mode!r} as {name!r}; expected 'eval' or 'train'")
    return UserError(f"{what} returned {_describe(returned)}; expected a dict such as {{'teacher': 'eval'}}")


def wrong_stages(schedule: object, returned: object, kind: type) -> UserError:
    """Make the error for anything but a list of stages, which are objects of the class `kind`."""
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        odd = [entry for entry in returned if not isinstance(entry, kind)]
        found = f"a list with {_describe(odd[0])}" if odd else "an empty list"
    else:
        found = _describe(returned)
    return UserError(f"{_call(schedule, 'stages')} returned {found}; expected a list of at least one fedskew.Stage")


def wrong_stage(schedule: object, stage: str, name: str, value: object, expected: str) -> UserError:
    """Make the error for a stage with a wrong `name`, such as its rounds."""
    return UserError(f"{_call(schedule, 'stages')} returned the stage {stage!r} with {name} {value!r}; {expected}")


def wrong_conclusions(schedule: object, returned: object) -> UserError:
    """Make the error for conclusions that are not a dict of JSON values."""
    what = _call(schedule, "conclude")
    expected = "expected a dict of conclusions by name, with numbers, texts, lists and dicts, as in JSON"
    if not isinstance(returned, Mapping):
        return UserError(f"{what} returned {_describe(returned)}; {expected}")
    name, value = next((name, value) for name, value in returned.items() if not is_json({name: value}))
    return UserError(f"{what} returned {_describe(value)} as {name!r}; {expected}")


def is_json(value: object) -> bool:
    """Return whether a checkpoint can save the value as JSON, with text as the keys at every level."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_json(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _call(part: object, hook: str) -> str:
    return f"{hook}() of {type(part).__name__}"


def _describe(value: object) -> str:
    """Describe a value in a few words: a tensor by type and shape, anything else by its type."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a {kind} tensor of shape {'×'.join(map(str, value.shape)) or '()'}"
    return "None" if value is None else f"a {type(value).__name__}"
