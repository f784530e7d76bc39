"""Composition: `fedlmd+fedprox+fedavgm` is FedLMD's objective, FedProx's solver and FedAvgM's server rule.

`make_method` turns such a name, or a user's part, into a `Method`. A method has slots for its parts, such as
`objective` and `server`, and each slot takes at most one part.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedskew.errors import UserError, did_you_mean, unknown_parameter
from fedskew.methods.catalogue import METHODS, Entry, check_part, find
from fedskew.methods.class_weights import ClassWeights
from fedskew.methods.fedavg import SGD, CrossEntropy, Mean
from fedskew.methods.hook_results import is_json, wrong_conclusions
from fedskew.methods.parts import Objective, Part, ServerRule, Solver, Weighting
from fedskew.methods.personal import Personal
from fedskew.methods.regularisers import Regulariser
from fedskew.methods.stages import (
    Calibration,
    Notes,
    Schedule,
    Stage,
    Survey,
    check_stages,
    stage_without_training,
)
from fedskew.methods.wrapped_objectives import ClassWeighted, Regularised


@dataclass(frozen=True)
class Method:
    """A complete method. Slots that its name does not set have FedAvg's parts."""

    name: str
    objective: Objective | Schedule = field(default_factory=CrossEntropy)
    solver: Solver = field(default_factory=SGD)
    server: ServerRule = field(default_factory=Mean)
    regulariser: Regulariser | None = None
    weighting: Weighting | None = None
    """If None, the stage's `average` determines the weights, or the run's `average` if the stage has none."""
    class_weights: ClassWeights | None = None
    """The weights of the classes in the cross entropy. The run's setting `class_weights` sets them."""
    personal: Personal | None = None
    """If None, clients send the whole model, and keep none of it."""
    calibration: Calibration | None = None
    """The server rule of the last round. If None, the last round is like the others."""

    def stages(self, rounds: int, local_epochs: int, notes: Notes) -> list[Stage]:
        """Return the stages known so far. A method without a schedule or calibration has one stage."""
        if isinstance(self.objective, Schedule):
            stages = check_stages(self.objective, self.objective.stages(rounds, local_epochs, notes), self.name)
            return [self._complete(stage) for stage in stages]
        if self.calibration is None:
            return [self._complete(Stage("train", rounds, self.objective))]
        last = stage_without_training("calibration", self.calibration)
        return [self._complete(Stage("train", rounds - 1, self.objective)), last]

    def for_stage(self, stage: Stage) -> Method:
        """Return the method with the stage's server rule. If no client trains, use plain SGD and no weighting."""
        changed = replace(self, server=stage.server or self.server)
        return replace(changed, solver=SGD(), weighting=None) if stage.local_epochs == 0 else changed

    def _complete(self, stage: Stage) -> Stage:
        """Add class weights and regulariser to the stage's objective."""
        objective = stage.objective
        if self.class_weights is not None:
            objective = ClassWeighted(objective, self.class_weights)
        if self.regulariser is not None:
            objective = Regularised(objective, self.regulariser)
        return stage if objective is stage.objective else replace(stage, objective=objective)

    def conclude(self, stage: Stage, survey: Survey) -> Notes:
        """Return what the schedule concludes from the survey at the end of `stage`."""
        if not isinstance(self.objective, Schedule):
            return {}
        concluded: object = self.objective.conclude(stage, survey)  # a user's schedule may return anything
        if not isinstance(concluded, Mapping) or not is_json(dict(concluded)):
            raise wrong_conclusions(self.objective, concluded)
        return dict(concluded)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in order: objective or schedule, regulariser, solver, personal, weighting, calibration, server.

        Regulariser, personal part, weighting and calibration are optional.
        """
        return tuple(getattr(self, slot) for slot, _ in _SLOTS if getattr(self, slot) is not None)

    @property
    def members(self) -> tuple[Part, ...]:
        """The parts, with each composed part split into its members, and the class weights if there are any."""
        members = tuple(member for part in self.parts for member in part.members)
        return members if self.class_weights is None else (*members, self.class_weights)

    @property
    def head(self) -> str:
        """The kind of head that the objective chooses. Empty if it chooses none."""
        return next((member.head for member in self.members if isinstance(member, Objective) and member.head), "")

    @property
    def params(self) -> dict[str, object]:
        """Every hyper-parameter and its value, defaults included, as `make_method` accepts them.

        A name that two parts share is prefixed with the slot, as in `server.beta`.
        """
        named = [(slot_name(type(part)), f.name, part) for part in self.parts for f in fields(part)]
        owners = Counter(name for _, name, _ in named)
        return {f"{slot}.{name}" if owners[name] > 1 else name: getattr(part, name) for slot, name, part in named}


_SLOTS: tuple[tuple[str, tuple[type[Part], ...]], ...] = (
    ("objective", (Objective, Schedule)),
    ("regulariser", (Regulariser,)),
    ("solver", (Solver,)),
    ("personal", (Personal,)),
    ("weighting", (Weighting,)),
    ("calibration", (Calibration,)),  # before the server rule, because it is one
    ("server", (ServerRule,)),
)
"""The slots, in the order of a method's name, with the kinds of parts that each takes."""
_ORDER = [slot for slot, _ in _SLOTS]


