"""What clients keep between their rounds, off the device, paged in when a client is drawn.

A method with state has one model per client: far more than a device holds, and most of it idle. A run without a
folder keeps it in the host's memory, a run with one on disk (`client_files`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedskew.methods.parts import Tensors

Versions = Mapping[str, Mapping[int, int]]
"""By model and client: the round that its state is of."""


class ClientStates(Protocol):
    """The states after some round; a round makes others and leaves these as they are."""

    @property
    def versions(self) -> Versions:
        """Whose states there are."""
        ...

    def of(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        """What each of the clients keeps for this model, on the host; nothing if it never took part."""
        ...

    def updated(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        """The same with these clients' states, which are copied, as of `round`."""
        ...


class HeldStates:
    """States in the host's memory."""

    def __init__(self, held: Mapping[str, Mapping[int, tuple[int, Tensors]]] | None = None) -> None:
        self._held = held or {}

    @property
    def versions(self) -> Versions:
        return {model: {client: number for client, (number, _) in of.items()} for model, of in self._held.items()}

    def of(self, model: str, clients: Sequence[int]) -> list[Tensors]:
        held = self._held.get(model, {})
        return [held[client][1] if client in held else {} for client in clients]

    def updated(self, model: str, round: int, states: Mapping[int, Tensors]) -> ClientStates:
        copies = {client: (round, {name: t.clone() for name, t in state.items()}) for client, state in states.items()}
        return HeldStates({**self._held, model: {**self._held.get(model, {}), **copies}})
