"""A Hugging Face Hub on this machine: the few calls that huggingface_hub makes to upload and download a model.

The answers have the form of the real Hub's. Large files take the way of Git LFS, or of Xet if the client has it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LICENCES = {"apache-2.0", "mit", "cc-by-4.0", "other"}


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    commits: int = 0


@dataclass
class FakeHub:
    """The Hub's state: tokens with the names that they may write to, repositories, and large files by SHA-256."""

    tokens: dict[str, set[str]]
    repositories: dict[str, Repository] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""


class _Refused(Exception):
    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.answer = status, {"error": message, **more}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self._answer(self.command)

    do_PUT = do_GET = do_HEAD = do_POST

    def _answer(self, verb: str) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{verb} {path}")
        body = self._read_body()
        for pattern, method in _ROUTES:
            found = re.fullmatch(pattern, f"{verb} {path}")
            if found:
                try:
                    getattr(self, method)(body, **found.groupdict())
                except _Refused as refused:
                    self._send(refused.answer, refused.status)
                return
        self._send({"error": f"the fake Hub does not know {verb} {path}"}, 404)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # -- who may do what -------------------------------------------------------------------------------

    def _require_write(self, owner: str) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise _Refused(401, "Invalid username or password.")
        if owner not in self.hub.tokens[token]:
            raise _Refused(403, f'You don\'t have the rights to write under the namespace "{owner}"')

    def _repository(self, name: str) -> Repository:
        if name not in self.hub.repositories:
            raise _Refused(404, "Repository not found")
        return self.hub.repositories[name]

    # -- uploads ---------------------------------------------------------------------------------------

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        self._require_write(asked["organization"])
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            raise _Refused(409, "You already created this model repo", url=f"{self.hub.url}/{name}")
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.repositories[name] = Repository(private)
        self._send({"url": f"{self.hub.url}/{name}", "name": name, "private": private})

    def validate(self, body: bytes) -> None:
        """The Hub's checks of the keys that fedskew writes."""
        header = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
        errors = []
        if header.get("license", "other") not in LICENCES:
            errors.append(f'"license" must be one of {sorted(LICENCES)}')
        for model in header.get("model-index", []):
            for result in model["results"]:
                if not isinstance(result["task"]["type"], str) or not result["dataset"].keys() >= {"type", "name"}:
                    errors.append('"model-index[0].results[0]" needs a task and a dataset')
                if not all(metric.keys() >= {"type", "value"} for metric in result["metrics"]):
                    errors.append('"model-index[0].results[0].metrics" need a type and a value')
        answer = {"errors": [{"message": message} for message in errors], "warnings": []}
        self._send(answer, 400 if errors else 200)

    def describe(self, body: bytes, name: str) -> None:
        found = self._repository(name)
        files = [{"rfilename": path} for path in found.files]
        self._send({"id": name, "modelId": name, "private": found.private, "sha": COMMIT, "siblings": files})

    def list_files(self, body: bytes, name: str) -> None:
        listed = []
        for path, content in self._repository(name).files.items():
            oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            large = {"lfs": lfs} if path in self._repository(name).large else {}
            listed.append({"type": "file", "path": path, "size": len(content), "oid": oid, **large})
        self._send(listed)

    def preupload(self, body: bytes, name: str) -> None:
        self._repository(name)
        self._require_write(name.partition("/")[0])
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".onnx")) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._send({"files": files, "commitOid": COMMIT})

    def large_files(self, body: bytes, name: str) -> None:
        self._require_write(name.partition("/")[0])
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.hub.url}/storage/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        self._send({"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "the content has another SHA-256")
        self.hub.large_files[oid] = body
        self._send({}, headers={"ETag": oid})

    def xet_token(self, body: bytes, name: str) -> None:
        self._require_write(name.partition("/")[0])
        self._send({"casUrl": self.hub.url, "accessToken": "xet", "exp": int(time.time()) + 3600})

    def store_chunks(self, body: bytes) -> None:
        """Store a Xet block. It holds the chunks of a whole file, because no file shares chunks with another here."""
        content = b"".join(_read_chunks(body))
        self.hub.large_files[hashlib.sha256(content).hexdigest()] = content
        self._send({"was_inserted": True})

    def store_shard(self, body: bytes) -> None:
        self._send({"result": 1})

    def commit(self, body: bytes, name: str) -> None:
        self._require_write(name.partition("/")[0])
        repository = self._repository(name)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.large_files:
                    raise _Refused(400, f"the content of {value['path']} was not uploaded")
                repository.files[value["path"]] = self.hub.large_files[value["oid"]]
                repository.large.add(value["path"])
        repository.commits += 1
        self._send({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}"})

    # -- downloads -------------------------------------------------------------------------------------

    def resolve(self, body: bytes, name: str, path: str) -> None:
        content = self._repository(name).files[path]
        etag = hashlib.sha256(content).hexdigest()
        self._send(content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})


def _read_chunks(block: bytes) -> Iterator[bytes]:
    """Read the chunks of a Xet block. Each has a header: version, packed size, way of packing, size."""
    import pyarrow

    at = 0
    while at < len(block):
        packed, kind, size = (int.from_bytes(block[at + a : at + b], "little") for a, b in ((1, 4), (4, 5), (5, 8)))
        content = block[at + 8 : at + 8 + packed]
        if kind:
            content = pyarrow.decompress(content, decompressed_size=size, codec="lz4", asbytes=True)
        if kind == 2:  # every fourth byte of the chunk, from each of the first four bytes on
            ends = [0, *(len(range(first, size, 4)) for first in range(4))]
            for first in range(1, 5):
                ends[first] += ends[first - 1]
            grouped, content = content, bytearray(size)
            for first in range(4):
                content[first::4] = grouped[ends[first] : ends[first + 1]]
        yield bytes(content)
        at += 8 + packed


_NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"GET /api/models/{_NAME}", "describe"),
    (rf"GET /api/models/{_NAME}/revision/\w+", "describe"),
    (rf"GET /api/models/{_NAME}/tree/\w+", "list_files"),
    (rf"POST /api/models/{_NAME}/preupload/main", "preupload"),
    (rf"POST /api/models/{_NAME}/commit/main", "commit"),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", "large_files"),
    (rf"GET /api/models/{_NAME}/xet-write-token/main", "xet_token"),
    (r"POST /v1/xorbs/default/\w+", "store_chunks"),
    (r"POST /v1/shards", "store_shard"),
    (r"PUT /storage/(?P<oid>\w+)", "store"),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/\w+/(?P<path>[\w./-]+)", "resolve"),
]


@contextmanager
def running_hub(tokens: dict[str, set[str]]) -> Iterator[FakeHub]:
    """Serve a Hub without repositories on a free port."""
    hub = FakeHub(tokens)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
