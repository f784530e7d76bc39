"""Private keys that need a passphrase."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)


def encrypt(key: Path, form: PrivateFormat = PrivateFormat.PKCS8) -> None:
    """Replace a private key's file by an encrypted one, as `openssl` writes it."""
    private = load_pem_private_key(key.read_bytes(), password=None)
    key.write_bytes(private.private_bytes(Encoding.PEM, form, BestAvailableEncryption(b"a passphrase")))
