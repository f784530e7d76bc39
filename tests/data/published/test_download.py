"""Downloads from a real server on this machine: whole, interrupted, corrupt, absent."""

from __future__ import annotations

import hashlib
import io
import re
import socket
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedskew.data.published.download import RemoteFile, fetch
from fedskew.data.published.file_search import Published, ensure_files
from fedskew.errors import UserError

CONTENT = bytes(range(256)) * 4000
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT with ranges; can be told to hang up early, to ignore ranges, or to serve other bytes."""

    stop_after: int | None = None
    ranges = True
    content = CONTENT

    def __init__(self) -> None:
        self.requested: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.server.requested.append(wanted)
        if self.path != "/file.bin":
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.server.ranges else 0
        if start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.stop_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/file.bin"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_arrives_whole_and_only_once(server: Server, tmp_path: Path) -> None:
    file = RemoteFile("file.bin", (server.url,), MD5)
    for _ in range(2):
        assert fetch(file, tmp_path / "new" / "folder").read_bytes() == CONTENT
    assert server.requested == [None]
    assert names(tmp_path / "new" / "folder") == {"file.bin"}


def test_sha256_is_a_checksum_too(server: Server, tmp_path: Path) -> None:
    digest = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
    assert fetch(RemoteFile("file.bin", (server.url,), digest), tmp_path).read_bytes() == CONTENT


def test_an_interrupted_download_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    file = RemoteFile("file.bin", (server.url,), MD5)
    server.stop_after = 300_000
    with pytest.raises(UserError, match=r"broke after 300000 of 1024000 bytes.*; run again to continue,"):
        fetch(file, tmp_path)
    assert names(tmp_path) == {"file.bin.part"}
    server.stop_after = None
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert server.requested == [None, "bytes=300000-"]
    assert names(tmp_path) == {"file.bin"}


def test_a_server_without_ranges_sends_all_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    server.ranges = False
    assert fetch(RemoteFile("file.bin", (server.url,), MD5), tmp_path).read_bytes() == CONTENT


def test_a_complete_part_needs_no_more_bytes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(RemoteFile("file.bin", (server.url,), MD5), tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_and_says_where_the_file_belongs(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[::-1]
    with pytest.raises(UserError) as caught:
        fetch(RemoteFile("file.bin", (server.url,), MD5), tmp_path)
    message = str(caught.value)
    assert "wrong checksum" in message
    assert MD5 in message
    assert "; run again, or" in message
    assert f"put file.bin into {tmp_path}" in message
    assert names(tmp_path) == set()


def test_the_second_url_serves_when_the_first_does_not(server: Server, tmp_path: Path) -> None:
    missing = server.url.replace("file.bin", "gone.bin")
    file = RemoteFile("file.bin", (unused_url(), missing, server.url), MD5)
    assert fetch(file, tmp_path).read_bytes() == CONTENT


def test_no_network_is_one_line_that_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        fetch(RemoteFile("file.bin", (unused_url(),), MD5), tmp_path)
    assert "refused" in str(caught.value)
    assert f"put file.bin into {tmp_path}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_runs_that_start_together_download_once(server: Server, cache: Path) -> None:
    file = RemoteFile("file.bin", (server.url,), MD5)
    published = Published("things", ((("file.bin",),),), (), (file,))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ensure_files(published, None), range(4)))
    assert found == [[cache / "things" / "file.bin"]] * 4
    assert server.requested == [None]


def test_a_downloaded_archive_leaves_its_files_only(server: Server, cache: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("raw/a.bin", "abc")
    server.content = packed.getvalue()
    file = RemoteFile("things.zip", (server.url,), "md5:" + hashlib.md5(server.content).hexdigest())
    published = Published("things", ((("a.bin",),),), ("raw",), (file,))
    assert ensure_files(published, None) == [cache / "things" / "raw" / "a.bin"]
    assert names(cache) == {".things.lock", "things"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write .*taken"):
        fetch(RemoteFile("file.bin", (unused_url(),), MD5), tmp_path / "taken")
