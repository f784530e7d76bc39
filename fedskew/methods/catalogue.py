"""The catalogue of methods: names, papers, parts, and what each costs and reveals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from fnmatch import fnmatch
from typing import TypeVar

from fedskew.errors import UserError, expect, unknown
from fedskew.methods.parts import Objective, Part, ServerRule, Solver
from fedskew.methods.regularisers import Regulariser
from fedskew.methods.stages import Schedule
from fedskew.user_code import user_module


@dataclass(frozen=True)
class Entry:
    """A method as the user picks it by name."""

    name: str
    parts: tuple[type[Part], ...]
    paper: str
    summary: str
    aliases: tuple[str, ...] = ()
    document: str = ""
    """What its file says of it."""

    @property
    def stands_alone(self) -> bool:
        """Whether it is a bound to compare methods with, rather than a method."""
        return any(issubclass(part, Schedule) and part.stands_alone for part in self.parts)

    @property
    def reveals(self) -> str:
        told = [what for part in self.parts if part.reveals != "nothing" for what in part.reveals.split(", ")]
        return ", ".join(dict.fromkeys(told)) or "nothing"

    @property
    def sends(self) -> str:
        if self.stands_alone:
            return ", ".join(part.sends for part in self.parts if part.sends) or "nothing"
        return ", ".join(dict.fromkeys(["model, sample count", *(part.sends for part in self.parts if part.sends)]))

    @property
    def extra_compute(self) -> str:
        return ", ".join(part.extra_compute for part in self.parts if part.extra_compute) or "none"


METHODS: dict[str, Entry] = {}


def is_bound(name: str) -> bool:
    """Whether a method of that name is a bound, which no comparison can win."""
    return name in METHODS and METHODS[name].stands_alone


_ALIASES: dict[str, str] = {}

P = TypeVar("P", bound=type[Part])


def register(
    name: str, *aliases: str, parts: tuple[type[Part], ...], paper: str, summary: str, document: str | None = None
) -> Entry:
    """Enter a method made of `parts` in the catalogue; `document`, or else their module's docstring, tells more."""
    for part in parts:
        check_class(part)
    for spelled in (name, *aliases):
        fit = spelled == spelled.strip().lower() != "" and not {"+", ":"} & set(spelled)
        expect(fit, "a method's name", spelled, "lower-case text without + and :, which have a meaning")
    taken = [n for n in (name, *aliases) if n in METHODS or n in _ALIASES]
    if taken:
        raise UserError(f"method name {taken[0]!r} is taken; choose another")
    if document is None and parts:
        document = sys.modules[parts[0].__module__].__doc__
    entry = Entry(name, parts, paper, summary, aliases, (document or summary).strip())
    METHODS[name] = entry
    _ALIASES.update(dict.fromkeys(aliases, name))
    return entry


def method(name: str, *aliases: str, paper: str = "") -> Callable[[P], P]:
    """Enter a part as a method of its own; the first line of its docstring is the summary."""

    def enter(part: P) -> P:
        register(name, *aliases, parts=(part,), paper=paper, summary=_summary(part))
        return part

    return enter


def find(name: str) -> Entry:
    """The entry of a name or alias, or of a user's own method, named `package.module:Class`."""
    if ":" in name:
        return _users_own(name.strip())
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in METHODS:
        raise unknown("method", name, [*METHODS, *_ALIASES])
    return METHODS[key]


def _users_own(name: str) -> Entry:
    """A part in a module of the user's, or a method that importing the module registers."""
    module, attribute = user_module("method", name, "Class")
    found = getattr(module, attribute, None) or _registered_by(module.__name__, attribute)
    if isinstance(found, Entry):
        return replace(found, name=name, aliases=())
    if found is None:
        raise unknown(f"method in module {module.__name__!r}:", attribute, _parts_in(vars(module)))
    if not isinstance(found, type) or not issubclass(found, Part):
        raise UserError(f"method {name!r} is a {type(found).__name__}; expected a class derived from Objective, say")
    check_class(found)
    return Entry(name, (found,), paper="", summary=_summary(found))


def _registered_by(module: str, name: str) -> Entry | None:
    """The method of that name, if the user's package, not ours, entered it."""
    entry = METHODS.get(_ALIASES.get(name.lower(), name.lower()))
    package = module.partition(".")[0]
    return entry if entry and any(part.__module__.partition(".")[0] == package for part in entry.parts) else None


def _parts_in(names: dict[str, object]) -> list[str]:
    """What one could have meant."""
    return [name for name, value in names.items() if isinstance(value, type) and issubclass(value, Part)]


_HOOKS: tuple[tuple[type[Part], str], ...] = (
    (Objective, "loss"),
    (Schedule, "stages"),
    (Regulariser, "term"),
    (ServerRule, "aggregate"),
)
"""What a part of each kind must have."""


def check_part(part: type[Part]) -> None:
    """Refuse a class whose objects cannot be a part of a method."""
    if not issubclass(part, Objective | Schedule | Regulariser | Solver | ServerRule):
        kinds = "an Objective, Schedule, Regulariser, Solver or ServerRule"
        raise UserError(f"{part.__name__} is no part of a method; expected {kinds}")
    for kind, hook in _HOOKS:
        if issubclass(part, kind) and getattr(part, hook) is getattr(kind, hook):
            raise UserError(f"{part.__name__} has no {hook}(); a part derived from {kind.__name__} needs one")


def check_class(part: type[Part]) -> None:
    """The same for a class that is to be found by name: it must know its own defaults."""
    check_part(part)
    for parameter in fields(part):
        if parameter.default is MISSING and parameter.default_factory is MISSING:
            raise UserError(f"hyper-parameter {parameter.name!r} of {part.__name__} has no default; expected one")


def _summary(part: type[Part]) -> str:
    lines = (part.__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def listing(pattern: str = "*") -> list[Entry]:
    """The entries whose name or alias matches a wildcard pattern, by name."""
    return [
        entry
        for name, entry in sorted(METHODS.items())
        if any(fnmatch(n, pattern.lower()) for n in (name, *entry.aliases))
    ]
