"""A site's SuperNode: the checks before it starts, its command, and the reasons why it ends."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedskew.errors import UserError, plural
from fedskew.flower.certificates import read_node_key
from fedskew.flower.credentials import NodeKeys, require_private
from fedskew.flower.processes import environment, last_message
from fedskew.platforms import kill_group

_CONNECT_SECONDS = 10.0
_LAST_PORT = 65535
_REASON_SECONDS = 5.0
"""Seconds to wait for the line in which Flower says why it gave up."""
_GRACE_SECONDS = 30.0
"""Seconds in which the SuperNode may end before it is killed."""
_DAY_SECONDS = 24 * 3600.0
_WARNING_DAYS = 30

_CONNECTED, _RECONNECTED = "SuperNode ID: ", "Connection successful after "
"""Flower's messages when a connection begins, and when it comes back."""
_RETRIES = "Connection attempt failed, retrying"
"""Flower's message when it cannot connect, also after it has lost a connection."""
_REFUSED = "Failed to activate SuperNode"
"""Flower's message when the server does not accept the site's key."""
_GAVE_UP = ("SSL/TLS handshake error detected", "Giving up reconnection")
"""Flower's messages when it gives up: at once if the certificate is wrong, otherwise after some attempts."""


def node_config(site: Path) -> str:
    """Return Flower's node configuration, which tells ClientApps where site.yaml is. `site` is its path."""
    return f"site={json.dumps(str(site.resolve()), ensure_ascii=False)}"


def supernode_command(site: Path, superlink: str, keys: NodeKeys, port: int, config: str | None = None) -> list[str]:
    """Return the command that connects a site. Flower's processes at the site talk to each other on `port`.

    `site` is the path of its site.yaml, and `superlink` is HOST:PORT. `config` replaces `node_config(site)`.
    """
    command = [sys.executable, "-m", "fedskew.flower.node", "--superlink", superlink]
    if keys.authority.exists():
        command += ["--root-certificates", str(keys.authority.resolve())]
    command += ["--auth-supernode-private-key", str(keys.private.resolve()), "--port", str(port)]
    return [*command, "--node-config", config or node_config(site)]


def require_keys(keys: NodeKeys) -> None:
    if not keys.private.is_file():
        raise UserError(f"{keys.folder} has no node.key; expected a site's folder as `fedskew federate certs` makes it")
    require_private(keys.private)
    read_node_key(keys.private)


def require_trusted_server(superlink: str, keys: NodeKeys) -> datetime:
    """Return the time at which the server's certificate expires.

    Refuse a server that cannot be reached, that does not use TLS, or whose certificate the site does not trust.
    """
    host, port = _address(superlink)
    authority = keys.authority if keys.authority.exists() else None
    context = _tls_context(authority)
    try:
        with (
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            certificate = secure.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        signer = authority or "an authority of this system"
        raise UserError(
            f"the certificate of {superlink} is refused ({error.verify_message.rstrip('.')}); expected one for {host} "
            f"that has not expired and is signed by {signer}"
        ) from error
    except (ssl.SSLError, ConnectionResetError) as error:
        if (getattr(error, "reason", None) or "").startswith(("TLSV1", "SSLV3")):  # the server's alert, so it uses TLS
            raise UserError(f"{superlink} ends the TLS handshake ({error}); ask the server's operator") from error
        raise UserError(f"{superlink} does not use TLS; expected a SuperLink or proxy with a certificate") from error
    except OSError as error:
        raise UserError(f"{superlink} cannot be reached ({error.strerror or error}); expected a SuperLink") from error
    except UnicodeError as error:  # for example, two dots in a row
        raise UserError(f"superlink is {superlink!r}; expected HOST:PORT, such as fl.example.org:9092") from error
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)


