"""Split a secret of 32 bytes into shares. Any `threshold` of them give the secret, and fewer give nothing."""

from __future__ import annotations

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

from fedskew.flower.wire import Garbled

SECRET_BYTES = 32
_HALF = 16
"""The library splits 16 bytes at a time. Both halves of a secret have shares with the same numbers."""


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares 1 to `count`, in this order."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes; expected {SECRET_BYTES}")
    halves = (Shamir.split(threshold, count, secret[start : start + _HALF], False) for start in (0, _HALF))
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from exactly `threshold` shares, by their numbers. Wrong shares give a wrong secret."""
    if any(len(share) != SECRET_BYTES for share in shares.values()):
        raise Garbled(f"a share does not have {SECRET_BYTES} bytes")
    halves = ([(number, share[start : start + _HALF]) for number, share in shares.items()] for start in (0, _HALF))
    return b"".join(Shamir.combine(half, False) for half in halves)
