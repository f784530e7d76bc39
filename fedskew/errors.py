"""A user's mistake: one line that names the value, what was expected and the nearest valid choice."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can put right; the command line prints it as one line and exits with status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """The valid choice that `value` was most likely meant to be."""
    close = get_close_matches(value.lower(), list(choices), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown(kind: str, value: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not in a catalogue."""
    names = sorted(choices)
    hint = nearest(value, names)
    meant = f" did you mean {hint!r}?" if hint else ""
    return UserError(f"unknown {kind} {value!r};{meant} choose from: {', '.join(names)}")


def expect(ok: bool, name: str, value: object, expected: str) -> None:
    """Refuse a value that is out of range."""
    if not ok:
        raise UserError(f"{name} is {value!r}; expected {expected}")
