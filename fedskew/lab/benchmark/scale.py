"""Measure the seconds per phase and the peak memory of a run with very many clients. The data stay on disk.

The run has a process of its own, because the peak memory of a process includes everything that it did before.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.lab.benchmark.cases import CLASSES
from fedskew.platforms import peak_memory

PHASES = ("import", "load", "partition", "start", "rounds", "end")
MAX_HOST_MEMORY = 16e9
"""The target for the peak host memory of the run, in bytes. Nothing enforces it."""
_BLOCK = 1_000_000
"""Rows per write."""


@dataclass(frozen=True)
class ScaleCase:
    """A federation in which all clients have about equally many samples, and a short run on it."""

    device: str
    model: str
    shape: tuple[int, ...]
    """The shape of a sample: the number of features of a table, or channels, height and width of an image."""
    precision: str
    clients: int = 1_000_000
    samples: int = 50
    """Mean samples per client."""
    participants: int = 1_000
    """Clients per round."""
    rounds: int = 10
    tests: int = 10_000
    """Test samples."""

    @property
    def dtype(self) -> type[np.generic]:
        return np.float32 if len(self.shape) == 1 else np.uint8

    @property
    def bytes(self) -> int:
        """The size of the data on disk: the inputs, and a byte per label."""
        return (self.clients * self.samples + self.tests) * (
            int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize + 1
        )


def scale_case(device: str, clients: int) -> ScaleCase:
    """Make the case for a device: a small dense network on a CPU, and a convolutional network on a GPU.

    One client in 1,000 takes part in each round, but at least 10 do. Of fewer than 10 clients, all take part.
    """
    participants = min(clients, max(10, clients // 1_000))
    if device.startswith("cuda"):
        return ScaleCase(device, "cnn", (1, 16, 16), "bf16", clients, participants=participants)
    return ScaleCase(device, "dnn", (32,), "float32", clients, participants=participants)


@dataclass(frozen=True)
class ScaleMeasurement:
    """The time and memory of a run, from the start of its process to its last file."""

    case: ScaleCase
    engine: str
    phases: Mapping[str, float]
    """Seconds of each of `PHASES`. `import` includes the start of the process. `start` ends before the first round,
    `rounds` is all rounds, and `end` is the rest of the run."""
    round_seconds: tuple[float, ...]
    cpu_seconds: Mapping[str, float]
    """Processor time of each of `PHASES`. Unlike `phases`, it leaves out the time of other processes."""
    memory: int
    """Peak host memory of the process in bytes, including the pages of the data that were in memory."""
    memory_after: Mapping[str, int]
    """The peak so far after each phase."""
    folder_bytes: int
    """The size of the run's folder."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ScaleMeasurement:
        try:
            known = {spec.name: value[spec.name] for spec in fields(cls)}
            case = ScaleCase(**known["case"] | {"shape": tuple(known["case"]["shape"])})
            return cls(**known | {"case": case, "round_seconds": tuple(known["round_seconds"])})
        except (KeyError, TypeError) as error:
            raise UserError(f"a measurement is damaged: {type(error).__name__}: {error}") from error


def measure_scale(case: ScaleCase) -> ScaleMeasurement:
    """Write the data to a temporary folder, run in another process, and delete the folder."""
    with tempfile.TemporaryDirectory(prefix="fedskew-scale-") as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if free < 1.1 * case.bytes:
            raise UserError(
                f"{folder.parent} has {free / 1e9:.1f} GB of free disk; expected {1.1 * case.bytes / 1e9:.1f} GB for "
                f"the data of {case.clients:,} clients; set TMPDIR to another folder"
            )
        write_data(case, folder / "data")
        command = [sys.executable, "-m", __name__, str(folder), json.dumps(asdict(case)), str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(next(iter(done.stderr.strip().splitlines()[-1:]), "the process was killed"))
        return ScaleMeasurement.from_json(json.loads(done.stdout.splitlines()[-1]))


def write_data(case: ScaleCase, folder: Path) -> None:
    """Write Gaussian classes as arrays that fedskew maps into memory. All blocks have the same noise, to save time."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((CLASSES, *case.shape), dtype=np.float32)
    noise = rng.standard_normal((_BLOCK, *case.shape), dtype=np.float32)
    for part, rows in (("train", case.clients * case.samples), ("test", case.tests)):
        y = np.arange(rows) % CLASSES
        np.save(folder / f"y_{part}.npy", y.astype(np.uint8))
        with (folder / f"x_{part}.npy").open("wb") as file:
            descr = np.lib.format.dtype_to_descr(np.dtype(case.dtype))
            header = {"descr": descr, "fortran_order": False, "shape": (rows, *case.shape)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, rows, _BLOCK):
                labels = y[start : start + _BLOCK]
                _as_stored(centres[labels] + noise[: len(labels)], case).tofile(file)


def _as_stored(values: npt.NDArray[np.float32], case: ScaleCase) -> npt.NDArray[np.generic]:
    return values if case.dtype is np.float32 else np.clip(64 * values + 128, 0, 255).astype(np.uint8)


# -- the measured process ----------------------------------------------------------------------------------------------


class _Phases(Callback):
    """Records the seconds, the processor time and the peak memory of each phase."""

    def __init__(self, begun: float) -> None:
        self._last, self._last_cpu = begun, 0.0
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self.rounds: list[float] = []

    def end(self, phase: str) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        self.seconds[phase], self._last = self.seconds.get(phase, 0.0) + now - self._last, now
        self.cpu[phase], self._last_cpu = self.cpu.get(phase, 0.0) + cpu - self._last_cpu, cpu
        self.memory[phase] = own_peak_memory()

    def on_start(self, prepared: Any, state: Any, rounds_ahead: int) -> None:  # noqa: ARG002
        self.end("start")

    def on_round(self, row: Any, rounds_ahead: int) -> None:  # noqa: ARG002
        before = self._last
        self.end("rounds")
        self.rounds.append(self._last - before)


def own_peak_memory() -> int:
    """The peak memory of this process in bytes.

    On Linux, `getrusage` also counts the parent's memory at the fork, so the kernel's high-water mark is read instead.
    If /proc does not state it, `getrusage` is used.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return peak_memory()
    kib = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return peak_memory() if kib is None else 1024 * kib


def main() -> None:
    """Run a case and print the measurement as JSON. The arguments are the folder, the case and the start time."""
    begun = time.perf_counter() - (time.time() - float(sys.argv[3]))
    folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
    case = ScaleCase(**case | {"shape": tuple(case["shape"])})
    from fedskew.data import federation, load
    from fedskew.data.partitions.few_labels import LabelsPerClient
    from fedskew.experiment.run import run

    phases = _Phases(begun)
    phases.end("import")
    dataset = load(str(folder / "data"))
    phases.end("load")
    fed = federation(dataset, LabelsPerClient(case.clients, labels_per_client=2), seed=0)
    phases.end("partition")
    result = run(fed, "fedavg", case.model, out=folder / "run", callbacks=[phases], device=case.device,
                 precision=case.precision, rounds=case.rounds, clients_per_round=case.participants,
                 local_epochs=1, batch_size=case.samples)  # fmt: skip
    phases.end("end")
    size = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file())
    found = ScaleMeasurement(
        case,
        result.engine,
        phases.seconds,
        tuple(phases.rounds),
        phases.cpu,
        own_peak_memory(),
        phases.memory,
        size,
    )
    sys.stdout.write(json.dumps(found.to_json()) + "\n")


if __name__ == "__main__":
    main()
