"""A site's worker: a real process on its socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import case, small_data

from fedskew.data import Dirichlet, federation, load
from fedskew.experiment.config import Config, config_hash, with_values
from fedskew.flower.contract import Contract
from fedskew.flower.frames import receive_frame, send_frame
from fedskew.flower.local_federation import write_site
from fedskew.flower.planning import resolve_config
from fedskew.flower.server_app import run_federation
from fedskew.flower.settings import read_settings
from fedskew.flower.socket_paths import socket_path
from fedskew.flower.versions import installed_versions
from fedskew.flower.worker import _RequestHandler

PATIENCE = 120.0


@dataclass
class Running:
    """A worker and the process that it ends with."""

    guardian: subprocess.Popen[bytes]
    worker: subprocess.Popen[bytes]
    site: Path
    terms: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.site.parent

    def connected(self) -> socket.socket:
        path, end = socket_path(self.site, self.guardian.pid), time.monotonic() + PATIENCE
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(path))
            except OSError:
                connection.close()
                assert self.worker.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            else:
                return connection

    def asked(self, **facts: Any) -> dict[str, Any]:
        with self.connected() as connection:
            send_frame(connection, {"kind": "hello", "terms": self.terms, "paths": [], **facts})
            return receive_frame(connection)[0]


def write_files(folder: Path) -> Path:
    """A site's configuration beside its data."""
    small_data(folder)
    site = folder / "site.yaml"
    site.write_text("name: a\ndata: digits.npz\ndevice: cpu\nthreads: 1\n")
    return site


