"""Times of whole commands: real processes, their targets and their table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.lab.benchmark import plan as plans
from fedskew.lab.benchmark.commands import START_UP, Command, CommandTime, time_commands
from fedskew.lab.benchmark.plan import default_plan, groups
from fedskew.lab.benchmark.results import Results
from fedskew.lab.benchmark.run import Benchmark
from fedskew.lab.benchmark.tables import markdown
from fedskew.lab.benchmark.targets import targets
from fedskew.lab.benchmark.timing import TimingLength
from fedskew.lab.benchmark.whole_runs import FIRST, FIRST_FEDVLS, IMPORTS, ONE_ROUND, ONE_ROUND_FEDVLS, whole_runs

VERSION = Command(("--version",), "first line", bound=1000.0)


def test_a_command_is_timed_to_its_first_line_or_to_its_end() -> None:
    shown: list[str] = []
    to_line, to_end = time_commands([VERSION, replace(VERSION, until="end")], repetitions=1, show=shown.append)
    assert shown == ["fedskew --version"] * 4  # the first run of each is not counted
    assert (to_line.until, to_end.until) == ("first line", "end")
    assert len(to_line.seconds) == len(to_end.cpu_seconds) == 1
    assert 0 < to_end.cpu_time < 60
    assert 0 < to_line.time < 600


def test_a_command_may_have_files_and_empty_caches() -> None:
    code = "import os, pathlib; assert pathlib.Path('a.txt').read_text() == 'x'; assert 'TRITON' in os.environ[{!r}]"
    command = Command((), "end", files=(("a.txt", b"x"),), empty_caches=True, name="mine")
    shown: list[str] = []
    (time,) = time_commands(
        [replace(command, python=("-c", code.format("TRITON_CACHE_DIR")))], 1, shown.append, warm_up=False
    )
    assert time.command == "mine"
    assert shown == ["mine"]


def test_commands_keep_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    command = Command((), "end", python=("-c", "import sys; sys.exit(sys.dont_write_bytecode)"))
    assert time_commands([command], 1, lambda _: None, warm_up=False)


def test_whole_runs_are_valid_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is read by the real command line. It fails only because this machine has no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("fedskew.lab.benchmark.whole_runs._IMAGES", (6_000, 100))
    runs = whole_runs("cuda:0")
    by_name = {command.arguments[0]: command for command in (*runs.single, *runs.several) if command.arguments}
    assert list(by_name) == ["run", "compare", "sweep"]
    methods = {command.text: command.arguments[command.arguments.index("--method") + 1] for command in runs.single[1:]}
    assert [name for name, method in methods.items() if method != "fedavg"] == [FIRST_FEDVLS, ONE_ROUND_FEDVLS]
    for command in by_name.values():
        for name, content in command.files:
            Path(name).write_bytes(content)
        workers = ("--workers", "1") if command.arguments[0] == "sweep" else ()
        assert main([*command.arguments, *workers]) in (1, 2)  # a sweep reports failed runs by 1
        assert "no CUDA device is" in capsys.readouterr().err, command.text


def test_targets_of_whole_runs() -> None:
    seconds = {IMPORTS: 3.0, FIRST: 10.0, ONE_ROUND["bf16"]: 7.0, FIRST_FEDVLS: 12.0, ONE_ROUND_FEDVLS: 5.0}
    times = [CommandTime(name, "end", (value,), (value,)) for name, value in seconds.items()]
    results = Results({"device": "cuda", "gpu": "a GPU"}, {}, "fedskew bench", "today", commands=times)
    found = {target.what: (round(target.value, 3), target.met) for target in targets(results)}
    assert found == {
        f"{FIRST}: seconds after the imports": (7.0, True),
        f"{ONE_ROUND['bf16']}: seconds after the imports": (4.0, False),
        f"{FIRST_FEDVLS}: seconds after the imports": (9.0, False),
        f"{ONE_ROUND_FEDVLS}: seconds after the imports": (2.0, True),
    }


def test_a_command_that_fails_is_an_error_with_its_last_line() -> None:
    with pytest.raises(UserError, match=r"fedskew rum: exit status 2: error: unknown command 'rum'"):
        time_commands([Command(("rum",), "end")], repetitions=1, show=lambda _: None)


def test_every_device_measures_the_start_up() -> None:
    for device in ("cpu", "cuda"):
        (group,) = groups(replace(default_plan(device), levels=("start-up",)))
        assert group.commands == START_UP
    assert [(command.text.split()[1], command.bound) for command in START_UP] == [("--help", 0.5), ("run", 2.5)]


def test_a_benchmark_of_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "START_UP", (VERSION,))
    short = replace(default_plan("cpu"), levels=("start-up",), length=TimingLength(repetitions=1, seconds=0.01))
    results = Benchmark(short, "fedskew bench --only start-up").run(lambda *_: None)
    assert results.failures == []
    assert [time.command for time in results.commands] == ["fedskew --version"]
    assert Results.from_json(json.loads(json.dumps(results.to_json()))).commands == results.commands


def test_table_and_targets() -> None:
    help_, run = (
        CommandTime("fedskew --help", "end", (0.4, 0.6, 0.3), (0.2, 0.3, 0.25), 0.5),
        CommandTime("fedskew run", "first line", (3.0,), (2.0,), 2.5),
    )
    results = Results({"device": "cpu", "cpu": "a CPU"}, {}, "fedskew bench", "today", commands=[help_, run])
    first, second = targets(results)
    assert (first.what, first.value, first.met) == ("fedskew --help: seconds to its end", 0.4, True)
    assert (second.what, second.value, second.met) == ("fedskew run: seconds to its first line", 3.0, False)
    page = markdown(results)
    assert "| fedskew --help | end | 0.40 | 0.25 |" in page
    assert "| fedskew run | first line | 3.00 | 2.00 |" in page


def test_older_files_have_no_commands_and_damaged_ones_are_refused() -> None:
    value = Results({"device": "cpu"}, {}, "fedskew bench", "today").to_json()
    del value["commands"]
    assert Results.from_json(value).commands == []
    with pytest.raises(UserError, match=r"a command's time is damaged: KeyError: 'seconds'"):
        Results.from_json(value | {"commands": [{"command": "fedskew --help", "until": "end"}]})
