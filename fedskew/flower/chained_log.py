"""An append-only log of JSON lines in which every line has the hash of the line before it.

A line that was changed, removed or moved breaks the chain, and `read_chain` says where. Beside the log is its head, a
file with the number and the hash of the last line. The head shows if lines at the end are missing. The head of
`audit.jsonl` is `audit.head`. Whoever may write both files can write a whole new chain. Therefore, record the last hash
elsewhere from time to time.

`append` forces its line to disk before it returns. A process that is killed while it writes may leave an incomplete
line, called `torn` below. The next `append` ends this line, and adds a line with the event `repaired` and the hash of
the incomplete line. No byte of the log is ever changed or removed.

A ClientApp also writes to the log and must start quickly, so this module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.locks import exclusive

Entry = dict[str, Any]
"""The content of one line."""

REPAIRED = "repaired"
_FIRST = "0" * 64
"""The `previous` hash of the first line."""
_TAIL_BYTES = 65536
"""Bytes that are first read from the end of a log, to find its last line."""
_LINES_PER_APPEND = 2
"""The maximum number of lines that `append` writes: a repair and the entry. The head may be that far behind the log."""


class LogDamaged(UserError):
    """A log or its head was changed."""


@dataclass(frozen=True)
class Chain:
    """The entries of a log, up to the first line that breaks the chain."""

    entries: tuple[Entry, ...]
    repairs: int
    """Number of incomplete lines, left by processes that were killed."""
    problem: str | None
    """The first sign that the log was changed. None if the log is intact."""
    is_cut: bool = False
    """Whether a line breaks the chain. That line and all after it are left out."""

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return str(self.entries[-1]["hash"]) if self.entries else _FIRST


class ChainedLog:
    """One log, which several processes may write to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head_path = head_path(path)

    def append(self, entry: Entry) -> Entry:
        """Add a line, and return it with its number, time and hashes."""
        with self.locked():
            return self.append_locked(entry)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing while the block runs."""
        with _reporting("write", self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(self.path.with_name(f".{self.path.name}.lock")):
            yield

    def append_locked(self, entry: Entry) -> Entry:
        """Do the work of `append`, for a caller that holds the lock."""
        with _reporting("write", self.path):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            descriptor = os.open(self.path, flags, 0o600)
            try:
                last, torn, is_open = self._last_entry(descriptor)
                lines = b"\n" if is_open else b""
                if torn:
                    last = _chain(last, {"event": REPAIRED, "torn": [_digest(line) for line in torn]})
                    lines += _line(last)
                last = _chain(last, entry)
                _write_all(descriptor, lines + _line(last))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._write_head(last)
        return last

    def _last_entry(self, descriptor: int) -> tuple[Entry | None, list[bytes], bool]:
        """Find the last entry, the incomplete lines after it, and whether the last line has no line break yet.

        Raise `LogDamaged` if the log does not end where the head says.
        """
        size = os.fstat(descriptor).st_size
        length = _TAIL_BYTES
        while True:
            start = max(0, size - length)
            lines = _read_from(descriptor, start).split(b"\n")
            is_open = lines[-1] != b""
            lines = lines[1 if start else 0 : None if is_open else -1]  # the first line may begin before `start`
            entries = [_parse(line) for line in lines]
            known = [entry for entry in entries if entry is not None]
            if start == 0 or len(known) > _LINES_PER_APPEND:
                break
            length *= 4
        self._require_head(known)
        last = max((index for index, entry in enumerate(entries) if entry is not None), default=-1)
        return (known[-1] if known else None), lines[last + 1 :], is_open

    def _require_head(self, known: Sequence[Entry]) -> None:
        """Refuse a log whose head names none of the last entries. Only a new log may lack a head.

        `known` are the entries at the log's end.
        """
        head = read_head(self.path)
        recent = known[-_LINES_PER_APPEND - 1 :]
        is_new = head is None and len(known) <= _LINES_PER_APPEND
        if is_new:
            return
        if head is None:
            raise LogDamaged(f"{self._head_path} is missing; restore it, or move {self.path} away to begin a new log")
        if head["hash"] not in [entry["hash"] for entry in recent]:
            raise LogDamaged(
                f"{self.path} does not end where {self._head_path.name} says; `fedskew federate audit verify "
                f"{self.path}` says what was changed. Move both files away to begin a new log"
            )

    def _write_head(self, last: Entry) -> None:
        draft = self._head_path.with_name(f".{self._head_path.name}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        descriptor = os.open(draft, flags, 0o600)
        try:
            _write_all(descriptor, json.dumps({"number": last["number"], "hash": last["hash"]}).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, self._head_path)
        _sync_folder(self.path.parent)


def _sync_folder(path: Path) -> None:
    """Force the names of the log and of its head to disk. Windows needs no such call, and cannot open a folder."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read_from(descriptor: int, position: int) -> bytes:
    """Read a file from this position to its end."""
    os.lseek(descriptor, position, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def head_path(path: Path) -> Path:
    """The file with the number and the hash of a log's last line."""
    return path.with_suffix(".head")


def read_head(path: Path) -> Entry | None:
    """Read the head of a log. None if there is none."""
    head = head_path(path)
    with _reporting("read", head):
        if not head.exists():
            return None
        content = head.read_bytes()
    try:
        found = json.loads(content)
        return {"number": int(found["number"]), "hash": str(found["hash"])}
    except (ValueError, TypeError, KeyError) as error:
        raise LogDamaged(f"{head} cannot be read; restore it, or move it and the log away") from error


def read_chain(path: Path) -> Chain:
    """Read a log and check every line."""
    with _reporting("read", path):
        content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    entries: list[Entry] = []
    torn: list[bytes] = []
    repairs = 0
    for number, line in enumerate([*lines, *([rest] if rest else [])], start=1):
        entry = _parse(line)
        if entry is None and _is_object(line):  # an incomplete line is no complete JSON object
            return Chain(tuple(entries), repairs, f"line {number} was changed: it is not an entry", is_cut=True)
        if entry is None:
            torn.append(line)
            continue
        problem = _break_in_chain(number, entry, entries, torn)
        if problem is not None:
            return Chain(tuple(entries), repairs, problem, is_cut=True)
        repairs, torn = repairs + len(torn), []
        entries.append(entry)
    repairs += len(torn)
    return Chain(tuple(entries), repairs, _head_problem(path, entries, repairs))


class NewEntries:
    """Reads the entries that were added to a log since the last call. To be fast, it does not check the chain."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._inode = path, 0, 0

    def read(self) -> list[Entry]:
        """Return the new entries. If the log was replaced by a new one, return all entries of the new log."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._position:
                    self._position, self._inode = 0, found.st_ino
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self._path}: {error.strerror}") from error
        complete = content[: content.rfind(b"\n") + 1]
        self._position += len(complete)
        return [entry for entry in map(_parse, complete.split(b"\n")) if entry is not None]


