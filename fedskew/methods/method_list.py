"""`fedskew.methods()` returns the catalogue as a list that can be searched and shown as a table.

Nothing is registered here. Each method registers itself in its own file, with `method` or `register` of `catalogue.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from fedskew.display import data_frame, html_table, text_table
from fedskew.errors import UserError
from fedskew.methods.catalogue import Entry, find, matching_entries
from fedskew.methods.parts import Objective, Part, ServerRule
from fedskew.methods.personal import Personal
from fedskew.methods.stages import Schedule


def methods(pattern: str = "*") -> MethodList:
    """List the methods whose name or alias matches a pattern such as `fed*`."""
    return MethodList(matching_entries(pattern))


class MethodList(Sequence[Entry]):
    """A list of methods: `for entry in methods()`, `methods()["fedvls"]`, `"fedvls" in methods()`."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = list(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __contains__(self, method: object) -> bool:
        return any(method in (entry, entry.name, *entry.aliases) for entry in self._entries)

    @overload
    def __getitem__(self, key: int | str) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> MethodList: ...
    def __getitem__(self, key: int | str | slice) -> Entry | MethodList:
        if isinstance(key, slice):
            return MethodList(self._entries[key])
        return find(key) if isinstance(key, str) else self._entries[key]

    def __repr__(self) -> str:
        return text_table(self._short_records()) if self._entries else "no methods"

    def _repr_html_(self) -> str:
        return html_table(self._records()) if self._entries else "no methods"

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per method."""
        if not self._entries:
            raise UserError("the list has no methods; a table needs at least one")
        return data_frame(self._records())

    def _records(self) -> list[dict[str, object]]:
        return [
            {
                "name": entry.name,
                "aliases": ", ".join(entry.aliases),
                "kind": ", ".join(entry.kinds),
                "summary": entry.summary,
                "paper": entry.paper,
                "needs": needs(entry),
                "sends": entry.sends,
                "reveals": entry.revealed,
                "extra compute": entry.extra_compute,
                "secure aggregation": "yes" if entry.secure_aggregation else "no",
                "example-level privacy": "yes" if entry.example_privacy else "no",
            }
            for entry in self._entries
        ]

    def _short_records(self) -> list[dict[str, object]]:
        columns = ("name", "paper", "needs", "reveals")
        return [{key: record[key] for key in columns} for record in self._records()]


def needs(entry: Entry) -> str:
    """List what a method needs: stages, features, a teacher, server data or client state.

    Return `nothing` if it needs none of these.
    """
    found = [need for part in entry.parts for need in _part_needs(part)]
    return ", ".join(dict.fromkeys(found)) or "nothing"


def _part_needs(part: type[Part]) -> Iterator[str]:
    if issubclass(part, Schedule):
        yield "stages"
    if part.needs_features:
        yield "features"
    if issubclass(part, Objective) and "teacher" in part().companions():
        yield "teacher"
    if issubclass(part, ServerRule) and part.needs_server_data:
        yield "server data"
    if part.client_state is not Part.client_state or (issubclass(part, Personal) and _keeps_trained_tensors(part())):
        yield "client state"


def _keeps_trained_tensors(part: Personal) -> bool:
    """Whether clients keep, from one round to the next, tensors that they have trained."""
    trains_own = bool(part.keeps()) and any(phase.trains != "shared" for phase in part.phases())
    return trains_own or part.own_solver() is not None