def make_method(name: str | Method | Part, params: Mapping[str, Any] | None = None) -> Method:
    """Make the method that `name` describes, such as `fedvls+fedsam`, with the hyper-parameters `params`.

    If two parts have a hyper-parameter of the same name, write `METHOD.NAME` or `SLOT.NAME`. The name of the result
    lists the methods in a fixed order (objective, regulariser, solver, personal part, weighting, calibration, server
    rule), whatever the order in `name`.
    """
    if not isinstance(name, str):
        return _from_object(name, params)
    entries = [find(single) for single in name.split("+")]
    _check_stands_alone(entries, name)
    chosen: dict[str, tuple[Entry, Part]] = {}
    for entry in entries:
        for part in entry.parts:
            slot = slot_name(part)
            if slot in chosen:
                raise UserError(
                    f"{chosen[slot][0].name!r} and {entry.name!r} both set the {slot}, so they cannot be combined; "
                    f"drop one of them from {name!r}"
                )
            chosen[slot] = (entry, part())
    _check_stages(chosen, name)
    _check_heads(entries, name)
    _set_parameters(name, chosen, dict(params or {}))
    canonical = "+".join(entry.name for entry in _sort_entries(entries))
    return Method(name=canonical, **{slot: part for slot, (_, part) in chosen.items()})  # type: ignore[arg-type]


def canonical_name(name: str) -> str:
    """Return the name in its fixed order (`fpl+fedvls` is `fedvls+fpl`). An invalid name is returned unchanged."""
    try:
        return make_method(name).name
    except UserError:
        return name


def _sort_entries(entries: list[Entry]) -> list[Entry]:
    """Sort by slot, and drop FedAvg, which sets nothing, unless it is the only one."""
    with_parts = [entry for entry in entries if entry.parts] or entries[:1]
    return sorted(with_parts, key=lambda entry: min((_ORDER.index(slot_name(part)) for part in entry.parts), default=0))


def combined_entry(name: str) -> Entry:
    """Return one entry that describes the combination of the methods joined by + in `name`."""
    method = make_method(name)  # refuses methods that do not combine
    entries = _sort_entries([find(single) for single in name.split("+")])
    return Entry(
        method.name,
        tuple(part for entry in entries for part in entry.parts),
        paper="; ".join(entry.paper for entry in entries if entry.paper),
        summary=" ".join(entry.summary for entry in entries),
        document="\n\n".join(entry.document or entry.summary for entry in entries),
    )


def _check_stands_alone(entries: list[Entry], name: str) -> None:
    """Refuse combinations with a reference bound, or with a method in which no client trains."""
    if len(entries) < 2:
        return
    bounds = [entry for entry in entries if entry.stands_alone]
    closed_forms = [entry for entry in entries if not entry.trains_clients]
    for entry in (*bounds, *closed_forms):
        reason = "is a reference bound, not a federated method" if entry in bounds else "trains no client"
        raise UserError(
            f"{entry.name!r} {reason}, so it cannot be combined; use {entry.name!r} alone instead of {name!r}"
        )


def _check_stages(chosen: Mapping[str, tuple[Entry, Part]], name: str) -> None:
    """Refuse two parts that set the stages, and a personal part beside stages."""
    staged = [entry.name for entry, part in chosen.values() if isinstance(part, Schedule | Calibration)]
    if len(staged) > 1:
        raise UserError(
            f"{staged[0]!r} and {staged[1]!r} both set the stages of a run, so they cannot be combined; drop one of "
            f"them from {name!r}"
        )
    if staged and "personal" in chosen:
        personal = chosen["personal"][0].name
        raise UserError(
            f"{staged[0]!r} runs in stages, so it cannot be combined with {personal!r}: a run in stages has no "
            f"personal tensors; drop one of them from {name!r}"
        )


