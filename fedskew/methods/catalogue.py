"""The catalogue of methods: names, papers, parts, and what each costs and reveals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from typing import TypeVar

from fedskew.errors import UserError, expect, unknown
from fedskew.methods.parts import Part


@dataclass(frozen=True)
class Entry:
    """A method as the user picks it by name."""

    name: str
    parts: tuple[type[Part], ...]
    paper: str
    summary: str
    aliases: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, object]:
        """The hyper-parameters of all parts, as they are unless the user says otherwise."""
        return {f.name: getattr(part(), f.name) for part in self.parts for f in fields(part)}

    @property
    def reveals(self) -> str:
        told = [part.reveals for part in self.parts if part.reveals != "nothing"]
        return ", ".join(told) or "nothing"

    @property
    def sends(self) -> str:
        return ", ".join(["model", *(part.sends for part in self.parts if part.sends)])

    @property
    def extra_compute(self) -> str:
        return ", ".join(part.extra_compute for part in self.parts if part.extra_compute) or "none"


METHODS: dict[str, Entry] = {}
_ALIASES: dict[str, str] = {}

P = TypeVar("P", bound=type[Part])


def register(name: str, *aliases: str, parts: tuple[type[Part], ...], paper: str, summary: str) -> Entry:
    """Enter a method made of `parts` in the catalogue."""
    for spelled in (name, *aliases):
        fit = spelled == spelled.strip().lower() != "" and "+" not in spelled
        expect(fit, "a method's name", spelled, "lower-case text without +, which joins methods")
    taken = [n for n in (name, *aliases) if n in METHODS or n in _ALIASES]
    if taken:
        raise UserError(f"method name {taken[0]!r} is taken; choose another")
    entry = Entry(name, parts, paper, summary, aliases)
    METHODS[name] = entry
    _ALIASES.update(dict.fromkeys(aliases, name))
    return entry


def method(name: str, *aliases: str, paper: str = "") -> Callable[[P], P]:
    """Enter a part as a method of its own; the first line of its docstring is the summary."""

    def enter(part: P) -> P:
        summary = (part.__doc__ or "").strip().splitlines()
        register(name, *aliases, parts=(part,), paper=paper, summary=summary[0] if summary else "")
        return part

    return enter


def find(name: str) -> Entry:
    """The entry of a name or alias."""
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in METHODS:
        raise unknown("method", name, [*METHODS, *_ALIASES])
    return METHODS[key]


def listing(pattern: str = "*") -> list[Entry]:
    """The entries whose name or alias matches a wildcard pattern, by name."""
    return [
        entry
        for name, entry in sorted(METHODS.items())
        if any(fnmatch(n, pattern.lower()) for n in (name, *entry.aliases))
    ]
