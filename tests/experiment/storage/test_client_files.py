"""Client states on disk: each kept checkpoint finds those of its own round, whatever was written or killed after."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import ClientStates, StatesInMemory
from fedskew.experiment.storage.checkpoints import ClientFiles
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods.parts import Tensors

CONFIG = Config(rounds=9)
DRAWN = {1: (0, 1), 2: (1, 2), 3: (0, 2), 4: (1,), 5: (0, 1), 6: (2,)}
"""Who takes part in each round."""


def state(client: int, round_: int) -> Tensors:
    return {"control/w": torch.tensor([client + round_ / 7]), "steps": torch.tensor(round_)}


def advanced(clients: ClientStates, round_: int, model: str = "global") -> ClientStates:
    return clients.write(model, round_, {client: state(client, round_) for client in DRAWN[round_]})


def last(client: int, round_: int) -> int | None:
    return max((number for number in DRAWN if number <= round_ and client in DRAWN[number]), default=None)


def assert_as_of(clients: ClientStates, round_: int) -> None:
    for client in range(3):
        number = last(client, round_)
        (kept,) = clients.read("global", [client])
        expected = {} if number is None else state(client, number)
        assert kept.keys() == expected.keys()
        assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())


def play(folder: RunFolder, clients: ClientStates, first: int, through: int, every: int = 1) -> ClientStates:
    for number in range(first, through + 1):
        clients = advanced(clients, number)
        folder.append_round(RoundRow(round=number))
        if number % every == 0:
            folder.save_checkpoint(number, {"w": torch.zeros(1)}, {}, clients.versions)
    return clients


def files(path: Path) -> list[str]:
    found = (path / "clients").glob("global.*.safetensors")
    return sorted(file.name.removeprefix("global.").removesuffix(".safetensors") for file in found)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_states_are_a_value(where: str, tmp_path: Path) -> None:
    """A round makes new ones; those of every earlier round stay what they were."""
    clients: ClientStates = StatesInMemory() if where == "memory" else ClientFiles(tmp_path / "c").resume({}, "run")
    history = [clients]
    for number in DRAWN:
        history.append(advanced(history[-1], number))
    for number, then in enumerate(history):
        assert_as_of(then, number)
        assert {c: last(c, number) for c in range(3) if last(c, number)} == then.versions.get("global", {})


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_states_are_copied_and_belong_to_one_model(where: str, tmp_path: Path) -> None:
    clients: ClientStates = StatesInMemory() if where == "memory" else ClientFiles(tmp_path / "c").resume({}, "run")
    stacked = torch.arange(3.0)
    after = clients.write("a/b %.client-1", 1, {5: {"w": stacked[1]}})
    stacked += 1
    assert after.read("a/b %.client-1", [5])[0]["w"] == 1
    assert after.read("global", [5]) == [{}]
    assert clients.read("a/b %.client-1", [5]) == [{}]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("killed", DRAWN)
def test_a_run_killed_after_any_round_goes_on_with_the_states_of_its_checkpoint(
    killed: int, every: int, tmp_path: Path
) -> None:
    with RunFolder(tmp_path / "whole").open(CONFIG) as folder:
        play(folder, folder.client_states(), 1, 6, every)
    with RunFolder(tmp_path / "run").open(CONFIG) as folder:
        play(folder, folder.client_states(), 1, killed, every)
    with RunFolder(tmp_path / "run").open(CONFIG) as folder:
        checkpoint = folder.load_checkpoint()
        done = checkpoint.round if checkpoint else 0
        assert done == killed // every * every
        folder.truncate_rounds(done)
        clients = folder.client_states(checkpoint.clients if checkpoint else None)
        assert_as_of(clients, done)
        clients = play(folder, clients, done + 1, 6, every)
        assert_as_of(clients, 6)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["checkpoint", "client"])
def test_without_the_last_checkpoint_or_one_of_its_states_the_one_before_serves(damage: str, tmp_path: Path) -> None:
    with RunFolder(tmp_path).open(CONFIG) as folder:
        play(folder, folder.client_states(), 1, 5)
    if damage == "checkpoint":
        (tmp_path / "checkpoint" / "round-000005.safetensors").write_bytes(b"")
    else:
        (tmp_path / "clients" / "global.client-1.round-5.safetensors").unlink()
    with RunFolder(tmp_path).open(CONFIG) as folder:
        checkpoint = folder.load_checkpoint()
        assert checkpoint is not None
        assert checkpoint.round == 4
        assert len(folder.warnings) == 1
        folder.truncate_rounds(4)
        clients = folder.client_states(checkpoint.clients)
        assert_as_of(clients, 4)
        assert files(tmp_path) == ["client-0.round-3", "client-1.round-4", "client-2.round-3"]
        assert_as_of(play(folder, clients, 5, 6), 6)


def test_only_what_the_kept_checkpoints_name_stays(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open(CONFIG) as folder:
        clients = play(folder, folder.client_states(), 1, 3)
        assert files(tmp_path) == [
            "client-0.round-1", "client-0.round-3", "client-1.round-2", "client-2.round-2", "client-2.round-3",
        ]  # fmt: skip
        play(folder, clients, 4, 6)
    assert files(tmp_path) == ["client-0.round-5", "client-1.round-5", "client-2.round-3", "client-2.round-6"]


def test_a_run_that_starts_again_keeps_no_states(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open(CONFIG) as folder:
        play(folder, folder.client_states(), 1, 3)
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "clients" / ".global.client-0.round-4.safetensors.tmp").write_bytes(b"torn")
    with RunFolder(tmp_path).open(CONFIG) as folder:
        assert folder.load_checkpoint() is None
        folder.client_states()
    assert list((tmp_path / "clients").iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_the_states_before(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="Windows cannot limit the size of a file")
    before = advanced(ClientFiles(tmp_path / "clients").resume({}, "run"), 1)
    there = sorted((tmp_path / "clients").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*client-[12]\.round-2\.safetensors: File too large"):
            before.write("global", 2, {client: {"w": torch.ones(1000)} for client in (1, 2)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted((tmp_path / "clients").iterdir()) == there
    assert_as_of(before, 1)


def test_a_damaged_or_foreign_state_is_one_line(tmp_path: Path) -> None:
    clients = advanced(ClientFiles(tmp_path / "clients").resume({}, "run"), 1)
    first, second = sorted((tmp_path / "clients").iterdir())
    content = first.read_bytes()
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"client-0\.round-1.*digest.*delete that file and run again"):
        clients.read("global", [0, 1])
    first.write_bytes(second.read_bytes())
    with pytest.raises(UserError, match="belongs to another run, client or round"):
        clients.read("global", [0, 1])
    other = ClientFiles(tmp_path / "clients").resume(clients.versions, "another run")
    with pytest.raises(UserError, match="belongs to another run"):
        other.read("global", [1])
    with pytest.raises(UserError, match=r"client-0\.round-1.*restore that file from a backup, or repeat the run"):
        ClientFiles(tmp_path / "clients").read_newest("global", 0, "run")
