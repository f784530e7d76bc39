"""A chained log shows every change, and survives processes that are killed while they write."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.flower.chained_log import REPAIRED, ChainedLog, LogDamaged, _hash, _line, head_path, read_chain


def make_log(folder: Path, entries: int = 5) -> Path:
    log = ChainedLog(folder / "state" / "audit.jsonl")
    for number in range(entries):
        log.append({"event": "reply", "value": number})
    return log.path


def rewrite(path: Path, change: Callable[[list[str]], object]) -> None:
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_an_intact_log_is_read_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = make_log(tmp_path)
    chain = read_chain(path)
    assert chain.problem is None
    assert [entry["value"] for entry in chain.entries] == [0, 1, 2, 3, 4]
    assert [entry["number"] for entry in chain.entries] == [1, 2, 3, 4, 5]
    assert chain.head == json.loads(head_path(path).read_text())["hash"]
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, head_path(path), path.parent)] == [0o600, 0o600, 0o700]


def _swap(lines: list[str]) -> None:
    lines[1], lines[2] = lines[2], lines[1]


def _spoil(lines: list[str]) -> None:
    lines[2] = "spoiled"


def test_a_line_that_was_rewritten_with_its_hash_is_found_by_the_next_one(tmp_path: Path) -> None:
    def forge(lines: list[str]) -> None:
        entry = json.loads(lines[2]) | {"value": 9}
        lines[2] = _line(entry | {"hash": _hash(entry)}).decode().rstrip("\n")

    path = make_log(tmp_path)
    rewrite(path, forge)
    assert "line 4 does not follow entry 3" in str(read_chain(path).problem)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines.__setitem__(2, lines[2].replace('"value":2', '"value":9')), "line 3 was changed"),
        (lambda lines: lines.__setitem__(2, lines[2].replace('"value":2', '"value": 2')), "line 3 was changed"),
        (_spoil, "line 3 was changed: it is not an entry, and line 4 does not repair it"),
        (lambda lines: lines.pop(1), "1 entry is missing before line 2"),
        (lambda lines: lines.pop(0), "1 entry is missing before line 1"),
        (_swap, "1 entry is missing before line 2"),
        (lambda lines: lines.insert(3, lines[1]), "line 4 is in the wrong place: entry 2 follows entry 3"),
        (lambda lines: lines.pop(), "the log ends with entry 4, but audit.head names entry 5: the rest is missing"),
        (lambda lines: lines.clear(), "the log ends with entry 0, but audit.head names entry 5"),
        (lambda lines: lines.__setitem__(4, "spoiled"), "the log ends with entry 4, but audit.head names entry 5"),
    ],
)
def test_a_line_that_was_changed_removed_or_moved_is_named(
    change: Callable[[list[str]], object], problem: str, tmp_path: Path
) -> None:
    path = make_log(tmp_path)
    rewrite(path, change)
    assert problem in str(read_chain(path).problem)


def test_a_chain_that_was_made_anew_is_found_by_its_head(tmp_path: Path) -> None:
    path, other = make_log(tmp_path / "a"), make_log(tmp_path / "b")
    path.write_bytes(other.read_bytes())
    assert "entry 5 was replaced" in str(read_chain(path).problem)
    head_path(path).unlink()
    assert "audit.head is missing" in str(read_chain(path).problem)


def test_a_copy_in_which_no_line_is_an_entry_is_not_intact(tmp_path: Path) -> None:
    """An editor that changes the line ends changes every line, and a copy has no head that shows it."""
    path, copy = make_log(tmp_path), tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_chain(copy).problem == "line 1 was changed: it is not an entry"


def test_a_log_that_was_replaced_by_a_foreign_line_is_not_intact(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"a":1}\n')
    assert read_chain(path).problem == "line 1 was changed: it is not an entry"


def test_a_log_whose_first_writers_were_killed_is_intact(tmp_path: Path) -> None:
    """The first was killed in the middle of its line, the second before it wrote the head."""
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"event":"re')
    ChainedLog(path).append({"event": "reply", "value": 0})
    head_path(path).unlink()
    chain = read_chain(path)
    assert (chain.problem, chain.repairs, len(chain.entries)) == (None, 1, 2)


@pytest.mark.parametrize("change", [lambda lines: lines.pop(), lambda lines: lines.__setitem__(-1, "spoiled")])
def test_nothing_is_added_to_a_log_whose_end_was_changed(change: Callable[[list[str]], object], tmp_path: Path) -> None:
    """Otherwise the next entry would hide the change."""
    path = make_log(tmp_path)
    rewrite(path, change)
    before = path.read_bytes()
    with pytest.raises(LogDamaged, match=r"does not end where audit\.head says"):
        ChainedLog(path).append({"event": "reply"})
    path.unlink()
    with pytest.raises(LogDamaged):
        ChainedLog(path).append({"event": "reply"})
    assert before.count(b"\n") >= 4


def test_nothing_is_added_to_a_log_without_its_head(tmp_path: Path) -> None:
    path = make_log(tmp_path)
    head_path(path).unlink()
    with pytest.raises(LogDamaged, match=r"audit\.head is missing; restore it, or move .*audit\.jsonl away"):
        ChainedLog(path).append({"event": "reply"})


def test_a_first_line_that_continues_another_log_is_named(tmp_path: Path) -> None:
    def forge(lines: list[str]) -> None:
        entry = json.loads(lines[0]) | {"previous": "1" * 64}
        lines[0] = _line(entry | {"hash": _hash(entry)}).decode().rstrip("\n")

    path = make_log(tmp_path)
    rewrite(path, forge)
    assert "line 1 does not follow the start of the log" in str(read_chain(path).problem)


@pytest.mark.parametrize("kept", [0, 1, 2, 20, -2, -1, None])
def test_an_incomplete_last_line_is_recognised_and_the_chain_goes_on(kept: int | None, tmp_path: Path) -> None:
    """Whatever part of the line was written. A line that lacks only its line break is complete."""
    path = make_log(tmp_path)
    head = head_path(path).read_bytes()
    whole = path.read_bytes()
    ChainedLog(path).append({"event": "reply", "value": "lost"})
    written = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + written[:kept])  # killed while it wrote the line
    head_path(path).write_bytes(head)  # so the head is that of the line before
    assert read_chain(path).problem is None
    ChainedLog(path).append({"event": "reply", "value": "next"})
    chain = read_chain(path)
    assert chain.problem is None
    is_torn, is_complete = kept not in (0, -1, None), kept in (-1, None)
    assert chain.repairs == int(is_torn)
    assert [entry["event"] for entry in chain.entries[5:]] == ["reply"] * is_complete + [REPAIRED] * is_torn + ["reply"]
    assert path.read_bytes().startswith(whole + written[:kept])  # nothing was removed


def test_a_repair_that_is_killed_is_repaired(tmp_path: Path) -> None:
    path = make_log(tmp_path)
    whole, head = path.read_bytes(), head_path(path).read_bytes()
    path.write_bytes(whole + b'{"torn')
    ChainedLog(path).append({"event": "reply"})
    repaired = path.read_bytes()
    for end in range(len(whole) + 7, len(repaired)):
        path.write_bytes(repaired[:end])
        head_path(path).write_bytes(head)
        ChainedLog(path).append({"event": "reply", "value": "next"})
        chain = read_chain(path)
        assert chain.problem is None
        assert chain.entries[-1]["value"] == "next"


WRITER = """
import sys
from pathlib import Path
from fedskew.flower.chained_log import ChainedLog
log = ChainedLog(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    log.append({"event": "reply", "writer": sys.argv[3], "value": number, "text": "x" * 5000})
    print(number, flush=True)
"""


def _writer(path: Path, entries: int, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(entries), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_write_at_once_and_are_killed_leave_a_whole_chain(tmp_path: Path) -> None:
    """What a process reported as written is there, whenever it is killed."""
    path, reported = tmp_path / "audit.jsonl", {}
    for name in ("a", "b"):
        writers = [_writer(path, 100_000, f"{name}{copy}") for copy in range(2)]
        for writer in writers:
            assert writer.stdout is not None
            for _ in range(10):
                writer.stdout.readline()
        for copy, writer in enumerate(writers):
            os.kill(writer.pid, signal.SIGKILL)
            rest, _ = writer.communicate()
            reported[f"{name}{copy}"] = 10 + rest.count("\n")
    ChainedLog(path).append({"event": "reply", "writer": "last", "value": 0})
    chain = read_chain(path)
    assert chain.problem is None
    for name, count in reported.items():
        values = [entry["value"] for entry in chain.entries if entry.get("writer") == name]
        assert values == list(range(len(values)))
        assert len(values) >= count


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*audit\.jsonl: Is a directory"):
        ChainedLog(tmp_path / "audit.jsonl").append({"event": "reply"})
