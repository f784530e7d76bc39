"""Errors of the user: one line that names the value, what was expected and the nearest valid choice."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake that the user can correct. The command line prints it in one line and exits with status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """Return the valid choice that is most like `value`, if any is close."""
    close = get_close_matches(value.lower(), list(choices), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown(kind: str, value: str, choices: Iterable[str]) -> UserError:
    """Make the error for a name that is not among the choices."""
    names = sorted(choices)
    hint = nearest(value, names)
    meant = f" did you mean {hint!r}?" if hint else ""
    return UserError(f"unknown {kind} {value!r};{meant} choose from: {', '.join(names)}")


def expect(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise a `UserError` unless `ok`."""
    if not ok:
        raise UserError(f"{name} is {value!r}; expected {expected}")
