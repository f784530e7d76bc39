"""Which methods combine: a table by kind, for the documentation.

What a method sets decides alone what it combines with: one objective or list of stages, one regulariser, one solver,
one server rule. So the table is of kinds of methods, and a list says which methods are of each kind.
"""

from __future__ import annotations

from fedskew.methods.catalogue import METHODS, Entry
from fedskew.methods.composition import slot_of
from fedskew.methods.parts import Part
from fedskew.methods.stages import Schedule

BOUND = "bound"
_ORDER = ("objective", "stages", "regulariser", "solver", "server rule")


def kind(entry: Entry) -> str:
    """What the method sets, in words."""
    if entry.stands_alone:
        return BOUND
    names = {_name(part) for part in entry.parts}
    return " and ".join(sorted(names, key=_ORDER.index)) or "nothing"


def _name(part: type[Part]) -> str:
    if issubclass(part, Schedule):
        return "stages"
    slot = slot_of(part)
    return "server rule" if slot == "server" else slot


def clash(first: str, second: str) -> str:
    """Why methods of these kinds do not combine; empty if they do."""
    if BOUND in (first, second):
        return "a bound stands alone"
    both = _slots(first) & _slots(second)
    return f"both set the {' and the '.join(sorted(both))}" if both else ""


def _slots(kind: str) -> set[str]:
    """Stages take the place of the objective."""
    if kind == "nothing":
        return set()
    return {"objective" if part == "stages" else part for part in kind.split(" and ")}


def _place(kind: str) -> tuple[bool, int, int, str]:
    """Where a kind stands in the table: those that set one thing first, bounds last."""
    return kind == BOUND, kind.count(" and "), _ORDER.index(kind) if kind in _ORDER else -1, kind


def table() -> str:
    """In Markdown."""
    kinds: dict[str, list[str]] = {}
    for name, entry in sorted(METHODS.items()):
        kinds.setdefault(kind(entry), []).append(name)
    names = sorted(kinds, key=_place)
    lines = ["| sets | methods |", "|---|---|"]
    lines += [f"| {name} | {', '.join(f'`{method}`' for method in kinds[name])} |" for name in names]
    lines += ["", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| **{one}** | {' | '.join(clash(one, other) or '✓' for other in names)} |" for one in names]
    return "\n".join(lines) + "\n"
