"""Masks: vectors of numbers modulo 2⁶⁴. Without its seed, a mask is indistinguishable from random numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

Vector = npt.NDArray[np.uint64]
"""Numbers modulo 2⁶⁴. Sums wrap around."""

_COUNTER = bytes(16)
"""Every seed makes one mask, so the cipher's counter always starts at zero."""


def expand_seed(seed: bytes, length: int) -> Vector:
    """Return the mask of a seed: the key stream of AES-256 in counter mode."""
    stream = Cipher(algorithms.AES256(seed), modes.CTR(_COUNTER)).encryptor()
    return np.frombuffer(stream.update(bytes(8 * length)), dtype="<u8").astype(np.uint64)


def add_pairwise_mask(vector: Vector, seed: bytes, own: str, peer: str) -> Vector:
    """Add or subtract the mask that two sites share. One site adds it, the other subtracts it, so it cancels out."""
    mask = expand_seed(seed, len(vector))
    return vector + mask if own < peer else vector - mask
