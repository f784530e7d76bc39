"""`fedlmd+fedprox+fedavgm`: one objective (or schedule), one regulariser, one solver, one server rule by name."""

from __future__ import annotations

import contextlib
import math
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedskew.errors import UserError, nearest
from fedskew.methods.catalogue import METHODS, Entry, check_part, find
from fedskew.methods.fedavg import SGD, CrossEntropy, Mean
from fedskew.methods.parts import Objective, Part, ServerRule, Solver
from fedskew.methods.regularisers import Regularised, Regulariser
from fedskew.methods.stages import Notes, Schedule, Stage, Survey


@dataclass(frozen=True)
class Method:
    """A complete method."""

    name: str
    objective: Objective | Schedule = field(default_factory=CrossEntropy)
    solver: Solver = field(default_factory=SGD)
    server: ServerRule = field(default_factory=Mean)
    regulariser: Regulariser | None = None

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> list[Stage]:
        """The stages known so far; one for a method without a schedule."""
        if isinstance(self.objective, Schedule):
            return [self._regularised(stage) for stage in self.objective.stages(rounds, local_epochs, notes)]
        return [self._regularised(Stage("train", rounds, self.objective))]

    def _regularised(self, stage: Stage) -> Stage:
        if self.regulariser is None:
            return stage
        return replace(stage, objective=Regularised(stage.objective, self.regulariser))

    def conclude(self, stage: Stage, survey: Survey) -> Notes:
        """What a surveyed stage taught."""
        return self.objective.conclude(stage, survey) if isinstance(self.objective, Schedule) else {}

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those that it has; `members` are the parts of which these are made."""
        return tuple(getattr(self, slot) for slot, _ in _SLOTS if getattr(self, slot) is not None)

    @property
    def members(self) -> tuple[Part, ...]:
        return tuple(member for part in self.parts for member in part.members)

    @property
    def params(self) -> dict[str, object]:
        """Every hyper-parameter with its value, defaults included; `make_method` takes them back.

        One whose name two parts share is spelled with its slot, as in `server.beta`.
        """
        named = [(slot_of(type(part)), f.name, part) for part in self.parts for f in fields(part)]
        owners = Counter(name for _, name, _ in named)
        return {f"{slot}.{name}" if owners[name] > 1 else name: getattr(part, name) for slot, name, part in named}


_SLOTS: tuple[tuple[str, tuple[type[Part], ...]], ...] = (
    ("objective", (Objective, Schedule)),
    ("regulariser", (Regulariser,)),
    ("solver", (Solver,)),
    ("server", (ServerRule,)),
)
_ORDER = [slot for slot, _ in _SLOTS]


def make_method(name: str | Method | Part, params: Mapping[str, Any] | None = None) -> Method:
    """The method that `name` spells; `params` are its hyper-parameters (`PART.NAME` where two share one).

    Its own name is the same for every order in which its parts can be given: objective, regulariser, solver, server.
    """
    if not isinstance(name, str):
        return _from_object(name, params)
    entries = [find(part) for part in name.split("+")]
    _refuse_beside_others(entries, name)
    chosen: dict[str, tuple[Entry, Part]] = {}
    for entry in entries:
        for part in entry.parts:
            slot = slot_of(part)
            if slot in chosen:
                raise UserError(
                    f"{chosen[slot][0].name!r} and {entry.name!r} both set the {slot}, so they cannot be combined; "
                    f"drop one of them from {name!r}"
                )
            chosen[slot] = (entry, part())
    _assign(name, chosen, dict(params or {}))
    spelled = "+".join(entry.name for entry in _in_order(entries))
    return Method(name=spelled, **{slot: part for slot, (_, part) in chosen.items()})  # type: ignore[arg-type]


def canonical_name(name: str) -> str:
    """What a name that can be spelled in several ways is called everywhere; one that is refused stays as it is."""
    try:
        return make_method(name).name
    except UserError:
        return name


def _in_order(entries: list[Entry]) -> list[Entry]:
    """In the order of what they set; what sets nothing, FedAvg, adds nothing to others."""
    adding = [entry for entry in entries if entry.parts] or entries[:1]
    return sorted(adding, key=lambda entry: min((_ORDER.index(slot_of(part)) for part in entry.parts), default=0))


def joined(name: str) -> Entry:
    """What the methods that `name` joins with + set, send, reveal and cost together."""
    method = make_method(name)  # refuses those that do not combine
    entries = _in_order([find(part) for part in name.split("+")])
    return Entry(
        method.name,
        tuple(part for entry in entries for part in entry.parts),
        paper="; ".join(entry.paper for entry in entries if entry.paper),
        summary=" ".join(entry.summary for entry in entries),
        document="\n\n".join(entry.document or entry.summary for entry in entries),
    )


def _refuse_beside_others(entries: list[Entry], name: str) -> None:
    for entry in entries:
        if entry.stands_alone and len(entries) > 1:
            raise UserError(
                f"{entry.name!r} is a bound, no federated method, so nothing can be combined with it; "
                f"expected {entry.name!r} alone instead of {name!r}"
            )


def _from_object(given: object, params: Mapping[str, Any] | None) -> Method:
    """A method or part that the user made, hyper-parameters and all."""
    if not isinstance(given, Method | Part):
        raise UserError(f"method {given!r}; expected a name, or an object such as FedVLS(distill_weight=0.5)")
    if params:
        raise UserError(f"parameter {next(iter(params))!r} is for a method given by name; set it on the object")
    if isinstance(given, Method):
        return given
    check_part(type(given))
    registered = (entry.name for entry in METHODS.values() if entry.parts == (type(given),))
    name = next(registered, type(given).__name__.lower())
    return Method(name, **{slot_of(type(given)): given})  # type: ignore[arg-type]


def slot_of(part: type[Part]) -> str:
    """The slot of a method that a part of this class fills."""
    return next(slot for slot, kinds in _SLOTS if issubclass(part, kinds))


def _assign(name: str, chosen: dict[str, tuple[Entry, Part]], params: dict[str, Any]) -> None:
    """Set each hyper-parameter on the part that has it."""
    for key, value in params.items():
        owner, _, bare = key.rpartition(".")
        slots = [
            slot
            for slot, (entry, part) in chosen.items()
            if bare in {f.name for f in fields(part)} and owner in ("", slot, entry.name, *entry.aliases)
        ]
        if not slots:
            known = [f.name for _, part in chosen.values() for f in fields(part)]
            hint = nearest(bare, known)
            meant = f" did you mean {hint!r}?" if hint else ""
            listed = ", ".join(known) or "none"
            raise UserError(f"method {name!r} has no parameter {key!r};{meant} its parameters: {listed}")
        if len(slots) > 1:
            owners = [chosen[slot][0].name for slot in slots]
            raise UserError(f"parameter {key!r} belongs to {' and '.join(owners)}; write {owners[0]}.{bare}")
        entry, part = chosen[slots[0]]
        chosen[slots[0]] = (entry, replace(part, **{bare: _coerce(part, bare, value)}))


def _coerce(part: Part, name: str, value: Any) -> Any:
    """`value` as the type that the part's field declares, or a UserError that says what was expected."""
    kind: type = type(part)
    return _fit(_types(kind)[name], value, f"parameter {name!r}")


@cache
def _types(part: type) -> dict[str, Any]:
    """What its fields declare; Python compiles the annotations anew each time."""
    return get_type_hints(part)


def _fit(kind: Any, value: Any, what: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _fit(next(a for a in args if a is not type(None)), value, what)
    if origin is Literal:
        if value in args:
            return value
        hint = nearest(str(value), [str(a) for a in args])
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise UserError(f"{what} is {value!r}; expected one of {', '.join(map(repr, args))}{meant}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fit(args[0], v, what) for v in value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            if math.isfinite(number := float(value)):
                return number
    if kind is str and isinstance(value, str):
        return value
    wanted = (
        "a list"
        if origin is tuple
        else {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
    )
    raise UserError(f"{what} is {value!r}; expected {wanted}")
