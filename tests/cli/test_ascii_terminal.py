"""Output in encodings that lack characters of fedskew's messages."""

import pytest

from fedskew.cli.terminal import allow_any_encoding


@pytest.mark.parametrize(
    ("text", "in_ascii"),
    [
        ("interval −1.1 to +4.3", "interval -1.1 to +4.3"),
        ("ε = 2 at δ = 1e-5", "e = 2 at d = 1e-5"),
        ("Cohen's κ", "Cohen's k"),
        ("∞", "inf"),
        ("w ← Σ a_k·w_k", "w < S a_k.w_k"),
        ("Łódź", "??d?"),
    ],
)
def test_a_character_that_cannot_be_encoded_becomes_a_similar_one(text, in_ascii):
    allow_any_encoding()
    assert text.encode("ascii", errors="fedskew").decode() == in_ascii
