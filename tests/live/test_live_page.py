"""The page of a run that goes on: it keeps up, it is for this machine only, it ends with the run."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import fedskew as fs
from fedskew.cli import main
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.round.record import RoundRow
from fedskew.live.process import live_page
from fedskew.live.server import LiveServer
from fedskew.live.state import LiveState


def get(url: str, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def state(url: str, after: int = 0) -> Any:
    return json.loads(get(url, f"/state.json?after={after}")[1])


def run(folder: Path, rounds: int = 2, *callbacks: Callback) -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=3, beta=1.0))
    fs.run(fed, "fedavg", rounds=rounds, local_epochs=1, out=folder, callbacks=callbacks)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer([tmp_path / "run"], port=0)
    server.start()
    yield server
    server.close()


def test_it_waits_for_a_run_that_has_not_begun(served: LiveServer) -> None:
    status, html, _ = get(served.url, "/")
    assert status == 200
    assert "no results yet" in html
    told = state(served.url)
    assert told["status"] == "waiting"
    assert "no results yet" in told["body"]  # a page of an earlier run on this port shows it, too


def test_it_keeps_up_with_the_rounds(served: LiveServer, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Reader(Callback):
        def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
            seen.append(state(served.url, seen[-1]["version"] if seen else 0))

    run(tmp_path / "run", 3, Reader())
    assert [told["version"] for told in seen] == [1, 2, 3]
    assert [told["status"] for told in seen] == [f"fedavg seed 0: round {t}" for t in (1, 2, 3)]
    assert [len(told["charts"]["accuracy"]["data"][0]["x"]) for told in seen] == [2, 3, 4]
    assert not any(told["finished"] for told in seen)


def test_nothing_new_is_said_in_a_few_bytes(tmp_path: Path) -> None:
    run(tmp_path / "run")
    live = LiveState([tmp_path / "run"])
    told = live.current(0)
    assert live.current(told["version"]).keys() == {"version", "status"}
    assert live.current(0) == told


def test_a_run_that_cannot_be_read_has_begun(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("rounds: [", encoding="utf-8")
    live = LiveState([tmp_path / "run"])
    assert live.current(0)["status"] == live.current(0, ended=True)["status"] == "no run can be read"


def test_runs_in_progress_are_ranked_by_accuracy_until_they_have_auroc(tmp_path: Path) -> None:
    run(tmp_path / "run")
    live = LiveState([tmp_path / "run"], "auroc")
    assert "ranked by accuracy" not in live.current(0)["body"]
    (tmp_path / "run" / "summary.json").unlink()
    body = live.current(0)["body"]
    assert "ranked by accuracy" in body
    assert "AUROC is computed when a run is finished" in body


def test_other_names_paths_and_verbs_are_refused(served: LiveServer) -> None:
    assert get(served.url, "/", host="evil.example:8765")[0] == 403
    assert get(served.url, "/", host="localhost:1")[0] == 200
    assert get(served.url, "/../../etc/passwd")[0] == 404
    place = urlsplit(served.url)
    assert place.hostname == "127.0.0.1"
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=60)
    connection.request("POST", "/")
    assert connection.getresponse().status == 501
    connection.close()


def test_the_page_may_load_nothing_from_elsewhere(served: LiveServer) -> None:
    assert "default-src 'none'" in get(served.url, "/")[2]["Content-Security-Policy"]


def test_a_taken_port_is_refused_if_it_was_asked_for(served: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    port = urlsplit(served.url).port
    assert main(["live", "runs", "--wait", "--port", str(port)]) == 2
    assert f"cannot serve on port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("runs/digts-fedavg", "no run folder 'runs/digts-fedavg'; did you mean 'runs/digits-fedavg'?"),
        ("runs/digits-fedavg", "no run in 'runs/digits-fedavg': neither it nor a visible folder"),
        ("elsewhere/x", "no run folder 'elsewhere/x'; expected"),
    ],
)
def test_a_folder_without_runs_is_not_waited_for_unless_asked(
    asked: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/digits-fedavg").mkdir(parents=True)
    assert main(["live", asked]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.endswith("to wait for runs that have not started, add --wait\n")
    assert error.count("\n") == 1


def test_the_page_s_process_ends_with_the_run_and_tells_the_last_state(tmp_path: Path) -> None:
    with live_page([tmp_path / "run"]) as url:
        run(tmp_path / "run")
        assert "charts" in state(url)
    with pytest.raises(OSError, match="refused"):
        state(url)


def test_run_live_tells_its_address_and_leaves_nobody_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--live", "--rounds", "2", "--clients", "3", "--local-epochs", "1"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert "live report: http://127.0.0.1:" in told
    url = next(word for word in told.split() if word.startswith("http://"))
    with pytest.raises(OSError, match="refused"):
        state(url)


SLOW_START = """
import os, pathlib, sys, time
if "fedskew.live.process" in pathlib.Path("/proc/self/cmdline").read_text():
    pathlib.Path(os.environ["STARTING"]).write_text(str(os.getpid()))
    time.sleep(600)
"""


def heed_interrupts() -> None:
    """What a shell starts in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_while_the_page_starts_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    starting = tmp_path / "starting"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "STARTING": str(starting)}
    command = [sys.executable, "-m", "fedskew", "run", "--live", "--rounds", "1", "--out", str(tmp_path / "run")]
    run = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_interrupts
    )
    while run.poll() is None and not (starting.exists() and starting.read_text()):
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    told = run.communicate()[1]
    assert told == "stopped before completing a round; repeat the command to resume\n"
    assert run.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(starting.read_text()), 0)


def test_a_browser_that_leaves_early_causes_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = LiveServer([tmp_path / "run"], port=0)
    server._server.daemon_threads = False  # so that closing the server waits for its threads
    server.start()
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port)) as browser:
        browser.sendall(f"GET /plotly.js HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        browser.recv(1)
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing drops the rest
    server.close()
    assert capsys.readouterr().err == ""


def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plotly.py").write_text("raise SystemExit('a script of the user')")
    monkeypatch.chdir(tmp_path)
    with live_page([tmp_path / "run"]) as url:
        assert state(url)["status"] == "waiting"


def test_the_page_is_served_by_the_same_fedskew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may be installed, or may stand in PYTHONPATH."""
    other = tmp_path / "other/fedskew"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another version')")
    monkeypatch.setenv("PYTHONPATH", str(other.parent))
    with live_page([tmp_path / "run"]) as url:
        assert state(url)["status"] == "waiting"


def test_an_interrupted_run_is_not_called_finished(served: LiveServer, tmp_path: Path) -> None:
    run(tmp_path / "run")
    assert state(served.url)["status"] == "finished"
    (tmp_path / "run/summary.json").unlink()
    assert state(served.url)["status"] == "fedavg seed 0: round 2"
    served.ended.set()
    assert state(served.url)["status"] == "interrupted, fedavg seed 0: round 2"
    assert state(served.url)["finished"]
    (tmp_path / "run/rounds.jsonl").unlink()
    assert state(served.url)["status"] == "interrupted, fedavg seed 0: before the first round"
