"""What a run's folder says of its circumstances."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError

import pytest

import fedskew as fs
from fedskew.experiment.storage.about import command, versions


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


def test_fedskews_version_is_told_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("fedskew.experiment.storage.about.version", not_installed)
    assert versions() == {"python": platform.python_version(), "fedskew": fs.__version__}