def _tls_context(authority: Path | None) -> ssl.SSLContext:
    """Make a context that trusts this authority's certificate, or the authorities of the system."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:  # ssl.SSLError is an OSError, too
        raise UserError(
            f"cannot read {authority} ({error.strerror or error}); expected an authority's certificate in PEM, as the "
            "server's operator sends it"
        ) from error


def expiry_warning(superlink: str, expires: datetime) -> str | None:
    """Return a warning if the server's certificate expires within 30 days."""
    left = expires - datetime.now(UTC)
    if left >= timedelta(days=_WARNING_DAYS):
        return None
    return (
        f"warning: the certificate of {superlink} expires on {expires:%Y-%m-%d}, in less than "
        f"{plural(left.days + 1, 'day')}; the server's operator can renew it with `fedskew federate certs` and must "
        "then restart the SuperLink and the proxy"
    )


def watch_certificate(superlink: str, keys: NodeKeys, log: Callable[[str], None]) -> None:
    """Once a day, check the server's certificate. Log a warning if the check fails or the certificate expires soon."""
    while True:
        time.sleep(_DAY_SECONDS)
        try:
            warning = expiry_warning(superlink, require_trusted_server(superlink, keys))
        except UserError as error:
            warning = f"warning: {error}"
        if warning:
            log(warning)


class Connection:
    """The state of a SuperNode's connection, which is read from the lines that the SuperNode prints."""

    def __init__(self) -> None:
        self.problem: str | None = "the site has not connected to the server yet"
        """Why the site is not connected. None if it is connected."""

    def read(self, line: str) -> None:
        """Read a line of the SuperNode's output."""
        if _CONNECTED in line or _RECONNECTED in line:
            self.problem = None
        elif _RETRIES in line:
            self.problem = "there is no connection to the server; Flower tries again"
        elif _REFUSED in line:
            self.problem = "the server refuses the site's key"
        elif any(words in line for words in _GAVE_UP):
            self.problem = "the SuperNode lost its server and gave up"


def run_supernode(
    command: list[str],
    keys: NodeKeys,
    show: Callable[[str], None],
    connection: Connection,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a SuperNode until it ends, is terminated, or gives up on the server. Then end all of its processes.

    `show` and `connection` receive each line of the SuperNode's output.
    """
    full_env = environment(env or {})
    program = shutil.which(command[0], path=full_env["PATH"]) or command[0]
    process = subprocess.Popen(
        [program, *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=full_env,
        umask=0o077,
        start_new_session=True,
    )
    is_terminated = False

    def end(received: int, _: object) -> None:
        nonlocal is_terminated
        is_terminated = True
        process.send_signal(received)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    is_refused, why_lost = False, ""
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            show(line)
            connection.read(line)
            is_refused = is_refused or _REFUSED in line
            gave_up = any(words in line for words in _GAVE_UP)
            if why_lost and not gave_up:  # the line after Flower's message has the reason
                why_lost = last_message(line)
                break
            if gave_up and not why_lost and not is_terminated:
                why_lost = "Flower gave up"
                # The SuperNode would stay alive, but would not try to connect again. End it even if no reason follows.
                threading.Timer(_REASON_SECONDS, process.terminate).start()
            if "Finished server process" in line:  # the SuperNode ends, but its SuperExec may keep the pipe open
                break
        if why_lost:
            process.terminate()
        status = _wait(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill_group(process)
    if is_refused:
        raise UserError(
            f"the server refuses the key {keys.private}: it is not registered there, or its last connection is less "
            "than a minute old; the server's operator can register it with `flwr supernode register "
            f"{keys.public.name} --name NAME`"
        )
    if why_lost:
        raise UserError(f"the SuperNode lost its server and gave up ({why_lost}); start this command again")
    if status:
        raise UserError(f"the SuperNode ended with status {status}; see its last lines")


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _address(superlink: str) -> tuple[str, int]:
    host, colon, port = superlink.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT or not host or "/" in host:
        raise UserError(f"superlink is {superlink!r}; expected HOST:PORT, such as fl.example.org:9092")
    return host.strip("[]"), int(port)
