"""Time commands from their start to their first line of output or to their end. Each runs in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import fedskew
from fedskew.errors import UserError
from fedskew.platforms import cpu_seconds, wait_and_measure

Until = Literal["first line", "end"]
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Environment variables that set the cache folders of compiled kernels."""


@dataclass(frozen=True)
class Command:
    """A command of fedskew, or other Python code, which runs in a temporary folder."""

    arguments: tuple[str, ...]
    until: Until
    bound: float | None = None
    """The target: the largest accepted time in seconds, on an otherwise idle machine. None: no target."""
    name: str = ""
    """A short name for tables. If it is empty, tables show the command itself."""
    python: tuple[str, ...] = ("-m", "fedskew")
    """What the Python interpreter runs."""
    files: tuple[tuple[str, bytes], ...] = ()
    """Files in the temporary folder: their names and contents."""
    empty_caches: bool = False
    """Whether the caches of compiled kernels are empty, as on a new machine."""

    @property
    def text(self) -> str:
        return self.name or " ".join(("fedskew", *self.arguments))


START_UP = (
    Command(("--help",), "end", bound=0.5),
    Command(
        ("run", "--data", "digits", "--method", "fedavg", "--rounds", "2", "--device", "cpu"), "first line", bound=2.5
    ),
)
"""Commands that show how long a user waits for the first output."""


@dataclass(frozen=True)
class CommandTime:
    """The measured times of a command, one per repetition."""

    command: str
    until: Until
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    """CPU time of the command. Other programs affect it less than `seconds`."""
    bound: float | None = None

    @property
    def time(self) -> float:
        return median(self.seconds)

    @property
    def cpu_time(self) -> float:
        return median(self.cpu_seconds)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CommandTime:
        try:
            lists = {key: tuple(map(float, value[key])) for key in ("seconds", "cpu_seconds")}
            return cls(value["command"], value["until"], lists["seconds"], lists["cpu_seconds"], value["bound"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"a command's time is damaged: {type(error).__name__}: {error}") from error


def time_commands(
    commands: Sequence[Command], repetitions: int, show: Callable[[str], None], warm_up: bool = True
) -> list[CommandTime]:
    """Time the commands in turn, several times.

    With `warm_up`, each command first runs once untimed, to fill the caches of Python and the disk.
    """
    times: dict[Command, list[tuple[float, float]]] = {command: [] for command in commands}
    for repetition in range(-1 if warm_up else 0, repetitions):
        for command, measured in times.items():
            show(command.text)
            seconds_and_cpu = _time_once(command)
            if repetition >= 0:
                measured.append(seconds_and_cpu)
    return [
        CommandTime(c.text, c.until, tuple(s for s, _ in measured), tuple(cpu for _, cpu in measured), c.bound)
        for c, measured in times.items()
    ]


def _environment() -> dict[str, str]:
    """The environment of the commands.

    They import this copy of fedskew. They can write bytecode, so only the first of them compiles PyTorch's modules.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = str(Path(fedskew.__file__).parents[1]), inherited.get("PYTHONPATH")
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _time_once(command: Command) -> tuple[float, float]:
    """Return seconds and CPU seconds of one run."""
    environment = _environment()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in command.files:
            Path(folder, name).write_bytes(content)
        if command.empty_caches:
            environment |= {variable: str(Path(folder, variable)) for variable in _CACHES}
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command.python, *command.arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        with process.stdout as output:
            first = output.readline()
            seconds, cpu = time.perf_counter() - start, cpu_seconds(process.pid)
            rest = output.read()
        used = wait_and_measure(process)
        if process.returncode:
            last = (first + rest).decode(errors="replace").strip().splitlines()[-1:]
            raise UserError(f"{command.text}: exit status {process.returncode}: {' '.join(last)}")
        if command.until == "end":
            seconds, cpu = time.perf_counter() - start, used
    return seconds, cpu
