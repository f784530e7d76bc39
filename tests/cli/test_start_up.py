"""What a command imports, which decides how soon it answers. Seconds depend on the machine, so modules are counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fedskew.cli
from fedskew.__main__ import main
from fedskew.cli.commands import BROKEN_PIPE, INTERRUPTED, USAGE_ERROR

HEAVY = ("torch", "numpy", "pandas", "scipy", "sklearn", "matplotlib", "pyarrow", "asyncio")
UNUSED_IN_A_RUN = (
    "pandas", "scipy", "sklearn", "matplotlib", "pyarrow", "plotly", "jinja2", "sympy", "triton", "torch._dynamo",
    "torch._inductor", "flwr", "ray", "optuna", "onnx",
)  # fmt: skip

SCRIPT = """
import json, sys
from fedskew.cli import main
statuses = [main(command) for command in json.loads(sys.argv[1])]
sys.stdout.flush()
print(json.dumps({"statuses": statuses, "modules": sorted(sys.modules)}))
"""


def _imported(folder: Path, *commands: tuple[str, ...]) -> set[str]:
    """The modules that these commands import in a process of their own."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert set(outcome["statuses"]) == {0}, done.stderr
    return set(outcome["modules"])


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",)], ids=" ".join)
def test_help_imports_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    modules = _imported(tmp_path, arguments)
    assert "fedskew.cli.app" in modules
    assert not modules & set(HEAVY)
    assert len(modules) < 450  # 376 when this was written; numpy alone would add 100


def test_a_run_imports_only_what_it_uses(tmp_path: Path) -> None:
    run = ("run", "--data", "digits", "--method", "fedavg", "--rounds", "1", "--local-epochs", "1", "--quiet")
    runs = [(*run, "--model", model, "--device", "cpu", "--out", model) for model in ("dnn", "cnn")]
    modules = _imported(tmp_path, *runs)
    assert "torch" in modules
    assert not modules & set(UNUSED_IN_A_RUN)


def test_the_first_line_of_a_run_says_what_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["run", "--data", "digits", "--method", "fedavg", "--rounds", "2", "--local-epochs", "1", "--device", "cpu"]
    assert fedskew.cli.main([*run, "--clients", "5", "--out", "here"]) == 0
    first = capfd.readouterr().err.splitlines()[0]
    assert first == "fedavg on digits, 5 clients, dnn: 2 rounds, engine stacked, cpu, float32"


class Interrupt:
    """Behaves as if the user pressed Ctrl-C while the commands are imported."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "fedskew.cli.app":
            raise KeyboardInterrupt


def test_ctrl_c_while_a_command_loads_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fedskew.cli", "fedskew.cli.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    assert main() == INTERRUPTED


def test_ctrl_c_that_an_import_turns_into_another_error_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_after(interrupt: bool) -> None:
        try:
            if interrupt:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise AttributeError("module 'numpy' has no attribute 'ma'")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    try:
        monkeypatch.setattr("fedskew.cli.main", lambda: fail_after(True))
        assert main() == INTERRUPTED
        monkeypatch.setattr("fedskew.cli.main", lambda: fail_after(False))
        with pytest.raises(AttributeError, match="ma"):
            main()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows reports a closed pipe in another way")
@pytest.mark.parametrize("arguments", [("methods",), ("partitions", "--json")], ids=" ".join)
def test_a_closed_pipe_has_its_own_exit_status(arguments: tuple[str, ...]) -> None:
    """As in `fedskew methods | head -1`. Status 1 would mean that something failed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fedskew", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("arguments", [("methods",), ("partitions", "--json")], ids=" ".join)
def test_a_full_disk_is_reported_in_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "fedskew", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (USAGE_ERROR, "error: cannot write: No space left on device\n")
