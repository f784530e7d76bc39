"""The comparison with other frameworks in `benchmarks/peers`: its scripts, its measurements and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from method_cases import slow

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.mark.parametrize("script", ["fedskew_run.py", *slow("plain_loop.py")])  # `compare` also runs the plain loop
def test_a_script_trains_and_prints_one_line_of_json(script: str) -> None:
    done = _run(script, "--size", "tiny", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["rounds"] == len(result["ends"]) == 3
    assert result["ends"] == sorted(result["ends"])
    first, second, third = result["ends"]
    assert result["seconds_per_round"] == pytest.approx(((second - first) + (third - second)) / 2)
    assert result["first_round"] > 0


def test_scripts_keep_bytecode_and_use_all_cores(importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import compare

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not {"PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"} & compare._environment().keys()


def test_the_plain_loop_and_fedskew_train_the_same_network(importable: None) -> None:
    import torch
    from torch_parts import CNN, count_parameters, tensors
    from work import PARAMETERS, SIZES

    work = SIZES["tiny"]
    x, y = tensors(work, "cpu")
    assert x.shape == (work.clients, work.samples, 3, 32, 32)
    assert y.shape == (work.clients, work.samples)
    assert -1 <= x.min() < -0.9 < 0.9 < x.max() <= 1
    network = CNN()
    assert count_parameters(network) == PARAMETERS
    assert network(x[0]).shape == (work.samples, 10)
    from fedskew_run import make_federation
    from work import Task

    from fedskew.engine import DeviceSamples

    federation = make_federation(Task(work, 2, "cpu", "float32"))
    inputs = DeviceSamples(federation.dataset, federation.dataset.train, torch.device("cpu"))
    rows = torch.from_numpy(federation.indices[1])
    assert torch.allclose(inputs.inputs(rows), x[1], atol=1e-6)
    assert torch.equal(inputs.y[rows], y[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rounds", "1"), "--rounds is 1; expected at least 2"),
        (("--precision", "float16"), "invalid choice: 'float16'"),
    ],
)
def test_a_script_refuses_a_wrong_flag(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plain_loop import main

    monkeypatch.setattr(sys, "argv", ["plain_loop.py", *flags])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_number_format_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from work import read_task

    monkeypatch.setattr(sys, "argv", ["fluke_fl.py", "--precision", "bf16"])
    with pytest.raises(SystemExit):
        read_task("fluke", precisions=("float32", "tf32"))
    assert "fluke has no switch for bf16; expected float32 or tf32" in capsys.readouterr().err


def test_a_measurement_counts_other_processes_too() -> None:
    from measure import measure

    code = """
