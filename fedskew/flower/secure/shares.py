"""Split a secret of 32 bytes into shares. A given number of shares recovers the secret. Fewer reveal nothing."""

from __future__ import annotations

from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir

from fedskew.flower.wire import Garbled

SECRET_BYTES = 32
_HALF = 16
"""The library splits 16 bytes at a time. So a share of a secret consists of one share of each half."""


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares 1 to `count`, in this order. Any `threshold` of them give the secret."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes; expected {SECRET_BYTES}")
    halves = (Shamir.split(threshold, count, secret[start : start + _HALF], False) for start in (0, _HALF))
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from exactly `threshold` shares and their numbers. Wrong shares give a wrong secret."""
    if any(len(share) != SECRET_BYTES for share in shares.values()):
        raise Garbled(f"a share does not have {SECRET_BYTES} bytes")
    halves = ([(number, share[start : start + _HALF]) for number, share in shares.items()] for start in (0, _HALF))
    return b"".join(Shamir.combine(half, False) for half in halves)
