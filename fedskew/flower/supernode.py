"""A site's SuperNode: how it is started, and what can be known to go wrong before it is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

from fedskew.errors import UserError
from fedskew.flower.credentials import NodeKeys
from fedskew.flower.processes import environment

_CONNECT_SECONDS = 10.0


def node_config(site: Path) -> str:
    """What a SuperNode tells its ClientApps: where the site's own configuration lies."""
    return f"site={json.dumps(str(site.resolve()))}"


def supernode_command(site: Path, superlink: str, keys: NodeKeys, port: int, config: str | None = None) -> list[str]:
    """The command that connects a site; `port` is one on this machine's loopback that Flower uses within the site."""
    command = ["flower-supernode", "--superlink", superlink]
    if keys.authority.exists():
        command += ["--root-certificates", str(keys.authority.resolve())]
    command += ["--auth-supernode-private-key", str(keys.private.resolve()), "--port", str(port)]
    return [*command, "--node-config", config or node_config(site)]


def require_keys(keys: NodeKeys) -> None:
    if not keys.private.is_file():
        raise UserError(f"{keys.folder} has no node.key; expected a site's folder as `fedskew federate certs` makes it")
    if os.name == "posix" and keys.private.stat().st_mode & 0o077:
        raise UserError(f"{keys.private} can be read by others: whoever has it is this site; chmod 600 {keys.private}")


def require_trusted_server(superlink: str, keys: NodeKeys) -> None:
    """Refuse a server that is not there, does not speak TLS, or that the site's authority does not vouch for."""
    host, port = _address(superlink)
    authority = str(keys.authority) if keys.authority.exists() else None
    context = ssl.create_default_context(cafile=authority)
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        vouching = authority or "an authority of this system"
        raise UserError(
            f"the certificate of {superlink} is refused ({error.verify_message}); expected one signed by {vouching}"
        ) from error
    except (ssl.SSLError, ConnectionResetError) as error:
        raise UserError(f"{superlink} does not speak TLS; expected a SuperLink or proxy with a certificate") from error
    except OSError as error:
        raise UserError(f"{superlink} cannot be reached ({error.strerror or error}); expected a SuperLink") from error


def run_supernode(command: list[str], keys: NodeKeys) -> None:
    """Run it until it ends or is asked to; what it started ends with it."""
    whole = environment({})
    program = shutil.which(command[0], path=whole["PATH"]) or command[0]
    process = subprocess.Popen([program, *command[1:]], stderr=subprocess.PIPE, env=whole, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: process.send_signal(received))
    refused = False
    try:
        assert process.stderr is not None
        for line in process.stderr:
            refused = refused or _REFUSED in line
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
            if b"Finished server process" in line:  # its helper may hold on to the pipe
                break
        status = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if refused:
        raise UserError(
            f"the server refuses the key {keys.private}: it is not registered there, or its last connection is less "
            f"than a minute old; its operator runs `flwr supernode register {keys.public.name} --name NAME`"
        )
    if status:
        raise UserError(f"the SuperNode ended with status {status}; its last lines say why")


_REFUSED = b"Failed to activate SuperNode"


def _address(superlink: str) -> tuple[str, int]:
    host, colon, port = superlink.rpartition(":")
    if not colon or not port.isdecimal() or not host or "/" in host:
        raise UserError(f"superlink is {superlink!r}; expected HOST:PORT, such as fl.example.org:8000")
    return host.strip("[]"), int(port)
