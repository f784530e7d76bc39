"""Child processes of a federation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedskew.errors import UserError
from fedskew.flower.credentials import make_credentials
from fedskew.flower.processes import Process, await_tls, free_ports

SERVER = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1], sys.argv[2])
with socket.create_server(("127.0.0.1", int(sys.argv[3]))) as plain:
    while True:
        try:
            context.wrap_socket(plain.accept()[0], server_side=True).close()
        except OSError:
            pass
"""


def test_a_server_with_a_certificate_of_another_authority_is_not_awaited_for_ever(tmp_path: Path) -> None:
    """It answers, so the error names the certificate, too."""
    ours, theirs = (make_credentials(tmp_path / name, ["north"]) for name in ("ours", "theirs"))
    (port,) = free_ports(1)
    command = [sys.executable, "-c", SERVER, str(theirs.certificate), str(theirs.key), str(port)]
    process = Process("server", command, tmp_path / "server.log", {})
    try:
        await_tls(process, port, theirs.authority, 60)
        with pytest.raises(UserError, match=rf"on port {port} with a certificate of .*ours/ca\.pem after 0\.5 s"):
            await_tls(process, port, ours.authority, 0.5)
    finally:
        process.kill()
