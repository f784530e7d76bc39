"""Training on a device without float64, such as Apple's GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from method_cases import KINDS

from fedskew.engine import choose_devices, choose_engine, choose_precision
from fedskew.errors import UserError

SUPPORT = Path(__file__).parent / "support"
PACKAGE = Path(__file__).parents[1] / "fedskew"
MPS = torch.device("mps")
BEYOND_THE_STAND_IN = {"pkd"}
"""PKD assigns to a list of rows. Torch makes their indices on the device before the stand-in can act."""


@pytest.mark.slow
def test_every_kind_of_method_trains_without_float64_as_it_does_with_it() -> None:
    methods = sorted(set(KINDS.values()) - BEYOND_THE_STAND_IN)
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "limited_gpu.py"), *methods], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for method in methods:
        assert found[f"{method} on mps"] == pytest.approx(found[f"{method} on cpu"], rel=0.01), method


def test_code_that_runs_on_a_device_names_float64_only_for_the_host_and_for_users_who_request_it() -> None:
    allowed = re.compile(r'\.cpu\(\)\.double\(\)|dtype [!=]= torch\.float64|torch\.float64 if precision == "float64"')
    places = [*(PACKAGE / name for name in ("engine", "methods", "losses", "experiment/round", "data/augmentation"))]
    lines = {
        f"{path.relative_to(PACKAGE).as_posix()}:{number}": line
        for place in places
        for path in place.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\.double\(\)|torch\.float64", line) and not allowed.search(line)
    }
    assert list(lines.values()) == ['            self._memory["rates"]["lr"] = self._memory["rates"]["lr"].double()']


def test_apple_s_gpu_is_chosen_if_there_is_no_cuda_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_devices("auto") == choose_devices("mps") == (MPS,)
    assert choose_engine("auto", torch.nn.Linear(2, 2), torch.zeros(1, 2), MPS) == "plain"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_devices("auto") == (torch.device("cuda"),)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="device is 'mps', but no Apple GPU is available; expected cpu or auto"):
        choose_devices("mps")


def test_formats_that_apple_s_gpu_lacks_are_refused() -> None:
    assert choose_precision("auto", MPS) == "float32"
    assert choose_precision("bf16", MPS) == "bf16"
    with pytest.raises(UserError, match="precision is 'float64', but Apple's GPUs do not have it; expected float32"):
        choose_precision("float64", MPS)