def _break_in_chain(line: int, entry: Entry, before: Sequence[Entry], torn: Sequence[bytes]) -> str | None:
    """Say why an entry cannot follow the entries before it. None if it can."""
    last = before[-1] if before else None
    expected = 1 if last is None else last["number"] + 1
    if entry["hash"] != _hash(entry):
        return f"line {line} was changed: its hash does not match its content"
    if torn and (entry.get("event") != REPAIRED or entry.get("torn") != [_digest(part) for part in torn]):
        return f"line {line - len(torn)} was changed: it is not an entry, and line {line} does not repair it"
    if entry["number"] > expected:
        missing = entry["number"] - expected
        return f"{missing} {'entry is' if missing == 1 else 'entries are'} missing before line {line}"
    if entry["number"] < expected:
        return f"line {line} is in the wrong place: entry {entry['number']} follows entry {expected - 1}"
    if entry["previous"] != (_FIRST if last is None else last["hash"]):
        start = "the start of the log" if last is None else f"entry {last['number']}"
        return f"line {line} does not follow {start}: its 'previous' is another hash"
    return None


def _head_problem(path: Path, entries: Sequence[Entry], repairs: int) -> str | None:
    """Say how the end of a log and its head disagree. None if they agree."""
    head = read_head(path)
    if head is None:
        # If the first process, or the first two, were killed in their first `append`, there is no head yet.
        return f"{head_path(path).name} is missing" if max(len(entries), repairs) > _LINES_PER_APPEND else None
    number, count = head["number"], len(entries)
    if number > count:
        return f"the log ends with entry {count}, but {head_path(path).name} names entry {number}: the rest is missing"
    if number < 1 or entries[number - 1]["hash"] != head["hash"]:
        return f"entry {number} was replaced: {head_path(path).name} has another hash"
    if count - number > _LINES_PER_APPEND:
        return f"{head_path(path).name} is older than the log: it names entry {number} of {count}"
    return None


def _chain(last: Entry | None, content: Entry) -> Entry:
    """Make the entry that follows `last`."""
    entry: Entry = {
        "number": 1 if last is None else last["number"] + 1,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        **content,
        "previous": _FIRST if last is None else last["hash"],
    }
    return entry | {"hash": _hash(entry)}


def _hash(entry: Entry) -> str:
    return _digest(_text({key: value for key, value in entry.items() if key != "hash"}))


def _line(entry: Entry) -> bytes:
    return _text(entry) + b"\n"


def _text(entry: Entry) -> bytes:
    return json.dumps(entry, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _parse(line: bytes) -> Entry | None:
    """Read a line. None if it is not exactly as `_line` writes an entry, even if only a space differs."""
    try:
        entry = json.loads(line)
        is_entry = isinstance(entry, dict) and isinstance(entry.get("number"), int) and _text(entry) == line
    except (ValueError, RecursionError):
        return None
    return entry if is_entry and {"time", "event", "previous", "hash"} <= entry.keys() else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


@contextlib.contextmanager
def _reporting(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}") from error
