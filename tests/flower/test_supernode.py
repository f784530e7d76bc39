"""What a site checks before it connects, and once a day afterwards."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from expired_certificates import write_certificate

from fedskew.errors import UserError
from fedskew.flower import supernode
from fedskew.flower.credentials import Credentials, NodeKeys, make_credentials
from fedskew.flower.supernode import require_keys, require_trusted_server, supernode_command


@pytest.fixture
def keys(tmp_path: Path) -> NodeKeys:
    return make_credentials(tmp_path / "keys", ["a"]).node("a")


@pytest.fixture
def plain_server() -> Iterator[int]:
    """One that answers in plain text."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_plain_text_is_refused_in_words(keys: NodeKeys, plain_server: int) -> None:
    with pytest.raises(UserError, match=f"localhost:{plain_server} does not use TLS"):
        require_trusted_server(f"localhost:{plain_server}", keys)


def test_a_server_that_ends_the_handshake_uses_tls(keys: NodeKeys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(bytes([21, 3, 3, 0, 2, 2, 40]))  # a fatal alert: handshake failure

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"localhost:{port} ends the TLS handshake .*handshake failure"):
            require_trusted_server(f"localhost:{port}", keys)
        thread.join()


def test_a_server_that_is_not_there_is_named(keys: NodeKeys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be reached"):
        require_trusted_server(f"127.0.0.1:{port}", keys)


@pytest.mark.parametrize(
    "address", ["server", "https://server:8000", "server:port", ":8000", "fl..example.org:9092", "127.0.0.1:90920"]
)
def test_an_address_is_a_host_and_a_port(address: str, keys: NodeKeys) -> None:
    with pytest.raises(UserError, match="expected HOST:PORT"):
        require_trusted_server(address, keys)


def test_a_key_that_others_can_read_is_refused(keys: NodeKeys) -> None:
    require_keys(keys)
    keys.private.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        require_keys(keys)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen makes the keys")
@pytest.mark.parametrize(
    ("kind", "passphrase", "reason"),
    [
        ("ecdsa", "secret", "is not readable .* expected a node key without a passphrase"),
        ("ed25519", "", "is not an ECDSA key; expected one that `ssh-keygen -t ecdsa -b 384` makes"),
    ],
)
def test_a_key_that_flower_does_not_accept_is_refused(kind: str, passphrase: str, reason: str, keys: NodeKeys) -> None:
    keys.private.unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", keys.private], check=True)
    with pytest.raises(UserError, match=rf"node\.key {reason}"):
        require_keys(keys)


def test_a_file_that_is_no_key_is_refused(keys: NodeKeys) -> None:
    keys.private.write_text(keys.public.read_text())
    with pytest.raises(UserError, match=r"node\.key is not readable .* expected a node key"):
        require_keys(keys)


def test_a_key_of_a_kind_that_is_not_known_is_refused(keys: NodeKeys) -> None:
    """For instance, one that a later version of OpenSSH makes."""
    first, *lines, last = keys.private.read_bytes().splitlines()
    content = base64.b64decode(b"".join(lines)).replace(b"ecdsa-sha2-nistp384", b"ecdsa-sha2-nistp999")
    keys.private.write_bytes(first + b"\n" + base64.encodebytes(content) + last + b"\n")
    with pytest.raises(UserError, match=r"node\.key is not readable \(Unsupported key type"):
        require_keys(keys)


def test_keys_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no node\.key"):
        require_keys(NodeKeys(tmp_path))


@pytest.mark.parametrize("content", [b"", b"a letter", bytes(range(256))], ids=["empty", "text", "binary"])
def test_an_authority_that_is_no_certificate_is_named(content: bytes, keys: NodeKeys) -> None:
    keys.authority.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*ca\.pem \(.*\); expected an authority's certificate in PEM"):
        require_trusted_server("localhost:1", keys)


def test_without_an_authority_of_its_own_a_site_trusts_those_of_its_system(keys: NodeKeys, tmp_path: Path) -> None:
    assert "--root-certificates" in supernode_command(tmp_path / "site.yaml", "a:1", keys, 2)
    keys.authority.unlink()
    assert "--root-certificates" not in supernode_command(tmp_path / "site.yaml", "a:1", keys, 2)


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[Credentials, str]]:
    """One that shows the certificate that its keys have at the moment, and its address."""
    keys = make_credentials(tmp_path / "tls", ["a"])
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(keys.certificate, keys.key)
            with connection, contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    yield keys, f"localhost:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_an_expired_certificate_is_refused(tls_server: tuple[Credentials, str]) -> None:
    keys, address = tls_server
    require_trusted_server(address, keys.node("a"))
    write_certificate(keys, timedelta(days=-2))
    refusal = (
        rf"the certificate of {address} is refused \(certificate has expired\); expected one for localhost that "
        r"has not expired and is signed by .*ca\.pem"
    )
    with pytest.raises(UserError, match=refusal):
        require_trusted_server(address, keys.node("a"))


def test_the_certificate_is_looked_at_once_a_day(
    tls_server: tuple[Credentials, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One day each: a fresh certificate, one in its last month, an expired one, and a renewed one."""
    keys, address = tls_server
    logged: list[str] = []
    days = iter((365, 10, -2, 300))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        logged.append("a day")
        write_certificate(keys, timedelta(days=next(days)))

    monkeypatch.setattr(supernode, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(StopIteration):
        supernode.watch_certificate(address, keys.node("a"), logged.append)
    assert set(slept) == {24 * 3600.0}
    first, second, soon, third, expired, fourth, last = logged
    assert {first, second, third, fourth, last} == {"a day"}
    assert soon.startswith(f"warning: the certificate of {address} expires on ")
    assert "in less than 10 days" in soon
    assert expired.startswith(f"warning: the certificate of {address} is refused (certificate has expired)")
