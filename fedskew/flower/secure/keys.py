"""Cryptography between two sites of a session: they agree on a secret, and encrypt shares for each other."""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedskew.flower.wire import Garbled

KEY_BYTES = 32
_NONCE_BYTES = 12


class AgreementKey:
    """A key pair for one session. Two sites that know each other's public keys agree on a secret."""

    def __init__(self, private: bytes | None = None) -> None:
        self._key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)

    @property
    def private(self) -> bytes:
        return self._key.private_bytes_raw()

    @property
    def public(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def agree(self, other: bytes, purpose: bytes) -> bytes:
        """Derive the secret that only the owners of this key and of `other` can compute.

        Each `purpose` gives a different secret.
        """
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:  # a wrong length, or a point of small order
            raise Garbled("a public key is not valid") from error
        return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=purpose).derive(shared)


def encrypt(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate the content. `decrypt` needs the same `context`."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, content, context)


def decrypt(key: bytes, sealed: bytes, context: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context)
    except (InvalidTag, ValueError) as error:
        raise Garbled("shares from another site were changed, or belong to another session") from error
