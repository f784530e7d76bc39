"""deploy/nginx.conf, with a real nginx in front of a real SuperLink: sites reach the fleet calls, and nothing else.

nginx is taken from FEDSKEW_NGINX or from where systems have it; without one, these tests are skipped.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedskew.flower.credentials import Credentials, make_credentials

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
PATIENCE = 60.0
NGINX = os.environ.get("FEDSKEW_NGINX") or shutil.which(
    "nginx", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
)
with_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx; FEDSKEW_NGINX may name one")
BY_OPERATORS = {"register-node", "unregister-node"}
"""Fleet calls of nodes without keys; with keys, operators do that."""

MAIN = """
daemon off;
pid nginx.pid;
error_log stderr;
events {}
http {
    access_log access.log;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include fedskew.conf;
}
"""


def allowed() -> set[str]:
    """The fleet calls that the configuration lets through."""
    (listed,) = re.findall(r"location ~ \^/v1/fleet/\(([a-z|-]+)\)\$", CONFIGURATION.read_text(encoding="utf-8"))
    return set(listed.split("|"))


def test_the_fleet_calls_are_those_of_the_installed_flower() -> None:
    from flwr.superlink.routers.fleet.router import router

    offered = {route.path.removeprefix("/v1/fleet/") for route in router.routes}  # type: ignore[attr-defined]
    assert allowed() == offered - BY_OPERATORS


@dataclass(frozen=True)
class Federation:
    """A SuperLink behind nginx."""

    folder: Path
    keys: Credentials
    proxy: int
    superlink: int

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [program("flwr"), *arguments]
        return subprocess.run(command, env=environment(self.folder), capture_output=True, text=True, check=False)

    def status(self, method: str, path: str, port: int | None = None, body: bytes = b"") -> int:
        """What is answered to a request line that no client library has put straight."""
        context = ssl.create_default_context(cafile=str(self.keys.authority))
        connection = http.client.HTTPSConnection("localhost", port or self.proxy, context=context, timeout=PATIENCE)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            return connection.getresponse().status
        finally:
            connection.close()


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def environment(folder: Path) -> dict[str, str]:
    """Flower without telemetry and downloads; its own programs must be on the path."""
    off = dict.fromkeys(("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"), "1")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, **off, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(folder / "home"), "PATH": path}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        threading.Event().wait(0.1)


def answers(federation: Federation, port: int) -> bool:
    try:
        return federation.status("GET", "/health", port) > 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    assert NGINX is not None
    folder = tmp_path_factory.mktemp("proxy")
    made = Federation(folder, make_credentials(folder / "keys", ["north"]), free_port(), free_port())
    text = CONFIGURATION.read_text(encoding="utf-8").replace("/etc/fedskew/", f"{made.keys.folder}/")
    text = text.replace("listen 9092", f"listen {made.proxy}").replace("127.0.0.1:9093", f"127.0.0.1:{made.superlink}")
    (folder / "fedskew.conf").write_text(text, encoding="utf-8")
    (folder / "nginx.conf").write_text(MAIN, encoding="utf-8")
    (folder / "home").mkdir()
    lines = ["[superlink]", 'default = "here"']
    for name, port in (("here", made.superlink), ("proxy", made.proxy)):
        lines += [
            f"[superlink.{name}]",
            f'address = "127.0.0.1:{port}"',
            f'root-certificates = "{made.keys.authority}"',
        ]
    (folder / "home" / "config.toml").write_text("\n".join(lines), encoding="utf-8")
    superlink = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(made.superlink)]
    superlink += ["--ssl-certfile", str(made.keys.certificate), "--ssl-keyfile", str(made.keys.key)]
    superlink += ["--ssl-ca-certfile", str(made.keys.authority), "--enable-supernode-auth"]
    commands = {"superlink": superlink, "nginx": [NGINX, "-p", f"{folder}/", "-c", "nginx.conf"]}
    with ExitStack() as stack:
        for name, port in (("superlink", made.superlink), ("nginx", made.proxy)):
            log = folder / f"{name}.log"
            process = stack.enter_context(running(commands[name], folder, log))
            until(lambda port=port: answers(made, port), process, log)  # type: ignore[misc]
        yield made


@with_nginx
def test_a_registered_site_is_online_through_the_proxy(federation: Federation) -> None:
    registered = federation.flwr("supernode", "register", str(federation.keys.node("north").public), "here")
    assert registered.returncode == 0, registered.stderr
    node = federation.keys.node("north")
    command = [program("flower-supernode"), "--superlink", f"localhost:{federation.proxy}", "--port", str(free_port())]
    command += ["--root-certificates", str(node.authority), "--auth-supernode-private-key", str(node.private)]
    log = federation.folder / "north.log"
    calls = federation.folder / "access.log"
    with running(command, federation.folder, log) as process:
        until(lambda: 'pull-messages HTTP/1.1" 200' in calls.read_text(), process, log)
        listed = json.loads(federation.flwr("supernode", "list", "here", "--format", "json").stdout)
    assert [entry["status"] for entry in listed["nodes"]] == ["online"]


@with_nginx
def test_a_key_cannot_be_registered_through_the_proxy(federation: Federation, tmp_path: Path) -> None:
    other = make_credentials(tmp_path, ["intruder"]).node("intruder")
    refused = federation.flwr("supernode", "register", str(other.public), "proxy")
    assert refused.returncode != 0
    assert "403 Forbidden" in refused.stderr + refused.stdout


@with_nginx
def test_every_other_call_of_the_superlink_is_refused(federation: Federation) -> None:
    from flwr.superlink.main import create_app

    offered = list(create_app().openapi()["paths"])
    assert len(offered) > 40
    for path in offered:
        through = path.removeprefix("/v1/fleet/") in allowed()
        assert (federation.status("POST", path) != 403) == through, path
        assert federation.status("GET", path) == 403, path
    for path in ("/", "/docs", "/openapi.json", "/health"):
        assert federation.status("GET", path) == 403, path


@with_nginx
@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
        "/v1/fleet/pull-messages/../../control/list-runs",
        "/v1/fleet/pull-messages%00/../../control/list-runs",
        "/v1/fleet/pull-messages;/../../control/list-runs",
        "/v1/fleet/%252e%252e/control/list-runs",
        "//v1/control/list-runs",
        "/V1/CONTROL/list-runs",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/",
    ],
)
def test_no_way_of_writing_a_path_leads_around_it(federation: Federation, path: str) -> None:
    assert federation.status("POST", path) in (400, 403)


@with_nginx
def test_plain_text_is_refused(federation: Federation) -> None:
    connection = http.client.HTTPConnection("localhost", federation.proxy, timeout=PATIENCE)
    connection.request("POST", "/v1/fleet/pull-messages")
    assert connection.getresponse().status == 400
    connection.close()


@with_nginx
def test_a_piece_of_a_model_is_not_too_large(federation: Federation) -> None:
    from flwr.common.constant import FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

    largest = max(FAB_MAX_SIZE, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
    body = bytes(largest + largest // 8)  # and what is around it
    assert federation.status("POST", "/v1/fleet/push-object", body=body) != 413
    assert federation.status("POST", "/v1/fleet/push-object", body=bytes(17 * 2**20)) == 413
