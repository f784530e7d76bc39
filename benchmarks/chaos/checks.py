"""What must hold after a run with faults: the model, the rounds and the audit logs agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedskew.data import Federation
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.sampler import ClientSampler, IntArray
from fedskew.experiment.round.server import Server
from fedskew.experiment.run import run_prepared
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.chained_log import Entry, read_chain
from fedskew.methods import Stage

TOLERANCE = 1e-6
"""The largest difference from the simulated model, as in tests/flower/test_sites_equal_simulation.py."""


def counted(row: RoundRow, names: Sequence[str]) -> list[int]:
    """The clients whose updates the round's model contains."""
    return [c for c in row.clients if c not in row.diverged and names[c] not in (row.failed or {})]


class _RecordedSampler(ClientSampler):
    """Draws the clients that are recorded for each round."""

    def __init__(self, federation: Federation, config: Config, clients: Mapping[int, list[int]]) -> None:
        super().__init__(federation, config)
        self._clients = clients

    def _draw(self, stage: Stage, model_round: int, federation: Federation) -> IntArray:  # noqa: ARG002
        return np.array(self._clients[model_round], np.int64)


def simulate(folder: RunFolder, config: Config, split: Federation, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Simulate the run with the same participants in each round, and return its model."""
    clients = {row.model_round - 1: counted(row, names) for row in folder.rounds() if row.round}
    prepared = prepare(with_values(config, {"engine": "plain", "device": "cpu"}), split)
    server = Server(split, prepared.method, prepared.model, prepared.config)
    server._planner._sampler = _RecordedSampler(split, prepared.config, clients)
    return dict(run_prepared(prepared, server=server).model.state_dict())


def largest_difference(folder: RunFolder, expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two models. Infinite if a number is not finite."""
    found = load_file(folder.model_path)
    if found.keys() != expected.keys() or not all(bool(t.isfinite().all()) for t in found.values()):
        return float("inf")
    return max(float((found[name].double() - t.double()).abs().max()) for name, t in expected.items())


@dataclass
class Acknowledged:
    """What became of the updates that the server acknowledged, which are those in its audit log."""

    counted: int = 0
    """In a round's model."""
    discarded: int = 0
    """Not used, for a reason that the audit log has."""
    superseded: int = 0
    """Replies of a round that was repeated, because the ServerApp ended or there were too few updates."""
    problems: tuple[str, ...] = ()


def account_for_updates(
    server: Sequence[Entry], sites: Mapping[str, Sequence[Entry]], rows: Sequence[RoundRow]
) -> Acknowledged:
    """Find each update that the server acknowledged, in the rounds or among those with a reason."""
    names, problems, found = list(sites), [], Acknowledged()
    own = {name: {_digest(entry) for entry in entries} for name, entries in sites.items()}
    in_model = {row.round: {names[client] for client in counted(row, names)} for row in rows if row.round}
    last: dict[tuple[int, str], int] = {}
    replies = [(number, e) for number, e in enumerate(server) if e["event"] == "reply" and e.get("kind") == "train"]
    for number, entry in replies:
        last[entry["round"], entry["site"]] = number
    for number, entry in replies:
        round, site = entry["round"], entry["site"]
        if _digest(entry) not in own[site]:
            problems.append(f"the server has an update of {site} in round {round} that {site} never recorded")
        if _is_discarded(server, number, entry):
            found.discarded += 1
        elif _is_repeated(server, number, entry):
            found.superseded += 1
        elif site in in_model.get(round, ()):
            found.counted += 1
        else:
            problems.append(f"the update of {site} in round {round} was acknowledged, but is in no round")
    for round, members in in_model.items():
        for site in sorted(members):
            if (round, site) not in last:
                problems.append(f"round {round} counts {site}, but its update was never acknowledged")
    return replace(found, problems=tuple(problems))


def _digest(entry: Entry) -> str | None:
    tensors: dict[str, Any] = entry.get("tensors") or {}
    return tensors.get("digest")


def _is_discarded(entries: Sequence[Entry], reply: int, entry: Entry) -> bool:
    """Whether the next entry about this site's training says that the update was discarded."""
    for later in entries[reply + 1 :]:
        if later["event"] == "start" or (later["event"] == "request" and later.get("kind") == "train"):
            return False
        if later["event"] == "discarded" and (later.get("site"), later.get("round")) == (entry["site"], entry["round"]):
            return True
    return False


def _is_repeated(entries: Sequence[Entry], reply: int, entry: Entry) -> bool:
    """Whether the sites were asked again to train the same round."""
    requests = (e for e in entries[reply + 1 :] if e["event"] == "request" and e.get("kind") == "train")
    return any(e.get("round") == entry["round"] and entry["site"] in e["sites"] for e in requests)


def read_intact(path: Path, problems: list[str]) -> list[Entry]:
    """Read an audit log. Note a problem if its chain is broken."""
    if not path.exists():
        problems.append(f"{path} does not exist")
        return []
    chain = read_chain(path)
    if chain.problem is not None:
        problems.append(f"{path}: {chain.problem}")
    return list(chain.entries)
