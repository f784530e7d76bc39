"""Sites' identities: node keys, which sign session keys and lists of contributors, and the roster of public keys.

The roster is part of the federation's app. Before a site's administrator approves the app, the administrator asks the
other sites for the fingerprints of their keys, for example by telephone, and compares them with the roster. So a server
cannot pretend to be a site.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)

from fedskew.errors import UserError
from fedskew.flower.certificates import read_node_key
from fedskew.flower.wire import Garbled

Roster = Mapping[str, str]
"""The public node key of every site, as OpenSSH writes it, without the comment."""

_ALGORITHM = ec.ECDSA(hashes.SHA384())


class NodeIdentity:
    """A site's own node key."""

    def __init__(self, key: Path) -> None:
        self._key = read_node_key(key)

    @property
    def public(self) -> str:
        return self._key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()

    def sign(self, content: bytes) -> str:
        return self._key.sign(content, _ALGORITHM).hex()


def verify(public: str, signature: object, content: bytes) -> None:
    """Raise `Garbled` unless the owner of the public key signed the content."""
    try:
        load_public_key(public).verify(bytes.fromhex(str(signature)), content, _ALGORITHM)
    except (InvalidSignature, ValueError) as error:
        raise Garbled("its signature does not match its node key in the roster") from error


def load_public_key(line: str) -> ec.EllipticCurvePublicKey:
    """Load a public key in OpenSSH's format. Raise ValueError if it is not an ECDSA key."""
    try:
        key = load_ssh_public_key(line.encode())
    except UnsupportedAlgorithm as error:
        raise ValueError("an unsupported type of key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an ECDSA key")
    return key


def fingerprint(line: str) -> str:
    """Return the fingerprint that `ssh-keygen -l` shows."""
    hashed = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(hashed).decode().rstrip("=")


def read_roster(folder: Path, sites: Sequence[str]) -> dict[str, str]:
    """Read the sites' public keys from `NAME/node.pub` or `NAME.pub` in a folder."""
    return {site: _read_public_key(folder, site) for site in sites}


def require_different_keys(roster: Roster) -> None:
    """Refuse a roster in which two sites have the same key, because the key's owner would count as both sites.

    The same key can be written in several ways, for example with a comment, so the keys are read. Refuse a key that
    cannot be read.
    """
    owners: dict[bytes, str] = {}
    for name, line in roster.items():
        try:
            key = load_public_key(line).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        except ValueError as error:
            raise UserError(
                f"the key of {name!r} in federation.node_keys cannot be read ({error}); expected the content of its "
                "node.pub"
            ) from error
        if (other := owners.setdefault(key, name)) != name:
            raise UserError(
                f"federation.node_keys has the same key for {other!r} and {name!r}; expected a key per site"
            )


def _read_public_key(folder: Path, site: str) -> str:
    for path in (folder / site / "node.pub", folder / f"{site}.pub"):
        if path.is_file():
            line = " ".join(path.read_text(encoding="utf-8", errors="replace").split()[:2])
            try:
                load_public_key(line)
            except ValueError as error:
                raise UserError(
                    f"{path} has no public key of a site ({error}); expected the content of its node.pub"
                ) from error
            return line
    raise UserError(f"{folder} has no public key of {site!r}; expected {site}/node.pub or {site}.pub")
