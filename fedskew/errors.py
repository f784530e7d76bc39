"""User errors: one line that names the value, what was expected and, if there is one, the nearest valid choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class UserError(Exception):
    """A mistake that the user can correct. The command line prints it in one line and exits with status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `value`, ignoring case, or None if none is close."""
    in_lower_case = {choice.lower(): choice for choice in choices}
    close = get_close_matches(value.lower(), list(in_lower_case), n=1, cutoff=0.5)
    return in_lower_case[close[0]] if close else None


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """Return ` did you mean 'X'?` with the nearest choice, or an empty string if none is close."""
    hint = nearest(value, choices)
    return f" did you mean {hint!r}?" if hint else ""


def unknown(kind: str, value: str, choices: Iterable[str]) -> UserError:
    """Make the error for a name that is not among the choices."""
    names = sorted(choices)
    return UserError(f"unknown {kind} {value!r};{did_you_mean(value, names)} choose from: {', '.join(names)}")


def unknown_parameter(owner: str, key: str, known: Sequence[str]) -> UserError:
    """Make the error for a parameter that the owner, such as `method 'fedprox'`, does not have."""
    hint = did_you_mean(key.rpartition(".")[2], known)
    return UserError(f"{owner} has no parameter {key!r};{hint} its parameters: {', '.join(known) or 'none'}")


def expect(is_valid: bool, name: str, value: object, expected: str) -> None:
    """Raise a `UserError` that says what was expected, unless the value is valid."""
    if not is_valid:
        raise UserError(f"{name} is {value!r}; expected {expected}")


def other_format(what: str, found: object, readable: int, otherwise: str = "") -> UserError:
    """Make the error for a file whose format this version does not read.

    `what` names the file. `found` and `readable` are format numbers. `otherwise` is a second piece of advice.
    """
    is_newer = isinstance(found, int) and found > readable
    way_out = "upgrade fedskew" if is_newer else "use the version of fedskew that wrote it"
    return UserError(
        f"{what} has format {found}, and this version of fedskew reads format {readable}; {way_out}"
        + (f", or {otherwise}" if otherwise else "")
    )


def plural(number: int, noun: str) -> str:
    """Return the number and the noun: `1 sample`, `2 samples`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def shorten(names: Sequence[str], max_shown: int = 8) -> str:
    """List the first `max_shown` names in quotes, and count the rest."""
    shown = ", ".join(map(repr, names[:max_shown]))
    return shown + (f" and {len(names) - max_shown} more" if len(names) > max_shown else "")
