"""What a run's folder says of its circumstances."""

from __future__ import annotations

import sys

import pytest

from fedskew.experiment.about import command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/usr/bin/fedskew", "run", "--set", "data.label=a b"], "fedskew run --set 'data.label=a b'"),
        (["/lib/fedskew/__main__.py", "run"], "python -m fedskew run"),
        (["/bin/my study.py"], "'my study.py'"),
        (
            ["/bin/flwr-serverapp", "--token", "s3cret", "--parent-pid", "7"],
            "flwr-serverapp --token hidden --parent-pid 7",
        ),
    ],
)
def test_the_command_is_kept_without_its_secrets(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert command() == said
