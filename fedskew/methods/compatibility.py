"""The tables of docs/combinations.md, which show which methods can be combined.

Whether two methods combine depends on the parts that they set. So the first two tables group the methods by these
parts, instead of listing all pairs. The third lists pairs that are refused only because one method chooses a head and
the other needs a linear one. A few pairs are refused only later, when the model is known.
"""

from __future__ import annotations

from fedskew.methods.catalogue import KINDS, METHODS, Entry

BOUND, CLOSED_FORM = "bound", "head in closed form"
_ORDER = [name for _, name in KINDS]


def kind(entry: Entry) -> str:
    """Name the parts that the method sets, such as `objective and server rule`.

    Reference bounds and heads in closed form are kinds of their own, because they combine with nothing.
    """
    if entry.stands_alone:
        return BOUND
    if not entry.trains_clients:
        return CLOSED_FORM
    return " and ".join(sorted(set(entry.kinds), key=_ORDER.index)) or "nothing"


def clash(first: str, second: str) -> str:
    """Explain why methods of these two kinds do not combine. Return an empty string if they do."""
    if BOUND in (first, second):
        return "bounds do not combine"
    if CLOSED_FORM in (first, second):
        return "nobody trains"
    parts = {*first.split(" and "), *second.split(" and ")}
    if "personal part" in parts and parts & {"stages", "calibration"}:
        return "stages have no personal parts"
    if {"stages", "calibration"} <= parts:
        return "both set the stages"
    both = _slots(first) & _slots(second)
    return f"both set the {' and the '.join(sorted(both))}" if both else ""


def heads_clash(first: Entry, second: Entry) -> bool:
    """Return whether one of these methods needs a linear head and the other chooses another kind."""
    entries = first, second
    return any(entry.head for entry in entries) and any(entry.needs_linear_head for entry in entries)


def _slots(kind: str) -> set[str]:
    """Return the parts that a kind sets. Stages take the place of the objective."""
    if kind == "nothing":
        return set()
    return {"objective" if part == "stages" else part for part in kind.split(" and ")}


def _sort_key(kind: str) -> tuple[bool, bool, int, int, str]:
    """Order kinds by the number of parts that they set, with heads in closed form and bounds at the end."""
    return kind == BOUND, kind == CLOSED_FORM, kind.count(" and "), _ORDER.index(kind) if kind in _ORDER else -1, kind


def markdown_tables() -> str:
    """Return three tables: the methods of each kind, which kinds combine, and the methods whose heads clash."""
    kinds: dict[str, list[str]] = {}
    for name, entry in sorted(METHODS.items()):
        kinds.setdefault(kind(entry), []).append(name)
    names = sorted(kinds, key=_sort_key)
    lines = ["| sets | methods | with secure aggregation | with example-level privacy |", "|---|---|---|---|"]
    for name in names:
        secure = [method for method in kinds[name] if METHODS[method].secure_aggregation]
        private = [method for method in kinds[name] if METHODS[method].example_privacy]
        listed = _listed(kinds[name]), _some(secure, kinds[name]), _some(private, kinds[name])
        lines.append(f"| {name} | {' | '.join(listed)} |")
    lines += ["", f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| **{one}** | {' | '.join(clash(one, other) or '✓' for other in names)} |" for one in names]
    lines += ["", "| chooses the head | is refused with methods that need a linear head |", "|---|---|"]
    for name, entry in sorted(METHODS.items()):
        if refused := _refused_for_its_head(entry):
            lines.append(f"| `{name}` (`{entry.head}`) | {_listed(refused)} |")
    return "\n".join(lines) + "\n"


def _refused_for_its_head(entry: Entry) -> list[str]:
    """If this method chooses a head, list those that do not combine with it only because they need a linear one."""
    return [
        name
        for name, other in sorted(METHODS.items())
        if entry.head and heads_clash(entry, other) and not clash(kind(entry), kind(other))
    ]


def _listed(methods: list[str]) -> str:
    return ", ".join(f"`{method}`" for method in methods)


def _some(chosen: list[str], methods: list[str]) -> str:
    """List the chosen methods, or write `all but` and list the others if they are fewer."""
    others = [method for method in methods if method not in chosen]
    if not others:
        return "all"
    return f"all but {_listed(others)}" if len(others) < len(chosen) else _listed(chosen) or "none"