@contextmanager
def started(folder: Path, current: Path | None = None) -> Iterator[Running]:
    """Start a worker. `current` is its current folder."""
    site = write_files(folder)
    contract = Contract.from_dataset(load(str(folder / "digits.npz")))
    config = resolve_config(with_values(Config(), {"method": "fedavg", "device": "cpu"}), contract, ["a", "b"])
    guardian = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    command = [sys.executable, "-m", "fedskew.flower.worker", str(site), str(guardian.pid)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with (folder / "log").open("wb") as log:
        worker = subprocess.Popen(command, start_new_session=True, stderr=log, cwd=current, env=env)
    terms = {"contract": contract.to_json(), "config": config.to_mapping() | {"data": {"name": "federation"}}}
    try:
        yield Running(guardian, worker, site, terms)
    finally:
        for process in (guardian, worker):
            process.kill()
            process.wait()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A new worker, for a test that ends it."""
    with started(tmp_path) as worker:
        yield worker


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with started(tmp_path_factory.mktemp("site")) as worker:
        yield worker


@pytest.fixture
def warm(shared: Running) -> Running:
    """The worker of all tests that leave it running, with the site's files as they were."""
    write_files(shared.folder)
    return shared


def test_it_answers_one_clientapp_after_another_and_ends_with_its_guardian(running: Running) -> None:
    assert running.asked() == {"site": "a", "samples": 180, "versions": installed_versions()}
    newer = running.asked(versions={"fedskew": "99.0.0"})["refused"]
    assert newer.startswith("the server does not fit this site: it has fedskew 99.0.0; expected ")
    assert "expected one of hello" in running.asked(kind="dance")["refused"]

    with running.connected() as killed:  # a ClientApp that is killed in the middle of its message
        killed.sendall(b"\0\0")
    with running.connected() as stranger:  # one that speaks no JSON
        stranger.sendall((3).to_bytes(8, "big") + bytes(8) + b"???")
    with running.connected() as stranger:  # or JSON of another kind
        stranger.sendall((2).to_bytes(8, "big") + bytes(8) + b"[]")
    deep = b"[" * 200_000
    with running.connected() as stranger:
        stranger.sendall(len(deep).to_bytes(8, "big") + bytes(8) + deep)
    for length in (2**62, 2**64 - 1):  # one that promises more than the machine can hold
        with running.connected() as boaster:
            boaster.sendall(length.to_bytes(8, "big") + length.to_bytes(8, "big"))
        with running.connected() as boaster:
            boaster.sendall((2).to_bytes(8, "big") + length.to_bytes(8, "big") + b"{}")
    assert running.asked()["samples"] == 180

    larger = {**running.terms["contract"], "shape": [1, 9, 9]}
    other = {**running.terms, "contract": larger}
    assert "do not meet the federation's contract" in running.asked(terms=other)["refused"]
    assert "inputs have shape [1, 8, 8], expected [1, 9, 9]" in (running.folder / "log").read_text()

    running.site.write_text("name: another\ndata: digits.npz\ndevice: cpu\n")
    assert running.asked()["site"] == "another"

    place = socket_path(running.site, running.guardian.pid)
    assert place.exists()
    os.kill(running.guardian.pid, signal.SIGKILL)
    running.guardian.wait()
    assert running.worker.wait(PATIENCE) == 0
    assert not place.exists()


def test_what_a_site_s_own_files_say_stays_in_its_own_log(warm: Running) -> None:
    (warm.folder / "patients.csv").write_text("age,diagnosis\nJohn Smith,ill\n4,well\n5,ill\n")
    warm.site.write_text("name: a\ndata: {name: patients.csv, label: diagnosis}\ndevice: cpu\n")
    told = warm.asked()
    assert told == {"refused": "its configuration or data cannot be read; the reason is in its log"}
    assert "patients.csv" in (warm.folder / "log").read_text()

    warm.site.write_text("name: a\ndata: digits.npz\ndevice: cpu\n")
    told = warm.asked(terms={"contract": warm.terms["contract"]})
    assert told == {"failed": "KeyError; details are in the site's log"}
    assert "KeyError: 'config'" in (warm.folder / "log").read_text()


@pytest.mark.parametrize("own", ["classes", "columns"])
def test_names_that_only_this_site_has_stay_in_its_log(own: str, warm: Running) -> None:
    """The names of a site's classes and columns can say what its patients have."""
    if own == "classes":
        data = dict(np.load(warm.folder / "digits.npz"))
        names = [f"HIV stage {c}" for c in data["classes"]]
        np.savez(warm.folder / "digits.npz", **{**data, "classes": np.array(names)})
        terms = warm.terms
    else:
        (warm.folder / "patients.csv").write_text("HIV stage,diagnosis\n3,ill\n4,well\n5,ill\n")
        warm.site.write_text("name: a\ndata: {name: patients.csv, label: diagnosis}\ndevice: cpu\n")
        contract = Contract("table", ("ill", "well"), (1,), (50.0,), (9.0,), columns=("age",))
        terms = {**warm.terms, "contract": contract.to_json()}
    told = warm.asked(terms=terms)
    assert told == {"refused": "its data do not meet the federation's contract; the reason is in its log"}
    assert "HIV stage" in (warm.folder / "log").read_text()


def test_the_path_of_a_split_stays_in_the_site_s_log(warm: Running) -> None:
    warm.site.write_text("name: a\ndata: digits.npz\nsplit: HIV ward/split.json\nclient: 0\ndevice: cpu\n")
    assert warm.asked() == {"refused": "its configuration or data cannot be read; the reason is in its log"}
    assert "HIV ward/split.json" in (warm.folder / "log").read_text()


def test_corrected_data_are_read_again(warm: Running) -> None:
    data = dict(np.load(warm.folder / "digits.npz"))
    np.savez(warm.folder / "digits.npz", **{**data, "classes": np.array([f"wrong {c}" for c in data["classes"]])})
    assert "do not meet the federation's contract" in warm.asked()["refused"]
    np.savez(warm.folder / "digits.npz", **data)
    assert warm.asked()["samples"] == 180


def test_a_state_folder_that_cannot_be_written_is_named_in_the_site_s_log_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_data(tmp_path)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "scaffold", "rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    here = case(tmp_path, split, data, with_values(Config(), values), minimum=2)
    folder = tmp_path / "site-1"
    own = {"name": "site-1", "data": str(data), "split": str(tmp_path / "split.json"), "client": 1, "device": "cpu"}
    write_site(folder / "site.yaml", own)
    (folder / "state").mkdir()
    settings, contract, config = read_settings(dict(here.context.run_config))
    run = config_hash(resolve_config(config, contract, settings.sites))
    (folder / "state" / run).write_text("a file where a folder should be")
    here.grid._sites[1001] = ("site-1", _RequestHandler(folder / "site.yaml"))  # type: ignore[assignment]
    row = run_federation(here.grid, here.context).history[-1]
    assert row.failed == {"site-1": "its state cannot be read or written; the reason is in its log"}
    assert str(folder / "state") in capsys.readouterr().err


def test_a_site_that_the_server_does_not_let_in_logs_the_reason(warm: Running) -> None:
    assert warm.asked(refused="its key belongs to 'b'\x1b[31m")["samples"] == 180
    assert (
        "fedskew: warning: the server does not admit this site: its key belongs to 'b' [31m"
        in (warm.folder / "log").read_text()
    )


def test_it_leaves_the_socket_of_a_successor_alone(running: Running) -> None:
    """Two ClientApps at once may each start a worker; the later one has the place."""
    assert running.asked()["samples"] == 180
    place = socket_path(running.site, running.guardian.pid)
    successor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with successor:
        draft = place.with_suffix(".later")
        successor.bind(str(draft))
        os.replace(draft, place)
        os.kill(running.guardian.pid, signal.SIGKILL)
        running.guardian.wait()
        assert running.worker.wait(PATIENCE) == 0
        assert place.exists()
    place.unlink()


def test_it_ends_when_it_is_idle_for_as_long_as_its_site_says(running: Running) -> None:
    running.site.write_text("name: a\ndata: digits.npz\ndevice: cpu\nidle: 1\n")
    assert running.asked()["samples"] == 180
    assert running.worker.wait(PATIENCE) == 0
    assert not socket_path(running.site, running.guardian.pid).exists()


def write_app(folder: Path, code: str = "") -> str:
    """Write an app with a model. `code` is executed when the app is imported."""
    folder.mkdir()
    (folder / "federation_app.py").write_text(
        f"{code}\nfrom torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    return str(folder)


def with_own_model(running: Running) -> dict[str, Any]:
    """The terms of a run with the app's model."""
    return {"terms": {**running.terms, "config": {**running.terms["config"], "model": "federation_app:make"}}}


def test_it_gives_way_when_the_app_brings_other_code(running: Running, tmp_path: Path) -> None:
    for version in ("one", "two"):
        write_app(tmp_path / version)
    own = with_own_model(running)
    assert running.asked(**own, paths=[str(tmp_path / "one")])["samples"] == 180
    assert running.asked(**own, paths=[str(tmp_path / "one")])["samples"] == 180
    with running.connected() as connection:
        send_frame(connection, {"kind": "hello", **own, "paths": [str(tmp_path / "two")]})
        with pytest.raises((EOFError, ConnectionError)):
            receive_frame(connection)
    assert running.worker.wait(PATIENCE) == 0


def test_it_imports_the_app_that_it_received_last(tmp_path: Path) -> None:
    """Not the site's own copy in the current folder, nor an earlier app of which it has imported nothing."""
    old = "raise RuntimeError('an old version')"
    copy, first = write_app(tmp_path / "copy", old), write_app(tmp_path / "first", old)
    second = write_app(tmp_path / "second")
    (tmp_path / "site").mkdir()
    with started(tmp_path / "site", Path(copy)) as running:
        assert running.asked(paths=[first, copy])["samples"] == 180
        assert running.asked(**with_own_model(running), paths=[second, copy]).get("samples") == 180
