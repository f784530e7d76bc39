"""The logs of `federate run`, `site` and `up`: levels, times, JSON, and no colours outside a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedskew.cli import main
from fedskew.cli.federate_log import CommandLog

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"
OUTPUT = (
    "\x1b[92mINFO \x1b[0m:      SuperNode ID: 17\n",
    "\x1b[93mWARNING \x1b[0m:   Connection attempt failed, retrying in 1.00 seconds\n",
    "fedskew: warning: a column lies far from the contract's mean\n",
    "fedskew: warning: the server's request is refused: no\n",
    "Traceback (most recent call last):\n",
    "\x1b[94mDEBUG \x1b[0m:     a detail\n",
    "\n",
)
"""Lines as Flower's SuperNode and the site's worker print them."""


def logged(log: CommandLog, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    for line in OUTPUT:
        log.write_output(line)
    return capsys.readouterr().err.splitlines()


def test_every_line_of_text_has_a_time_and_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    lines = logged(CommandLog("site"), capsys)
    assert all(re.match(f"{TIME} ", line) for line in lines)
    assert [re.sub(f"^{TIME} ", "", line) for line in lines] == [
        "SuperNode ID: 17",
        "warning: Connection attempt failed, retrying in 1.00 seconds",
        "warning: a column lies far from the contract's mean",
        "warning: the server's request is refused: no",
        "Traceback (most recent call last):",
    ]


def test_a_line_of_json_says_who_wrote_what_at_which_level(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [json.loads(line) for line in logged(CommandLog("site", "json", "debug"), capsys)]
    assert [(entry["level"], entry["source"]) for entry in entries] == [
        ("info", "flower"),
        ("warning", "flower"),
        ("warning", "fedskew"),
        ("warning", "fedskew"),
        ("info", "flower"),
        ("debug", "flower"),
    ]
    assert entries[2]["message"] == "a column lies far from the contract's mean"
    assert {entry["component"] for entry in entries} == {"site"}
    assert all(re.fullmatch(TIME, entry["time"]) for entry in entries)


@pytest.mark.parametrize(("level", "number"), [("debug", 6), ("info", 5), ("warning", 3), ("error", 0)])
def test_lower_levels_are_left_out(level: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(logged(CommandLog("site", "text", level), capsys)) == number


def test_the_reason_of_an_early_end_is_the_last_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = tmp_path / "app"
    assert main(["federate", "init", str(app), "--sites", "a,b", "--data", "digits"]) == 0
    capsys.readouterr()
    assert main(["federate", "run", str(app), "--log-format", "json", "--metrics-port", "-1"]) == 2
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(entry["level"], entry["component"]) for entry in entries] == [("error", "server")]
    assert "expected a free port" in entries[-1]["message"]


def test_other_formats_and_levels_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, message in (
        ("--log-format", "jsn", "unknown log format 'jsn'; did you mean 'json'?"),
        ("--log-level", "warn", "unknown log level 'warn'; did you mean 'warning'?"),
    ):
        assert main(["federate", "run", str(tmp_path), option, value]) == 2
        assert f"error: {message}" in capsys.readouterr().err
