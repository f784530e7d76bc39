"""What a round costs depends on who takes part, not on how many clients there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_runs import advance, image_federation, linear, server

from fedskew.data.federation import Federation
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods.parts import Tensors

CLIENTS, TAKING_PART = 5000, 4


class Watched(np.ndarray):
    """Notes which slices are looked up, and refuses anything else."""

    looked_up: list[tuple[int, int]]

    def __getitem__(self, key: Any) -> Any:
        assert isinstance(key, slice), "a walk through all clients"
        self.looked_up.append((key.start, key.stop))
        return np.asarray(super().__getitem__(key))


def watched_federation() -> tuple[Federation, Watched]:
    toy = image_federation(((2, 1, 1, 1),) * 10)
    federation = Federation(toy.dataset, tuple(toy.indices[client % 10] for client in range(CLIENTS)), {}, 0)
    for once in (federation.sizes, federation.populated, federation.label_counts):
        assert len(once) == CLIENTS
    watched = federation.samples.view(Watched)
    watched.looked_up = []
    federation.joined_indices.samples = watched
    return federation, watched


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_round_looks_up_those_who_take_part_alone(engine: str) -> None:
    federation, watched = watched_federation()
    this = server(federation, "fedavg", linear(), engine=engine, clients_per_round=TAKING_PART, rounds=3)
    state = this.start()
    for _ in range(3):
        watched.looked_up.clear()
        state, row = advance(this, state)
        ends = np.cumsum(federation.sizes)
        assert watched.looked_up == [(ends[c] - federation.sizes[c], ends[c]) for c in row.clients]
        assert len(row.clients) == TAKING_PART


def test_a_round_reads_and_writes_the_states_of_those_who_take_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = image_federation(((2, 1, 1, 1),) * 10)
    this = server(federation, "scaffold", linear(), clients_per_round=TAKING_PART, rounds=6)
    with RunFolder(tmp_path).open(this._config) as folder:
        read: list[int] = []
        from_disk = folder._clients.read

        def noted(model: str, client: int, round: int) -> Tensors:
            read.append(client)
            return from_disk(model, client, round)

        monkeypatch.setattr(folder._clients, "read", noted)
        state = this.start(folder.client_states())
        met: set[int] = set()
        for number in range(1, 7):
            before = names(tmp_path)
            read.clear()
            state, row = advance(this, state)
            drawn = set(row.clients)
            assert sorted(read) == sorted(drawn & met)
            assert names(tmp_path) - before == {f"global.client-{c}.round-{number}.safetensors" for c in drawn}
            met |= drawn
        assert len(met) > TAKING_PART


def names(folder: Path) -> set[str]:
    clients = folder / "clients"
    return {path.name for path in clients.iterdir()} if clients.is_dir() else set()
