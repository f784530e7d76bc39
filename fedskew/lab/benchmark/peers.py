"""Compare fedskew with a JAX script on the same work: seconds per round, until the first round ends, and in all.

`benchmarks/peers` has the scripts, and `compare.py` there runs them. So this measurement needs a clone of the
repository. It also needs JAX, in an environment of its own or in fedskew's (see `benchmarks/peers/README.md`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import fedskew
from fedskew.errors import UserError
from fedskew.platforms import kill_group

OURS, JAX = "fedskew", "JAX vmap"
"""The names of the two contenders in the output of `compare.py`."""
_COMPARE = Path(fedskew.__file__).parents[1] / "benchmarks" / "peers" / "compare.py"
_TIMES = ("seconds_per_round", "start_up", "whole_run")
"""The measured times, as `compare.py` names them. `PeerTime` says what they are."""

MIN_JAX_PER_ROUND = {"cuda": {"tf32": 2.5, "bf16": 4.0}, "cpu": {"float32": 1.0}}
"""JAX's seconds per round, divided by fedskew's, must be at least this. By device and number format."""
MAX_FLOAT32_ROUND = 0.070
"""fedskew's maximum seconds per round in float32 on a GPU."""
MAX_SHARE_OF_JAX = {"cuda": 0.4}
"""The time of fedskew's whole run, divided by JAX's in the same number format, must be at most this. By device."""
MIN_JAX_START_UP = {"cpu": 1.0}
"""JAX's seconds until the first round ends, divided by fedskew's, must be at least this. By device."""


@dataclass(frozen=True)
class PeerCase:
    """How the scripts are run. `size` is a name from `benchmarks/peers/work.py`."""

    device: str
    """Like `--device`, for example `cpu`, `cuda` or `cuda:1`."""
    size: str
    rounds: int
    repeats: int
    precisions: tuple[str, ...]

    @property
    def kind(self) -> str:
        return "cuda" if self.device.startswith("cuda") else "cpu"

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            "--device", self.kind, "--size", self.size, "--rounds", str(self.rounds),
            "--repeats", str(self.repeats), "--precisions", ",".join(self.precisions), "--peers", "fedskew,jax",
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the scripts. They use the first visible GPU. An index in `device` hides all other GPUs."""
        if ":" not in self.device:
            return dict(os.environ)
        index = int(self.device.partition(":")[2])
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": visible[index] if visible else str(index)}


def peer_case(device: str, precisions: Sequence[str], is_quick: bool) -> PeerCase:
    """Say what is measured on a device. The second repeat finds compiled kernels in the caches."""
    if is_quick:
        return PeerCase(device, "tiny", 3, 1, tuple(precisions))
    size, rounds = ("paper", 100) if device.startswith("cuda") else ("small", 30)
    return PeerCase(device, size, rounds, 2, tuple(precisions))


@dataclass(frozen=True)
class PeerTime:
    """The times of one contender in one number format. Each is the lowest over the repeats."""

    peer: str
    precision: str
    work: str
    """The work, in words."""
    rounds: int
    seconds_per_round: float
    """The median over all rounds but the first."""
    start_up: float
    """Seconds from the start of the process to the end of the first round."""
    whole_run: float
    """Seconds from the start of the process to its end."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PeerTime:
        kinds = {"peer": str, "precision": str, "work": str, "rounds": int}
        try:
            return cls(**{spec.name: kinds.get(spec.name, float)(value[spec.name]) for spec in fields(cls)})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the times of a peer are damaged: {type(error).__name__}: {error}") from error


def measure_peers(case: PeerCase, show: Callable[[str], None]) -> tuple[list[PeerTime], list[str]]:
    """Run the scripts. Return the times, and why a script was not measured. `show` receives lines of progress."""
    if not _COMPARE.exists():
        raise UserError(f"{_COMPARE} does not exist; expected a clone of fedskew's repository, which has the scripts")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "peers")
        command = [sys.executable, str(_COMPARE), *case.flags, "--out", str(out)]
        last = ""
        with _started(command, case.environment) as (process, lines):
            for line in lines:
                last = line.strip() or last
                show(last)
            process.wait()
        if process.returncode:
            raise UserError(f"benchmarks/peers/compare.py: exit status {process.returncode}: {last}")
        found = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    return [_peer_time(row, found) for row in found["rows"]], list(found["skipped"])


@contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start a command, and yield it with its error output. An interrupt also ends what the command has started."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stderr is not None
    try:
        with process.stderr as lines:
            yield process, lines
    except BaseException:
        kill_group(process)
        process.wait()
        raise


def _peer_time(row: Mapping[str, Any], comparison: Mapping[str, Any]) -> PeerTime:
    lowest = {key: min(repeat[key] for repeat in row["repeats"]) for key in _TIMES}
    return PeerTime(row["peer"], row["precision"], comparison["work"], comparison["rounds"], **lowest)
