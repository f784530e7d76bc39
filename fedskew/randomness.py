"""Random numbers drawn by key, not from a sequence.

Every random choice is a function of (seed, purpose, round, client, epoch, …), never of how many numbers were drawn
before. A run therefore makes the same choices on any engine, in any order and after a resume.

Numpy's Philox generates numbers on the host, for choices such as the split and the clients of a round. A counter-based
hash in integer tensor arithmetic has the same bits on every device. It serves augmentation and dropout, for instance.
`integer_key` seeds torch's own generator, for instance for initial weights.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE

_MASK32 = 0xFFFFFFFF
_SMALL = 4096
"""If there are fewer items than this, `sample` permutes all of them, which is fast enough."""


def _sequence(seed: int, purpose: str, key: tuple[int, ...]) -> np.random.SeedSequence:
    words = (seed, zlib.crc32(purpose.encode()), *key)
    if max(words) > _MASK32:  # numpy splits larger numbers into several words
        return np.random.SeedSequence(words)
    return np.random.SeedSequence(np.array(words, dtype=np.uint32))  # the same sequence, several times faster


def generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the numpy generator for this seed, purpose and key."""
    return np.random.Generator(np.random.Philox(_sequence(seed, purpose, key)))


def permutation(n: int, seed: int, purpose: str, *key: int) -> np.ndarray:
    """Return a permutation of range(n). It is made from raw bits, whose stream numpy promises never to change."""
    return _order(np.random.Philox(_sequence(seed, purpose, key)).random_raw(n))


def raw_uniforms(n: int, seed: int, purpose: str, *key: int) -> np.ndarray:
    """Return n float64 numbers in [0, 1), made from raw bits, as in `permutation`."""
    bits: np.ndarray = np.random.Philox(_sequence(seed, purpose, key)).random_raw(n)
    return (bits >> np.uint64(11)) * 2.0**-53


def raw_normals(n: int, seed: int, purpose: str, *key: int) -> np.ndarray:
    """Return n standard normal numbers in float64, made from raw bits, as in `permutation` (Box and Muller)."""
    first, second = raw_uniforms(n + n % 2, seed, purpose, *key).reshape(2, -1)
    radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * np.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:n]


def _order(bits: np.ndarray) -> np.ndarray:
    """Return `np.argsort(bits, kind="stable")`, faster.

    If all values differ, as they nearly always do, the default sort gives the same order in half the time.
    """
    order: np.ndarray = np.argsort(bits)
    ranked = bits[order]
    return np.argsort(bits, kind="stable") if (ranked[1:] == ranked[:-1]).any() else order


def sample(m: int, n: int, seed: int, purpose: str, *key: int) -> np.ndarray:
    """Draw m of range(n) without replacement, in random order.

    If n is small or m is large, the result is the first m of `permutation`. Otherwise the numbers are drawn directly,
    at a cost that does not depend on n.
    """
    if n < _SMALL or 8 * m > n:
        return permutation(n, seed, purpose, *key)[:m]
    draws = 2 * m
    while True:
        bits: np.ndarray = np.random.Philox(_sequence(seed, purpose, key)).random_raw(draws)
        numbers, first = np.unique(bits % np.uint64(n), return_index=True)
        if len(first) >= m:
            return numbers[np.argsort(first)[:m]].astype(np.int64)
        draws *= 2


def integer_key(seed: int, purpose: str, *key: int) -> int:
    """Return a 32-bit key for `uniform` or for seeding torch."""
    return int(_sequence(seed, purpose, key).generate_state(1)[0])


_GOLDEN = 0x9E3779B9 - (1 << 32)
"""The bits of the golden ratio. The number is signed, because Triton cannot add an unsigned 32-bit constant."""


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit hash with low bias (Wellons' lowbias32), on int64 tensors."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def fold(keys: Tensor, value: Tensor | int) -> Tensor:
    """Derive new keys from `keys` and `value`, which broadcast. Both are int64 and hold 32-bit numbers."""
    if not isinstance(value, Tensor):
        value = torch.full((), value & _MASK32, dtype=torch.int64, device=keys.device)
    return _mix(_mix(keys) ^ _mix((value + _GOLDEN) & _MASK32))


def uniform(keys: Tensor, draw: Tensor | int) -> Tensor:
    """Return one float32 number in [0, 1) per key, at index `draw` of the key's sequence.

    All devices give the same numbers.
    """
    return (fold(keys, draw) >> 8).to(torch.float32) * (1.0 / (1 << 24))


def normal(keys: Tensor, draw: int = 0) -> Tensor:
    """Return one standard normal number per key, at index `draw` of the key's sequence (Box and Muller).

    The result is float64 if the device has that format.
    """
    accurate = ACCURATE[keys.device.type]
    first, second = ((fold(keys, 2 * draw + part).to(accurate) + 0.5) / (1 << 32) for part in (0, 1))
    return (-2 * first.log()).sqrt() * (2 * torch.pi * second).cos()
