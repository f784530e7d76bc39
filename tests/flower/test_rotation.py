"""A site's key and the server's certificate are replaced during a run, and the sites keep their state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import case, small_data
from real_federation import Real, until
from safetensors.torch import load_file

from fedskew.data import Dirichlet, federation
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower import certificates
from fedskew.flower.credentials import make_credentials
from fedskew.flower.server_app import run_federation
from fedskew.flower.supervised_run import read_progress


def test_a_site_that_returns_with_another_key_goes_on_with_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another key is another node of the SuperLink under the same name. The method keeps state at every site."""
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "scaffold", "rounds": 4, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    config = with_values(Config(), values)
    expected = run_prepared(prepare(with_values(config, {"engine": "plain"}), split)).model.state_dict()

    def replace_key(name: str, asked: Any, facts: Any, payload: bytes) -> Any:
        if name == "site-2" and asked["kind"] == "train" and asked["key"]["round"] == 1:
            here.grid._sites[2001] = here.grid._sites.pop(1001)
        return facts, payload

    here = case(tmp_path, split, data, config, replace_key)
    with caplog.at_level("INFO", logger="flwr"):
        found = run_federation(here.grid, here.context).model.state_dict()
    assert caplog.text.count("site-1 is disconnected") == 1
    assert caplog.text.count("site-1 is connected with") == 2
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


def test_a_renewed_certificate_has_the_same_authority_and_the_same_names(tmp_path: Path) -> None:
    """So sites need no change."""
    keys = make_credentials(tmp_path / "keys", ["a"], ["fl.example.org"], days=10)
    before = [path.read_bytes() for path in (keys.certificate, keys.authority, keys.node("a").private)]
    make_credentials(tmp_path / "keys", ["a"])
    after = [path.read_bytes() for path in (keys.certificate, keys.authority, keys.node("a").private)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, True]
    assert certificates.certificate_hosts(after[0]) == certificates.certificate_hosts(before[0])
    assert certificates.server_days_left(after[0], keys.key, after[1]) > 300


@pytest.mark.slow
def test_key_and_certificate_are_replaced_during_a_run_of_real_processes(tmp_path: Path) -> None:
    """The commands of docs/deploy.md. `federate run` resumes the run when the SuperLink is started again."""
    real = Real(tmp_path, ("site-1", "site-2"), days=10)
    local, folder, config = real.local, real.run_folder("app"), real.config("scaffold", rounds=6)
    flwr = str(Path(sys.executable).parent / "flwr")
    with local:
        local.start()
        environment = {**os.environ, **local.environment}

        def call(*command: str) -> None:
            subprocess.run([flwr, "supernode", *command], env=environment, check=True, capture_output=True)

        app = real.app("app", config, round_timeout=30, attempts=20)
        command = [sys.executable, "-m", "fedskew", "federate", "run", str(app), "--connection", "federation"]
        with (tmp_path / "run.out").open("w") as file:
            run = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        until(lambda: read_progress(folder).rounds >= 1, "the first round", local)

        registered = (local.folder / "logs" / "register.log").read_text()
        (number,) = re.findall(r"site-2 is registered as SuperNode (\d+)", registered)
        call("unregister", number, "federation")
        until(lambda: not local.nodes["site-2"].running, "the end of the site whose key was revoked", local)
        keys = local.keys.node("site-2")
        shutil.rmtree(keys.folder)
        make_credentials(local.keys.folder, real.sites)  # also renews the certificate, which expires in ten days
        call("register", str(keys.public), "federation", "--name", "site-2")
        local.start_site("site-2")
        before = read_progress(folder).rounds
        until(lambda: read_progress(folder).rounds > before, "a round with the new key", local)

        assert local.superlink is not None
        local.superlink.terminate()
        local.superlink.wait()
        local.start_superlink()
        until(lambda: run.poll() is not None, "the end of the run", local)
        assert run.returncode == 0, (tmp_path / "run.out").read_text()
        assert local.nodes["site-1"].running  # it has reconnected by itself
    expected = run_prepared(prepare(config, real.split)).model.state_dict()
    found = load_file(folder / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
