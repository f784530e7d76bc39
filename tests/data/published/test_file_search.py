"""Where files are looked for, and how archives become files."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from archives import unpacks_tar

from fedskew.data.published.download import RemoteFile, extract
from fedskew.data.published.file_search import Published, ensure_files
from fedskew.errors import UserError

NOWHERE = "http://127.0.0.1:9/"


def published(also: tuple[Path, ...] = ()) -> Published:
    files = (RemoteFile("things.tar.gz", (NOWHERE,), "md5:0"),)
    return Published("things", ((("a.bin", "a.bin.gz"), ("b*.bin",)),), ("Things/raw",), files, also)


def put(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("a.bin", "b1.bin"):
        (folder / name).write_text(str(folder))
    return [folder / "a.bin", folder / "b1.bin"]


def pack(path: Path, names: tuple[str, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    return path


@pytest.mark.parametrize("folder", ["", "things", "Things/raw", "things/Things/raw"])
def test_files_are_found_in_the_folder_itself_and_in_the_usual_ones(cache: Path, tmp_path: Path, folder: str) -> None:
    expected = put(tmp_path / "data" / folder)
    assert ensure_files(published(), tmp_path / "data") == expected


def test_a_folder_of_its_own_comes_before_files_that_merely_bear_the_names(cache: Path, tmp_path: Path) -> None:
    put(tmp_path / "data")
    expected = put(tmp_path / "data" / "things")
    assert ensure_files(published(), tmp_path / "data") == expected


def test_the_given_folder_comes_before_the_environment_and_that_before_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = put(tmp_path / "usr")
    assert ensure_files(published((tmp_path / "usr",)), None) == distribution
    cached = put(cache / "things")
    assert ensure_files(published((tmp_path / "usr",)), None) == cached
    shared = put(tmp_path / "shared")
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "shared"))
    assert ensure_files(published(), None) == shared
    given = put(tmp_path / "given")
    assert ensure_files(published(), tmp_path / "given") == given


def test_half_of_the_files_is_not_the_dataset(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "a.bin").write_text("a")
    cached = put(cache)
    assert ensure_files(published(), tmp_path / "half") == cached


@unpacks_tar
def test_an_archive_is_unpacked_into_the_cache_once(cache: Path, tmp_path: Path) -> None:
    archive = pack(tmp_path / "data" / "things.tar.gz", ("Things/raw/a.bin", "Things/raw/b.bin"))
    found = ensure_files(published(), tmp_path / "data")
    assert found == [cache / "things/Things/raw/a.bin", cache / "things/Things/raw/b.bin"]
    archive.write_bytes(b"no longer needed")
    assert ensure_files(published(), tmp_path / "data") == found
    assert {path.name for path in cache.iterdir()} == {".things.lock", "things"}


@unpacks_tar
def test_an_archive_of_something_else_is_refused(cache: Path, tmp_path: Path) -> None:
    pack(tmp_path / "things.tar.gz", ("other.bin",))
    with pytest.raises(UserError, match=r"things.tar.gz: does not contain the files of things"):
        ensure_files(published(), tmp_path)


def test_a_data_folder_that_does_not_exist_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'.*nowhere' does not exist"):
        ensure_files(published(), tmp_path / "nowhere")


def test_files_that_are_nowhere_are_asked_for_by_name(cache: Path) -> None:
    with pytest.raises(UserError, match=f"put things.tar.gz into {cache}"):
        ensure_files(published(), None)


@unpacks_tar
def test_a_tar_member_cannot_leave_its_folder(tmp_path: Path) -> None:
    archive = pack(tmp_path / "bad.tar.gz", ("good", "../evil"))
    with pytest.raises(UserError, match=r"bad.tar.gz: damaged archive .*evil"):
        extract(archive, tmp_path / "inner" / "out")
    assert list((tmp_path / "inner").iterdir()) == []


def test_a_zip_member_cannot_leave_its_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("../evil", "x")
    with pytest.raises(UserError, match="points outside"):
        extract(tmp_path / "bad.zip", tmp_path / "inner" / "out")
    assert list((tmp_path / "inner").iterdir()) == []


@pytest.mark.parametrize("name", [pytest.param("cut.tar.gz", marks=unpacks_tar), "cut.zip"])
def test_a_truncated_archive_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    whole = tmp_path / f"whole-{name}"
    if name.endswith(".zip"):
        with zipfile.ZipFile(whole, "w") as archive:
            archive.writestr("file", "x" * 1000)
    else:
        pack(whole, tuple(f"file{i}" for i in range(50)))
    (tmp_path / name).write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(UserError, match=f"{name}: damaged archive"):
        extract(tmp_path / name, tmp_path / "inner" / "out")
    assert list((tmp_path / "inner").iterdir()) == []


def test_a_data_folder_may_be_in_the_home_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    expected = put(tmp_path / "data")
    assert ensure_files(published(), "~/data") == expected
    with pytest.raises(UserError, match=r"data folder '~/gone' does not exist; expected a folder"):
        ensure_files(published(), "~/gone")
    monkeypatch.setenv("FEDSKEW_DATA", "~/data")  # an env file does not expand ~
    assert ensure_files(published(), None) == expected


def test_a_data_folder_that_is_missing_or_a_file_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data folder '.*file' is not a folder; expected a folder"):
        ensure_files(published(), tmp_path / "file")
    with pytest.raises(UserError, match=r"data folder '.*gone' does not exist; expected a folder"):
        ensure_files(published(), tmp_path / "gone")
