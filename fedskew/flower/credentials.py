"""The keys of a test federation, as files.

    ca.pem, ca.key              the certificate authority; its key is needed only to sign server certificates
    server.pem, server.key      the certificate of the SuperLink, or of the proxy in front of it
    sites/NAME/                 the files of one site: ca.pem, node.key, node.pub

TLS proves the server's identity to the sites. A node's key proves the site's identity to the server.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography.x509 import Certificate

from fedskew.errors import UserError
from fedskew.experiment.storage.files import replace_file, reporting_os_errors
from fedskew.flower import certificates

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names in every server certificate, for processes on the server itself."""
SECRET, PUBLIC = 0o600, 0o644
"""Permissions of files."""
_MOST_DAYS = 36500
"""The longest validity of a certificate, about a century. A certificate cannot have a date after the year 9999."""
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
"""One part of a host's name, between dots."""
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class NodeKeys:
    """Paths of the files in a site's folder."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def private(self) -> Path:
        return self.folder / "node.key"

    @property
    def public(self) -> Path:
        return self.folder / "node.pub"


@dataclass(frozen=True)
class Credentials:
    """Paths of the files of a federation's keys. `certificate` and `key` are the server's."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def authority_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    def node(self, site: str) -> NodeKeys:
        return NodeKeys(self.folder / "sites" / site)


def make_credentials(
    folder: str | Path, sites: Sequence[str], hosts: Iterable[str] = (), days: int = 365
) -> Credentials:
    """Make the missing files for these sites and for a server with these host names.

    Existing files stay, so a site can be added to a running federation. The server's certificate and its key are
    exceptions: they are replaced if one of them is missing, or if the certificate lacks a host name or expires within a
    month. The new certificate is valid for `days`. It keeps the old host names, unless the old key was missing. Only a
    new certificate needs the authority's key. Without that key, a certificate in its last month stays. If one file of a
    site's key pair is missing, both are made anew. A site's ca.pem is always replaced by a copy of the authority's.
    """
    _check_sites(sites)
    if not 1 <= days <= _MOST_DAYS:
        raise UserError(f"days is {days}; expected 1 to {_MOST_DAYS}")
    names = [_checked_host(host) for host in (*LOCAL, *hosts)]
    credentials = Credentials(Path(folder))
    _make_folder(credentials.folder)
    _make_server_certificate(credentials, names, days)
    for site in sites:
        _make_node(credentials, site)
    return credentials


def require_private(key: Path) -> None:
    """Refuse a private key that other users can read."""
    if os.name == "posix" and key.stat().st_mode & 0o077:
        raise UserError(f"{key} can be read by others, who could pose as this site; chmod 600 {key}")


def is_site_name(name: str) -> bool:
    """Whether a site may have this name, which is also the name of a folder."""
    return _SITE_NAME.fullmatch(name) is not None


def _check_sites(sites: Sequence[str]) -> None:
    if not sites:
        raise UserError("no sites are named; expected names such as north,south,east")
    for site in sites:
        if not is_site_name(site):
            raise UserError(
                f"site {site!r} cannot be a folder's name; expected letters, digits, '.', '-' and '_', beginning with "
                "a letter or a digit"
            )
    if repeated := [site for site in sites if list(sites).count(site) > 1]:
        raise UserError(f"site {repeated[0]!r} is named twice; expected different names")


def _checked_host(host: str) -> str:
    """Return the host as certificates spell it: an address in its standard form, a name in lower case."""
    if certificates.is_address(host):
        return str(ipaddress.ip_address(host))
    if not _HOST_NAME.fullmatch(host) or host.rpartition(".")[-1].isdigit():  # 999.1.1.1 is no address, and no name
        raise UserError(
            f"host {host!r} is neither a host's name nor an address; expected one without scheme and port, "
            "such as fl.example.org or 10.0.0.5"
        )
    return host.lower()


def _make_server_certificate(credentials: Credentials, hosts: list[str], days: int) -> None:
    """Make the server's certificate and key, unless those in the folder have all hosts and need no renewal."""
    known = _certified_hosts(credentials)
    if set(hosts) <= set(known) and not _must_renew(credentials):
        with _report_damage(credentials.authority):
            certificates.check_issuer(_read(credentials.certificate), _read(credentials.authority))
        return
    authority, authority_key = _authority(credentials)
    certificate, key = certificates.issue(authority, authority_key, dict.fromkeys((*known, *hosts)), days)
    _write(credentials.key, key, SECRET)
    _write(credentials.certificate, certificate, PUBLIC)


def _must_renew(credentials: Credentials) -> bool:
    """Whether the server's certificate has expired, or is in its last month and the authority's key is there."""
    days = certificates.RENEWAL_DAYS if credentials.authority_key.exists() else 0
    return certificates.expires_within(_read(credentials.certificate), days)


def expires_soon(credentials: Credentials) -> bool:
    """Whether the server's certificate is in its last month."""
    return certificates.expires_within(_read(credentials.certificate), certificates.RENEWAL_DAYS)


def _certified_hosts(credentials: Credentials) -> tuple[str, ...]:
    """Return the host names in the server's certificate. Empty if the server has no certificate or no key."""
    if not credentials.certificate.exists() or not credentials.key.exists():
        return ()
    with _report_damage(credentials.certificate):
        hosts = certificates.certificate_hosts(_read(credentials.certificate))
    if not hosts:
        raise UserError(
            f"{credentials.certificate} names no host; expected a certificate with subject alternative names: "
            "delete it, and `fedskew federate certs` makes a new one"
        )
    return hosts


def _authority(credentials: Credentials) -> tuple[Certificate, certificates.Key]:
    """Load the authority in the folder, or make a new one."""
    if credentials.authority_key.exists():
        with _report_damage(credentials.authority, credentials.authority_key):
            return certificates.load_authority(_read(credentials.authority), credentials.authority_key)
    if credentials.authority.exists():
        raise UserError(
            f"{credentials.authority_key} is missing, and the server needs a new certificate; put the authority's key "
            "there until the certificate is signed, or choose another folder"
        )
    authority, key = certificates.new_authority()
    _write(credentials.authority_key, certificates.key_pem(key), SECRET)
    _write(credentials.authority, certificates.certificate_pem(authority), PUBLIC)
    return authority, key


def _make_node(credentials: Credentials, site: str) -> None:
    """Write the site's folder. An existing key pair stays, because it is the site's identity."""
    node = credentials.node(site)
    _make_folder(node.folder)
    _write(node.authority, _read(credentials.authority), PUBLIC)
    if node.private.exists() and node.public.exists():
        return
    private, public = certificates.node_key_pair(site)
    _write(node.private, private, SECRET)
    _write(node.public, public, PUBLIC)


@contextmanager
def _report_damage(*paths: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        names = " or ".join(map(str, paths))
        raise UserError(f"{names} cannot be used ({error}); restore it, or choose another folder") from error


def _read(path: Path) -> bytes:
    with reporting_os_errors("read", path):
        return path.read_bytes()


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically. Its permissions are `mode` from the start."""

    def put(draft: Path) -> None:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)

    replace_file(path, put)


def _make_folder(folder: Path) -> None:
    with reporting_os_errors("write", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
