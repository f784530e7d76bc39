"""Noise for privacy has the right distribution, and nobody can reproduce it."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from fractions import Fraction

import pytest
import torch

from fedskew.flower.secret_noise import draw_discrete_laplace, draw_normals

SIGMAS = 6
"""Chance alone exceeds this bound once in 500 million times."""


def test_torch_s_generator_would_have_few_different_streams() -> None:
    """Why it is not used: a server that tries 2³² seeds finds the one whose noise leaves a change within the clip."""
    streams = [torch.randn(99, generator=torch.Generator().manual_seed(7 + high * 2**32)) for high in (0, 1, 2**20)]
    assert all(torch.equal(streams[0], other) for other in streams[1:])


def test_every_byte_of_a_secret_key_changes_all_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [bytes(32), *(bytes(place) + b"\1" + bytes(31 - place) for place in range(32))]
    found = []
    for key in keys:
        monkeypatch.setattr(secrets, "token_bytes", lambda length, key=key: key[:length])
        found.append(draw_normals((50,)))
    assert all(bool((one != other).all()) for i, one in enumerate(found) for other in found[:i])


def test_normals_are_normal_and_new_each_time() -> None:
    count = 200_000
    some, other = draw_normals((count // 2, 2)), draw_normals((count // 2, 2))
    assert some.shape == (count // 2, 2)
    assert some.dtype == torch.float64
    assert not torch.equal(some, other)
    assert abs(float((some * other).mean())) < SIGMAS / math.sqrt(count)
    assert abs(float((some[:, 0] * some[:, 1]).mean())) < SIGMAS / math.sqrt(count / 2)
    for bound in (-3.0, -1.0, -0.2, 0.0, 0.5, 2.0):
        expected = 0.5 * math.erfc(-bound / math.sqrt(2))
        error = math.sqrt(expected * (1 - expected) / count)
        assert abs(float((some < bound).double().mean()) - expected) < SIGMAS * error
    assert draw_normals((0,)).shape == (0,)
    assert draw_normals(()).shape == ()


@pytest.mark.parametrize("rate", [Fraction(1, 2), Fraction(7, 3), Fraction(0.1)])
def test_discrete_laplace_has_the_stated_probabilities(rate: Fraction) -> None:
    count = 4000
    drawn = Counter(draw_discrete_laplace(rate) for _ in range(count))
    shrink = math.exp(-rate)
    for number in range(-4, 5):
        expected = (1 - shrink) / (1 + shrink) * shrink ** abs(number)
        assert abs(drawn[number] / count - expected) < SIGMAS * math.sqrt(expected * (1 - expected) / count) + 1 / count