import json, subprocess, sys, time
spin = "import time; data = bytearray(60_000_000); end = time.time() + 1.5\\nwhile time.time() < end: pass"
worker = subprocess.Popen([sys.executable, "-c", spin])
ends = [time.time()]
worker.wait()
ends.append(time.time())
print(json.dumps({"version": "1", "seconds_per_round": ends[1] - ends[0], "ends": ends}))
"""
    result = measure([sys.executable, "-c", code], os.environ)
    assert result.version == "1"
    assert 0 < result.start_up < result.whole_run
    assert result.cpu_per_round > 0.05
    assert result.host_memory > 57
    assert result.gpu_memory is None or result.gpu_memory >= 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no such device')", "no such device"),
        ("print('{}'); raise ValueError('too late')", "ValueError: too late"),
        ("pass", "exit status 0"),
    ],
)
def test_a_script_without_a_result_says_why(code: str, message: str) -> None:
    from measure import ScriptError, measure

    with pytest.raises(ScriptError, match=message):
        measure([sys.executable, "-c", code], os.environ)


def test_a_script_that_does_not_end_is_stopped() -> None:
    from measure import ScriptError, measure

    with pytest.raises(ScriptError, match="did not end within 1 s"):
        measure([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, timeout=1)


def _row(peer: str, precision: str, *seconds: float, gpu: float | None = None) -> Any:
    from measure import Measurement
    from table import Row

    runs = [Measurement("1.0", s, 2 * s, 10 * s, 12 * s, 100 * s, 256.4, gpu) for s in seconds]
    return Row(peer, precision, runs)


def _comparison(*rows: Any, skipped: list[str] | None = None) -> Any:
    from table import Comparison

    return Comparison(
        "a machine", "2026-01-01", "a command", "cpu", "some work", 30, list(rows), skipped or [], [1.5, 9]
    )


def test_the_table_has_ratios_in_the_same_format_and_best_of_each() -> None:
    from table import markdown

    comparison = _comparison(
        _row("fedskew", "float32", 0.5, 0.4), _row("fedskew", "bf16", 0.1),
        _row("JAX vmap", "float32", 0.8), _row("JAX vmap", "bf16", 0.3, 0.35), _row("fluke", "float32", 2.0),
        skipped=["pfl-research: pfl is not installed"],
    )  # fmt: skip
    page = markdown(comparison)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    table = {(row[0], row[2]): dict(zip(rows[0][3:6], row[3:6], strict=True)) for row in rows[2:]}
    assert table["fedskew", "float32"] == {"s per round": "0.400", "÷ same": "1.00", "÷ best": ""}
    assert table["fedskew", "bf16"] == {"s per round": "0.100", "÷ same": "1.00", "÷ best": "1.00"}
    assert table["JAX vmap", "float32"] == {"s per round": "0.800", "÷ same": "2.00", "÷ best": ""}
    assert table["JAX vmap", "bf16"] == {"s per round": "0.300", "÷ same": "3.00", "÷ best": "3.00"}
    assert table["fluke", "float32"] == {"s per round": "2.00", "÷ same": "5.00", "÷ best": "20.00"}
    assert rows[0][6:8] == ["CPU s per round", "÷ same"]
    assert rows[0][12:14] == ["30 rounds, s", "÷ same"]
    assert rows[2][12:] == ["40.0", "1.00", "256"]
    assert rows[4][6:14] == ["1.60", "2.00", "8.00", "2.00", "9.60", "2.00", "80.0", "2.00"]
    assert "- pfl-research: pfl is not installed" in page
    assert "GPU MB" not in page
    assert "The load average was 1.5 to 9.0." in page


def test_the_table_shows_gpu_memory_if_it_was_measured() -> None:
    from table import markdown

    page = markdown(_comparison(_row("fedskew", "bf16", 0.1, gpu=1234.0)))
    assert "| GPU MB |" in page
    assert page.rstrip().endswith("| 1,234 |")


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [((0.5,), "Each figure is from one run. “÷"), ((0.5, 0.4), "interleaved. Each figure is the lowest of 2 runs, or")],
)
def test_the_page_says_how_many_runs_a_figure_has(seconds: tuple[float, ...], sentence: str) -> None:
    from table import markdown

    assert sentence in markdown(_comparison(_row("fedskew", "float32", *seconds)))


def test_two_missing_packages_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import compare

    monkeypatch.setattr(compare, "_has", lambda _, package: package == "torch")
    skipped: list[str] = []
    assert compare._interpreters(Namespace(peers=["pfl", "flower"], python={}), skipped) == {}
    assert skipped == ["pfl-research: pfl is not installed", "Flower simulation: flwr and ray are not installed"]


def test_json_keeps_everything() -> None:
    from table import Comparison, markdown

    comparison = _comparison(_row("fedskew", "float32", 0.5, 0.4), skipped=["fluke: not installed"])
    again = Comparison.from_json(json.loads(json.dumps(comparison.to_json())))
    assert again == comparison
    assert markdown(again) == markdown(comparison)


def test_compare_measures_what_is_installed_and_names_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from compare import main

    out = tmp_path / "peers"
    without_pfl = ["--python", f"pfl={sys.executable}"]
    main(["--size", "tiny", "--rounds", "2", "--repeats", "1", "--peers", "plain,pfl", *without_pfl, "--out", str(out)])
    printed = capsys.readouterr().out
    assert out.with_suffix(".md").read_text(encoding="utf-8") == printed
    assert "| plain PyTorch loop |" in printed
    assert "pfl-research: pfl is not installed" in printed
    saved = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert [row["peer"] for row in saved["rows"]] == ["plain PyTorch loop"]
    main(["--render", str(out.with_suffix(".json"))])
    assert capsys.readouterr().out == printed


def _run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PEERS / script), *flags], capture_output=True, text=True, check=False)