def _check_heads(entries: list[Entry], name: str) -> None:
    """Refuse a part that needs a linear head beside an objective that chooses another kind."""
    choosing = next((entry for entry in entries if entry.head), None)
    needing = next((entry for entry in entries if entry.needs_linear_head), None)
    if choosing is not None and needing is not None:
        raise UserError(
            f"{needing.name!r} needs a linear head, but {choosing.name!r} chooses the head {choosing.head!r}, so they "
            f"cannot be combined; drop one of them from {name!r}"
        )


def _from_object(given: object, params: Mapping[str, Any] | None) -> Method:
    """Make a method from a user's `Method` or part, which already has its hyper-parameters."""
    if not isinstance(given, Method | Part):
        raise UserError(f"method is {given!r}; expected a name, or an object such as FedVLS(distill_weight=0.5)")
    if params:
        raise UserError(f"parameter {next(iter(params))!r} was given with a method object; set it on the object")
    if isinstance(given, Method):
        return given
    check_part(type(given))
    registered = (entry.name for entry in METHODS.values() if entry.parts == (type(given),))
    name = next(registered, type(given).__name__.lower())
    return Method(name, **{slot_name(type(given)): given})  # type: ignore[arg-type]


def slot_name(part: type[Part]) -> str:
    """Return the slot of `Method` that a part of this class fills."""
    return next(slot for slot, kinds in _SLOTS if issubclass(part, kinds))


def has_parameter(name: str, key: str) -> bool:
    """Return whether a part of the method `name` has the hyper-parameter `key`, written as for `make_method`."""
    parts = {slot_name(part): (entry, part) for entry in map(find, name.split("+")) for part in entry.parts}
    return bool(_slots_with(parts, key))


def _slots_with(parts: Mapping[str, tuple[Entry, Part | type[Part]]], key: str) -> list[str]:
    """Return the slots whose parts have this hyper-parameter. A slot or method may precede its name: `solver.mu`."""
    owner, _, name = key.rpartition(".")
    return [
        slot
        for slot, (entry, part) in parts.items()
        if name in {f.name for f in fields(part)} and owner in ("", slot, entry.name, *entry.aliases)
    ]


def _set_parameters(name: str, chosen: dict[str, tuple[Entry, Part]], params: dict[str, Any]) -> None:
    """Set each hyper-parameter on the part that has it."""
    for key, value in params.items():
        slots, bare = _slots_with(chosen, key), key.rpartition(".")[2]
        if not slots:
            known = [f.name for _, part in chosen.values() for f in fields(part)]
            raise unknown_parameter(f"method {name!r}", key, known)
        if len(slots) > 1:
            owners = [chosen[slot][0].name for slot in slots]
            owner = owners[0] if len(set(owners)) > 1 else slots[0]  # one method can have both parts
            raise UserError(f"parameter {key!r} belongs to {' and '.join(owners)}; write {owner}.{bare}")
        entry, part = chosen[slots[0]]
        chosen[slots[0]] = (entry, replace(part, **{bare: _coerce(part, bare, value)}))


def _coerce(part: Part, name: str, value: Any) -> Any:
    """Convert `value` to the declared type of the part's field, or raise a `UserError`."""
    kind: type = type(part)
    return _convert(_field_types(kind)[name], value, f"parameter {name!r}")


@cache
def _field_types(part: type) -> dict[str, Any]:
    """Return the declared types of a part's fields. The cache saves evaluating the annotations on every call."""
    return get_type_hints(part)


def _convert(kind: Any, value: Any, what: str) -> Any:
    """Convert `value` to the annotated type `kind`. The error message calls the value `what`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, what)
    if origin is Literal:
        if value in args:
            return value
        hint = did_you_mean(str(value), map(str, args))
        raise UserError(f"{what} is {value!r}; expected one of {', '.join(map(repr, args))}{hint and ';' + hint}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(args[0], v, what) for v in value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(number := float(value)):
                return number
    if kind is str and isinstance(value, str):
        return value
    expected = (
        "a list"
        if origin is tuple
        else {bool: "true or false", int: "a whole number", float: "a finite number"}.get(kind, "text")
    )
    raise UserError(f"{what} is {value!r}; expected {expected}")
