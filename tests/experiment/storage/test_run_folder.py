"""A run's folder keeps what was computed, whatever happens to its process or its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedskew.errors import UserError
from fedskew.experiment.config import Config, PartitionConfig, with_values
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.storage.run_folder import RunFolder

CONFIG = Config(partition=PartitionConfig(params={"beta": 0.1}), rounds=3)


def state(round_: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), round_ / 7), "steps": torch.tensor(round_)}


def row(round_: int) -> RoundRow:
    return RoundRow(round=round_, seconds=round_ / 7)


def play(folder: RunFolder, first: int, last: int) -> None:
    for number in range(first, last + 1):
        folder.append_round(row(number))
        folder.save_checkpoint(number, state(number), {"note": number})


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """A run that was killed after round 3."""
    with RunFolder(tmp_path / "run").open(CONFIG) as folder:
        play(folder, 1, 3)
    return tmp_path / "run"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A limit that makes writing fail as a full disk does."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def assert_at(folder: RunFolder, round_: int) -> None:
    checkpoint = folder.load_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.round, checkpoint.meta) == (round_, {"note": round_})
    assert checkpoint.tensors.keys() == state(round_).keys()
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in state(round_).items())


def test_a_new_folder_holds_the_whole_configuration(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a b"
    with RunFolder(path).open(CONFIG) as folder:
        assert folder.load_checkpoint() is None
        assert folder.rounds() == []
        assert not folder.finished
    assert yaml.safe_load((path / "config.yaml").read_text()) == CONFIG.to_mapping()
    assert RunFolder(path).config == CONFIG


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").open(CONFIG) as folder:
        folder.append_round(row(0))
        play(folder, 1, 3)
        folder.save_model(state(3), {"model": "cnn"})
        assert not folder.finished
        folder.write_summary({"status": "finished", "accuracy": 0.5})
    reader = RunFolder(tmp_path / "run")
    assert reader.finished
    assert reader.summary() == {"status": "finished", "accuracy": 0.5}
    assert reader.rounds() == [row(n) for n in range(4)]
    tensors, meta = reader.load_model()
    assert torch.equal(tensors["w"], state(3)["w"])
    assert meta == {"model": "cnn"}
    before = contents(tmp_path / "run")
    with RunFolder(tmp_path / "run").open(CONFIG) as folder:
        assert folder.finished
    assert contents(tmp_path / "run") == before
    assert folder.warnings == []


def test_the_last_two_checkpoints_are_kept(played: Path) -> None:
    names = sorted(path.name for path in (played / "checkpoint").iterdir())
    assert names == ["round-000002.safetensors", "round-000003.safetensors"]
    with RunFolder(played).open(CONFIG) as folder:
        assert_at(folder, 3)


def test_another_configuration_is_refused_with_the_keys_that_differ(played: Path) -> None:
    other = with_values(CONFIG, {"lr": 0.1, "partition.beta": 0.5})
    with pytest.raises(UserError, match=r"differs in lr, partition.beta\).*--out"):
        RunFolder(played).open(other)
    RunFolder(played).open(CONFIG).close()


def test_data_that_moved_do_not_make_another_run(played: Path) -> None:
    with RunFolder(played).open(with_values(CONFIG, {"data_dir": "/elsewhere", "checkpoint_every": 5})) as folder:
        assert_at(folder, 3)


def test_a_folder_of_someone_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"not a run folder.*--out"):
        RunFolder(tmp_path).open(CONFIG)
    assert contents(tmp_path) == {"thesis.tex": b"x"}
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").open(CONFIG)
    (tmp_path / "config.yaml").write_text("hydra: true\n")
    with pytest.raises(UserError, match="unknown key 'hydra'"):
        RunFolder(tmp_path).open(CONFIG)


def test_reading_what_is_no_run(tmp_path: Path, played: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        _ = RunFolder(tmp_path / "absent").config
    with pytest.raises(UserError, match="did not finish"):
        RunFolder(played).load_model()
    (played / "summary.json").write_text('{"status": "finished"}')
    with pytest.raises(UserError, match="although its run finished; restore the file"):
        RunFolder(played).load_model()
    (played / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="damaged"):
        RunFolder(played).load_model()


def test_a_kill_while_the_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.yaml.tmp").write_text("data: di")
    with RunFolder(tmp_path).open(CONFIG) as folder:
        assert folder.config == CONFIG
    assert not (tmp_path / ".config.yaml.tmp").exists()


def test_drafts_of_a_killed_run_are_ignored_and_removed(played: Path) -> None:
    drafts = [played / f".{name}.tmp" for name in ("rounds.jsonl", "summary.json", "model.safetensors")]
    drafts.append(played / "checkpoint" / ".round-000004.safetensors.tmp")
    for draft in drafts:
        draft.write_bytes(b"half")
    with RunFolder(played).open(CONFIG) as folder:
        assert_at(folder, 3)
        assert folder.warnings == []
    assert not any(draft.exists() for draft in drafts)


def test_a_checkpoint_cut_at_any_length_falls_back_to_the_one_before(played: Path) -> None:
    path = played / "checkpoint" / "round-000003.safetensors"
    content = path.read_bytes()
    for length in range(0, len(content), 5):
        path.write_bytes(content[:length])
        folder = RunFolder(played)
        assert_at(folder, 2)
        assert len(folder.warnings) == 1
        assert str(path) in folder.warnings[0]
        assert "\n" not in folder.warnings[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_a_changed_byte_falls_back_to_the_one_before(played: Path, data: st.DataObject) -> None:
    path = played / "checkpoint" / "round-000003.safetensors"
    original = path.read_bytes()
    changed = bytearray(original)
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    folder = RunFolder(played)
    folder.load_checkpoint()
    assert_at(folder, 2 if folder.warnings else 3)  # 3: a change that no reader sees, such as JSON white space
    path.write_bytes(original)


def test_foreign_checkpoints_are_passed_over(played: Path, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "other").open(with_values(CONFIG, {"seed": 1})) as other:
        play(other, 1, 3)
    newest = played / "checkpoint" / "round-000003.safetensors"
    shutil.copy(tmp_path / "other" / "checkpoint" / newest.name, newest)
    folder = RunFolder(played)
    assert_at(folder, 2)
    assert "belongs to another run" in folder.warnings[0]
    shutil.copy(played / "checkpoint" / "round-000002.safetensors", newest)
    folder = RunFolder(played)
    assert_at(folder, 2)
    assert "belongs to another run or round" in folder.warnings[0]
    save_file(state(3), newest)
    assert_at(RunFolder(played), 2)
    newest.unlink()
    newest.mkdir()
    assert_at(RunFolder(played), 2)


def test_without_a_whole_checkpoint_the_run_starts_again(played: Path) -> None:
    for path in (played / "checkpoint").iterdir():
        path.write_bytes(b"")
    with RunFolder(played).open(CONFIG) as folder:
        assert folder.load_checkpoint() is None
        assert len(folder.warnings) == 2
        folder.truncate_rounds(after=-1)
        assert folder.rounds() == []
        play(folder, 1, 1)
        assert_at(folder, 1)
        names = [path.name for path in (played / "checkpoint").iterdir()]
        assert names == ["round-000001.safetensors"]


@pytest.mark.parametrize("keep_row", [True, False], ids=["after its row", "before its row"])
def test_a_run_killed_at_any_byte_of_its_history_ends_with_the_same_files(
    tmp_path: Path, played: Path, keep_row: bool
) -> None:
    undisturbed = contents(played)
    with RunFolder(tmp_path / "early").open(CONFIG) as folder:
        play(folder, 1, 2)
        folder.append_round(row(3))
    history = (tmp_path / "early" / "rounds.jsonl").read_bytes()
    start = history.index(b"\n", history.index(b"\n") + 1) + 1
    for length in range(start, len(history) + 1) if keep_row else [0, 5, start // 2, start - 1]:
        (tmp_path / "early" / "rounds.jsonl").write_bytes(history[:length])
        copy = tmp_path / f"copy{length}"
        shutil.copytree(tmp_path / "early", copy)
        with RunFolder(copy).open(CONFIG) as folder:
            checkpoint = folder.load_checkpoint()
            done = checkpoint.round if checkpoint else 0
            assert done == 2 or not keep_row
            folder.truncate_rounds(after=done)
            play(folder, done + 1, 3)
        assert contents(copy) == undisturbed


def test_a_torn_last_row_is_not_read(played: Path) -> None:
    with (played / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 4, "accu')
    folder = RunFolder(played)
    assert [r.round for r in folder.rounds()] == [1, 2, 3]
    assert folder.warnings == []


@pytest.mark.parametrize("damaged", [b'{"round": 2, "accur\xffcy": 1}', b"[]", b'{"round": 1}', b"{}", b""])
def test_a_damaged_row_ends_the_history_and_the_checkpoints_after_it(played: Path, damaged: bytes) -> None:
    lines = (played / "rounds.jsonl").read_bytes().split(b"\n")
    lines[1] = damaged
    (played / "rounds.jsonl").write_bytes(b"\n".join(lines))
    with RunFolder(played).open(CONFIG) as folder:
        assert [r.round for r in folder.rounds()] == [1]
        assert "line 2; its last 2 rows" in folder.warnings[0]
        assert folder.load_checkpoint() is None
        folder.append_round(row(2))
        assert [r.round for r in folder.rounds()] == [1, 2]


def test_a_damaged_summary_is_no_finished_run(played: Path) -> None:
    (played / "summary.json").write_text('{"status": "fini')
    folder = RunFolder(played)
    assert not folder.finished
    assert "summary.json is damaged" in folder.warnings[0]


def test_truncating_drops_later_rows_only(played: Path) -> None:
    with RunFolder(played).open(CONFIG) as folder:
        folder.truncate_rounds(after=7)
        assert len(folder.rounds()) == 3
        folder.truncate_rounds(after=1)
        assert folder.rounds() == [row(1)]
        folder.append_round(row(2))
        assert folder.rounds() == [row(1), row(2)]


def test_rows_come_in_order_and_before_their_checkpoint(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open(CONFIG) as folder:
        folder.save_checkpoint(0, state(0), {"note": 0})
        assert_at(folder, 0)
        with pytest.raises(ValueError, match="checkpoint of round 1"):
            folder.save_checkpoint(1, state(1), {})
        folder.append_round(row(1))
        with pytest.raises(ValueError, match="row of round 1 after round 1"):
            folder.append_round(row(1))


def test_numbers_that_json_does_not_know_are_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open(CONFIG) as folder:
        folder.append_round(row(1))
        before = contents(tmp_path)
        for write in (
            lambda: folder.append_round(RoundRow(round=2, loss=float("nan"))),
            lambda: folder.write_summary({"best": float("inf")}),
            lambda: folder.save_checkpoint(1, state(1), {"loss": float("nan")}),
        ):
            with pytest.raises(ValueError, match="not JSON compliant"):
                write()
        assert contents(tmp_path) == before


def test_a_full_disk_is_one_line_and_loses_nothing(played: Path) -> None:
    with RunFolder(played).open(CONFIG) as folder:
        before = contents(played)
        size = len(before["rounds.jsonl"])
        with largest_file(size + 10), pytest.raises(UserError, match=r"cannot write .*rounds.jsonl: File too large"):
            folder.append_round(RoundRow(round=4, notes={"text": "x" * 100}))
        assert contents(played) == before
        folder.append_round(row(4))
        before = contents(played)
        with largest_file(400), pytest.raises(UserError, match=r"round-000004.safetensors: File too large"):
            folder.save_checkpoint(4, {"w": torch.ones(1000)}, {})
        with largest_file(400), pytest.raises(UserError, match=r"model.safetensors: File too large"):
            folder.save_model({"w": torch.ones(1000)})
        with largest_file(50), pytest.raises(UserError, match=r"summary.json: File too large"):
            folder.write_summary({"note": "x" * 1000})
        with largest_file(10), pytest.raises(UserError, match=r"rounds.jsonl: File too large"):
            folder.truncate_rounds(after=2)
        assert contents(played) == before
        assert_at(folder, 3)
        folder.save_checkpoint(4, state(4), {"note": 4})
        assert_at(folder, 4)


def test_checkpoints_written_beside_the_run_are_there_when_it_ends(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open(CONFIG) as folder:
        for number in (1, 2, 3):
            folder.append_round(row(number))
            folder.save_checkpoint(number, state(number), {"note": number}, wait=False)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["round-000002.safetensors", "round-000003.safetensors"]
    assert_at(RunFolder(tmp_path), 3)


def fail_beside_the_run(path: Path, then: BaseException | None) -> None:
    with largest_file(400), RunFolder(path).open(CONFIG) as folder:
        folder.save_checkpoint(3, {"w": torch.ones(1000)}, {}, wait=False)
        if then is not None:
            raise then


def test_a_checkpoint_that_fails_beside_the_run_is_no_secret(played: Path) -> None:
    with pytest.raises(UserError, match=r"round-000003.safetensors: File too large"):
        fail_beside_the_run(played, None)
    with pytest.raises(KeyboardInterrupt):
        fail_beside_the_run(played, KeyboardInterrupt())
    with RunFolder(played).open(CONFIG) as folder:
        assert_at(folder, 3)
        with largest_file(400):
            folder.save_checkpoint(3, {"w": torch.ones(1000)}, {}, wait=False)
            with pytest.raises(UserError, match=r"round-000003.safetensors: File too large"):
                folder.write_summary({"status": "finished"})
        assert not folder.finished


def test_a_disk_too_small_is_refused_before_training(tmp_path: Path) -> None:
    with RunFolder(tmp_path).open(CONFIG) as folder:
        folder.require_space(1)
        with pytest.raises(UserError, match="free disk; expected at least 1000000000000 MB"):
            folder.require_space(10**18)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "run", Path("/proc/fedskew/run"), Path("/dev/null/run")):
        with pytest.raises(UserError, match=str(path.parent)):
            RunFolder(path).open(CONFIG)


def test_two_writers_exclude_each_other(played: Path) -> None:
    with RunFolder(played).open(CONFIG):
        with pytest.raises(UserError, match=r"another process.*--out"):
            RunFolder(played).open(CONFIG)
        assert len(RunFolder(played).rounds()) == 3
    RunFolder(played).open(CONFIG).close()


def test_a_refused_folder_is_not_left_locked(played: Path) -> None:
    with pytest.raises(UserError, match="differs in seed"):
        RunFolder(played).open(with_values(CONFIG, {"seed": 9}))
    RunFolder(played).open(CONFIG).close()


def test_nothing_is_written_without_the_lock(played: Path) -> None:
    folder = RunFolder(played)
    for write in (
        lambda: folder.append_round(row(4)),
        lambda: folder.save_checkpoint(3, state(3), {}),
        lambda: folder.write_summary({}),
        lambda: folder.save_model({}),
        lambda: folder.truncate_rounds(after=0),
    ):
        with pytest.raises(RuntimeError, match="not open"):
            write()


LOCK_AND_DIE = """
import os, sys
from pathlib import Path
from fedskew.experiment.storage.files import FolderLock
lock = FolderLock(Path(sys.argv[1]) / ".lock")
if os.fork() == 0:
    print("forked", flush=True)
    os.read(int(sys.argv[2]), 1)
    os._exit(0)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_no_lock_even_if_its_workers_live(played: Path) -> None:
    workers_wait, release = os.pipe()
    command = [sys.executable, "-c", LOCK_AND_DIE, str(played), str(workers_wait)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[workers_wait]
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "forked\n"
            with pytest.raises(UserError, match="another process"):
                RunFolder(played).open(CONFIG)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(timeout=60) == -9
            RunFolder(played).open(CONFIG).close()
        finally:
            process.kill()
            os.close(release)
            os.close(workers_wait)


def test_rows_are_strict_json_lines(played: Path) -> None:
    lines = (played / "rounds.jsonl").read_text().splitlines()
    assert [RoundRow.from_json(json.loads(line)) for line in lines] == [row(1), row(2), row(3)]
