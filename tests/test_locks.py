"""One writer per folder, one process at a time for shared files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedskew.errors import UserError
from fedskew.experiment.storage.files import FolderLock
from fedskew.locks import exclusive


def test_a_second_writer_learns_who_holds_the_folder(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / ".lock")
    with pytest.raises(UserError, match=rf"{tmp_path} is being written by another process \({os.getpid()} on "):
        FolderLock(tmp_path / ".lock")
    lock.release()
    FolderLock(tmp_path / ".lock").release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = FolderLock(tmp_path / ".lock")
    assert lock.warning == f"the file system of {tmp_path} does not support locks; do not start the same run twice"
    lock.release()
    with exclusive(tmp_path / "shared.lock"):
        pass


INSIDE = """
import sys
from pathlib import Path
from fedskew.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("inside", flush=True)
    sys.stdin.readline()
    Path(sys.argv[1]).with_name("done").touch()
"""


def test_processes_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "shared.lock"
    with subprocess.Popen(
        [sys.executable, "-c", INSIDE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "inside\n"
        with pytest.raises(UserError, match="another process"):
            FolderLock(path)
        other.stdin.write("\n")
        other.stdin.flush()
        with exclusive(path):
            assert path.with_name("done").exists()
