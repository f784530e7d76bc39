"""The catalogue of methods: their names, papers and parts, and what each sends, reveals and costs.

To add a method, write a file like `fedprox.py` beside this one and import it in `__init__.py`. `parts.py` explains the
hooks. `@method("name")` registers a method with one part, and `register` a method with several. Users can also name
their own class without registering it, as `package.module:Class`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from fnmatch import fnmatch
from typing import TypeVar

from fedskew.errors import UserError, expect, unknown
from fedskew.methods.example_privacy import unprotected_use
from fedskew.methods.parts import Objective, Part, ServerRule, Solver, Weighting, individual_updates_reason
from fedskew.methods.personal import Personal, needs_another_gradient
from fedskew.methods.regularisers import Regulariser
from fedskew.methods.stages import Calibration, Schedule
from fedskew.user_code import import_user_module


@dataclass(frozen=True)
class Entry:
    """A method in the catalogue."""

    name: str
    parts: tuple[type[Part], ...]
    paper: str
    summary: str
    aliases: tuple[str, ...] = ()
    document: str = ""
    """The method's documentation, usually the docstring of its file."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its parts' kinds, or only `bound` for a reference bound."""
        return ("bound",) if self.stands_alone else tuple(_kind(part) for part in self.parts)

    @property
    def stands_alone(self) -> bool:
        """Whether it is a reference bound, not a federated method. Bounds cannot be combined with anything."""
        return any(issubclass(part, Schedule) and part.stands_alone for part in self.parts)

    @property
    def trains_clients(self) -> bool:
        """Whether clients train. Otherwise, they only send statistics, and nothing can be combined with the method."""
        return all(part.trains_clients for part in self.parts if issubclass(part, Schedule))

    @property
    def sends_updates(self) -> bool:
        """Whether clients send updates. With a reference bound, they send samples or nothing."""
        return not self.stands_alone

    @property
    def head(self) -> str:
        """The kind of head that its objective chooses, other than a linear one. Empty if there is none."""
        kinds = (part.head for part in self.parts if issubclass(part, Objective))
        return next((kind for kind in kinds if kind not in ("", "linear")), "")

    @property
    def needs_linear_head(self) -> bool:
        """Whether one of its parts needs a linear head."""
        return any(part.needs_linear_head for part in self.parts)

    @property
    def reveals(self) -> str:
        """What the server learns about a client's labels and features, besides what `UPDATES_REVEAL` says."""
        learned = [item for part in self.parts if part.reveals != "nothing" for item in part.reveals.split(", ")]
        return ", ".join(dict.fromkeys(learned)) or "nothing"

    @property
    def revealed(self) -> str:
        """`reveals` for tables, with "nothing besides updates" in place of "nothing" if clients send updates."""
        return "nothing besides updates" if self.sends_updates and self.reveals == "nothing" else self.reveals

    @property
    def sends(self) -> str:
        """What clients send with this method, besides losses and test results."""
        if not self.sends_updates:
            return ", ".join(part.sends for part in self.parts if part.sends) or "nothing"
        model = next((part.shares for part in self.parts if issubclass(part, Personal)), "model")
        return ", ".join(dict.fromkeys([f"{model}, sample count", *(part.sends for part in self.parts if part.sends)]))

    @property
    def individual_updates_reason(self) -> str:
        """Why the server needs individual updates. Empty if their mean is enough, as in secure aggregation."""
        if self.stands_alone:
            return "is not a federated method"
        return next(filter(None, map(individual_updates_reason, self.parts)), "")

    @property
    def secure_aggregation(self) -> bool:
        """Whether the method works with secure aggregation, in which the server learns only sums of updates."""
        return not self.individual_updates_reason

    @property
    def unprotected_use(self) -> str:
        """How the method uses a client's data besides the clipped gradients of single samples.

        Example-level privacy does not cover this use. Empty if there is none.
        """
        another = "needs one more gradient per step for its personal layers" if self._needs_another_gradient else ""
        return next(filter(None, map(unprotected_use, self.parts)), another)

    @property
    def example_privacy(self) -> bool:
        """Whether the method works with example-level privacy."""
        return not self.unprotected_use

    @property
    def _needs_another_gradient(self) -> bool:
        """Whether the personal layers cost a gradient that the solver does not compute."""
        solvers = [part for part in self.parts if issubclass(part, Solver)]
        personal = [part() for part in self.parts if issubclass(part, Personal)]
        return any(
            needs_another_gradient(part, phase, solver)
            for solver in solvers for part in personal for phase in part.phases()
        )  # fmt: skip

    @property
    def extra_compute(self) -> str:
        """What clients compute besides FedAvg's forward and backward pass per local step, with the default settings."""
        found = [part.extra_compute for part in self.parts if part.extra_compute]
        found += ["1 forward and backward for the personal layers"] if self._needs_another_gradient else []
        return ", ".join(found) or "none"


_REVEAL = "can reveal something about the training data (membership and, to a degree, labels) to everyone who receives"
MODELS_REVEAL = f"Models {_REVEAL} them"
UPDATES_REVEAL = f"Updates and models {_REVEAL} them"


METHODS: dict[str, Entry] = {}
_ALIASES: dict[str, str] = {}

P = TypeVar("P", bound=type[Part])


def is_reference_bound(name: str) -> bool:
    """Return whether `name` is a reference bound, which comparisons show but never rank."""
    return name in METHODS and METHODS[name].stands_alone


def register(
    name: str, *aliases: str, parts: tuple[type[Part], ...], paper: str, summary: str, document: str | None = None
) -> Entry:
    """Add a method to the catalogue. `document` defaults to the docstring of the first part's module."""
    for part in parts:
        check_named_part(part)
    for n in (name, *aliases):
        valid = n == n.strip().lower() != "" and not {"+", ":"} & set(n)
        expected = "lower-case text without spaces at its ends and without + and :, which have a special meaning"
        expect(valid, "a method's name", n, expected)
    taken = [n for n in (name, *aliases) if n in METHODS or n in _ALIASES]
    if taken:
        raise UserError(f"method name {taken[0]!r} is already used; choose another")
    if document is None and parts:
        document = sys.modules[parts[0].__module__].__doc__
    entry = Entry(name, parts, paper, summary, aliases, (document or summary).strip())
    METHODS[name] = entry
    _ALIASES.update(dict.fromkeys(aliases, name))
    return entry


def method(name: str, *aliases: str, paper: str = "") -> Callable[[P], P]:
    """Register the decorated part as a method, under `name` and `aliases`.

    The first line of its docstring is the summary. `paper` says where the method is from.
    """

    def register_part(part: P) -> P:
        register(name, *aliases, parts=(part,), paper=paper, summary=_summary(part))
        return part

    return register_part


def find(name: str) -> Entry:
    """Return the entry for a name or an alias, or for a user's `package.module:Class` or `package.module:name`."""
    if ":" in name:
        return _find_user_method(name.strip())
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in METHODS:
        own = f"; a method of your own needs its module: my_module:{key}" if key else ""
        raise UserError(f"{unknown('method', name, [*METHODS, *_ALIASES])}{own}")
    return METHODS[key]


def _find_user_method(name: str) -> Entry:
    """Import the user's module, and return an entry for the name after the colon: a class or a registered method."""
    module, attribute = import_user_module("method", name, "Class")
    found = getattr(module, attribute, None) or _registered_by(module.__name__, attribute)
    if isinstance(found, Entry):
        return replace(found, name=name, aliases=())
    if found is None:
        raise unknown(f"method in module {module.__name__!r}:", attribute, _parts_in(vars(module)))
    if not isinstance(found, type) or not issubclass(found, Part):
        raise UserError(f"method {name!r} is a {type(found).__name__}; expected a subclass of a part such as Objective")
    check_named_part(found)
    return Entry(name, (found,), paper="", summary=_summary(found))


def _registered_by(module: str, name: str) -> Entry | None:
    """Return the method called `name` if one of its parts is defined in the same package as `module`."""
    entry = METHODS.get(_ALIASES.get(name.lower(), name.lower()))
    package = module.partition(".")[0]
    return entry if entry and any(part.__module__.partition(".")[0] == package for part in entry.parts) else None


def _parts_in(names: dict[str, object]) -> list[str]:
    """List the parts in a module, as suggestions."""
    return [name for name, value in names.items() if isinstance(value, type) and issubclass(value, Part)]


_REQUIRED_HOOKS: tuple[tuple[type[Part], str], ...] = (
    (Objective, "loss"),
    (Schedule, "stages"),
    (Regulariser, "term"),
    (Weighting, "weigh"),
    (ServerRule, "aggregate"),
)
"""The hook that a part of each of these kinds must override."""


def check_part(part: type[Part]) -> None:
    """Raise `UserError` unless the class is a kind of part and has the hook that its kind requires."""
    if not issubclass(part, Objective | Schedule | Regulariser | Solver | Personal | Weighting | ServerRule):
        kinds = "an Objective, Schedule, Regulariser, Solver, Personal, Weighting, Calibration or ServerRule"
        raise UserError(f"{part.__name__} is not a part of a method; expected {kinds}")
    for kind, hook in _REQUIRED_HOOKS:
        if issubclass(part, kind) and getattr(part, hook) is getattr(kind, hook):
            raise UserError(f"{part.__name__} has no {hook}(); a subclass of {kind.__name__} needs one")


def check_named_part(part: type[Part]) -> None:
    """Check a part that users choose by name: `check_part`, and that all its hyper-parameters have defaults."""
    check_part(part)
    for parameter in fields(part):
        if parameter.default is MISSING and parameter.default_factory is MISSING:
            raise UserError(f"hyper-parameter {parameter.name!r} of {part.__name__} has no default; give it one")


KINDS: tuple[tuple[type[Part], str], ...] = (
    (Objective, "objective"),
    (Schedule, "stages"),
    (Regulariser, "regulariser"),
    (Solver, "solver"),
    (Personal, "personal part"),
    (Weighting, "weighting"),
    (Calibration, "calibration"),
    (ServerRule, "server rule"),
)
"""The kinds of parts and their names. `Calibration` comes before `ServerRule`, because it is a subclass."""


def _kind(part: type[Part]) -> str:
    return next(name for kind, name in KINDS if issubclass(part, kind))


def _summary(part: type[Part]) -> str:
    lines = (part.__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def matching_entries(pattern: str = "*") -> list[Entry]:
    """Return the entries whose name or alias matches a wildcard pattern, sorted by name."""
    return [
        entry
        for name, entry in sorted(METHODS.items())
        if any(fnmatch(n, pattern.lower()) for n in (name, *entry.aliases))
    ]
