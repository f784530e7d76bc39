"""`--metrics-port`: /healthz and Prometheus metrics on the loopback, from the files of a run and of a site."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import Case, answer_as_workers, case, small_data
from monitored import get, values

from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.experiment.config import Config, with_values
from fedskew.flower.chained_log import ChainedLog, NewEntries, read_chain
from fedskew.flower.monitoring import Metric, Monitored, monitored, render_metrics
from fedskew.flower.run_monitoring import RunMonitor
from fedskew.flower.server_app import main as server_main
from fedskew.flower.site_monitoring import SiteMonitor
from fedskew.flower.supernode import Connection


def read(component: Monitored) -> dict[str, float]:
    return values(render_metrics(component.metrics()))


def federated(folder: Path, more: dict[str, str] | None = None, **own: Any) -> Case:
    data = small_data(folder)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    settings = {"method": "fedavg", "rounds": 2, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    here = case(folder, split, data, with_values(Config(), {**settings, **own.pop("config", {})}), **own)
    answer_as_workers(here, data, more)
    return here


def test_the_metrics_of_a_run_and_of_its_sites_are_those_of_their_files(tmp_path: Path) -> None:
    """Site 1 refuses every update. The others count what they send, and the server counts the same bytes."""
    here = federated(tmp_path, {"site-1": "policy: {noise: 1}\n"}, minimum=2)
    server_main(here.grid, here.context)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()][1:]
    found = read(RunMonitor(tmp_path / "run"))
    assert found["fedskew_rounds_total"] == found["fedskew_round_seconds_count"] == 2
    assert found["fedskew_round_seconds_sum"] == pytest.approx(sum(row["seconds"] for row in rows))
    assert found["fedskew_attempts_total"] == 1
    assert (found["fedskew_sites"], found["fedskew_sites_present"]) == (3, 0)  # the run has ended
    refused = [entry for entry in read_chain(tmp_path / "run" / "audit.jsonl").entries if entry["event"] == "refused"]
    assert found["fedskew_refusals_total site-1"] == len(refused) >= 2
    assert found["fedskew_refusals_total site-0"] == found["fedskew_missed_total site-0"] == 0
    assert "fedskew_privacy_epsilon" not in found

    connection = Connection()
    sites = [SiteMonitor(tmp_path / name / "site.yaml", connection) for name in here.names]
    per_site = [read(site) for site in sites]
    assert found["fedskew_received_bytes_total"] == sum(site["fedskew_sent_bytes_total"] for site in per_site)
    assert found["fedskew_sent_bytes_total"] >= sum(row["bytes"]["down"] for row in rows)
    assert [site["fedskew_requests_total refused"] for site in per_site] == [0, len(refused), 0]
    assert per_site[0]["fedskew_requests_total answered"] == sum(sent.site == "site-0" for sent in here.grid.sent)
    assert per_site[0]["fedskew_privacy_epsilon"] == float("inf")  # its updates had no noise
    assert per_site[0]["fedskew_last_message_timestamp_seconds"] > 1e9
    assert read(sites[0])["fedskew_requests_total answered"] == per_site[0]["fedskew_requests_total answered"]


def test_the_epsilon_is_shown_on_both_sides_and_every_metric_is_documented(tmp_path: Path) -> None:
    private = {"privacy": "local", "noise": 20.0, "attempts": 1, "share_loss": False, "config": {"average": "uniform"}}
    here = federated(tmp_path, {"site-0": "policy: {epsilon: 5e0, example_epsilon: 6}\nmetrics: none\n"}, **private)
    server_main(here.grid, here.context)
    site = read(SiteMonitor(tmp_path / "site-0" / "site.yaml", Connection()))
    assert (site["fedskew_privacy_budget_epsilon"], site["fedskew_privacy_example_budget_epsilon"]) == (5, 6)
    run = read(RunMonitor(tmp_path / "run"))
    assert 0 < run["fedskew_privacy_epsilon"] < 5
    assert site["fedskew_privacy_epsilon"] == pytest.approx(run["fedskew_privacy_epsilon"])
    text = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(fedskew_\w+)(?:\{\w+\})?`", text))
    assert documented == {name.partition(" ")[0] for name in (*site, *run)}


def test_sites_are_present_while_a_run_is_in_progress(tmp_path: Path) -> None:
    log, monitor = ChainedLog(tmp_path / "audit.jsonl"), RunMonitor(tmp_path)
    assert monitor.problem() == "the run has not started"
    machine = {"process": os.getpid(), "machine": socket.gethostname()}
    log.append({"event": "start", "federation": ["a", "b"], **machine})
    log.append({"event": "request", "kind": "train", "round": 1, "sites": ["a", "b"], "tensors": {"bytes": 10}})
    assert read(monitor)["fedskew_sent_bytes_total"] == 0  # b may turn out to be absent
    log.append({"event": "reply", "site": "a", "kind": "train", "round": 1, "facts": {"bytes": 3}})
    log.append({"event": "absent", "site": "b", "kind": "train", "round": 1, "reason": "it is not connected"})
    found = read(monitor)
    assert (found["fedskew_sent_bytes_total"], found["fedskew_received_bytes_total"]) == (10, 3)
    assert (found["fedskew_site_present a"], found["fedskew_site_present b"]) == (1, 0)
    assert (found["fedskew_sites_present"], found["fedskew_missed_total b"]) == (1, 1)
    assert monitor.problem() is None
    log.append({"event": "end", "status": "failed", "reason": "no space left"})
    assert monitor.problem() == "failed: no space left"
    assert read(monitor)["fedskew_sites_present"] == 0
    log.append({"event": "start", "federation": ["a", "b"], **machine})
    log.append({"event": "end", "status": "finished"})
    assert monitor.problem() is None


def test_a_log_is_read_on_from_where_the_last_request_ended(tmp_path: Path) -> None:
    log, entries = ChainedLog(tmp_path / "audit.jsonl"), NewEntries(tmp_path / "audit.jsonl")
    assert entries.read() == []
    log.append({"event": "one"})
    log.append({"event": "two"})
    assert [entry["event"] for entry in entries.read()] == ["one", "two"]
    with log.path.open("ab") as file:
        file.write(b'{"number": 3, "ev')  # a process was killed while it wrote
    assert entries.read() == []
    log.append({"event": "three"})
    assert [entry["event"] for entry in entries.read()] == ["repaired", "three"]
    for path in (log.path, log.path.with_suffix(".head")):
        path.rename(path.with_name(f"old-{path.name}"))
    log.append({"event": "first of a new log"})
    assert [entry["event"] for entry in entries.read()] == ["first of a new log"]


def test_the_connection_is_known_from_what_flower_prints() -> None:
    connection = Connection()
    assert connection.problem == "the site has not connected to the server yet"
    for line, problem in (
        ("INFO :      SuperNode ID: 123", None),
        ("WARNING :   Connection attempt failed, retrying in 1.00 seconds", "there is no connection to the server"),
        ("INFO :      Received successfully", "there is no connection to the server"),
        ("INFO :      Connection successful after 3.00 seconds and 2 tries.", None),
        ("ERROR :     SSL/TLS handshake error detected.", "gave up"),
    ):
        connection.read(line)
        assert (connection.problem is None) if problem is None else (problem in str(connection.problem))


@contextmanager
def served(problem: str | None = None, metrics: tuple[Metric, ...] = ()) -> Iterator[int]:
    component: Any = SimpleNamespace(problem=lambda: problem, metrics=lambda: metrics)
    with monitored(component, 0) as address:
        yield int(str(address).rpartition(":")[2])


def test_health_and_metrics_are_served_on_the_loopback_only() -> None:
    odd = Metric("fedskew_odd", "gauge", "A test.", {'a "b"\\\n': 1.5}, "site")
    with served(None, (odd,)) as port:
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/metrics") == (
            200,
            '# HELP fedskew_odd A test.\n# TYPE fedskew_odd gauge\nfedskew_odd{site="a \\"b\\"\\\\\\n"} 1.5\n',
        )
        assert get(port, "/metrics", header="localhost")[0] == 200
        assert get(port, "/metrics", header="attacker.example")[0] == 403  # a page whose name was rebound
        assert get(port, "/")[0] == 404
        with pytest.raises(ConnectionRefusedError):
            get(port, "/metrics", host="127.0.0.2")  # another address of this machine
    with served("the site is not connected") as port:
        assert get(port, "/healthz") == (503, "the site is not connected\n")
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")


def test_a_port_that_is_taken_ends_the_command_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "--data", "digits"]) == 0
    capsys.readouterr()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["federate", "run", str(tmp_path / "app"), "--metrics-port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: metrics cannot be served on 127.0.0.1:{port} (Address already in use)" in line
    assert main(["federate", "run", str(tmp_path / "app"), "--metrics-port", "70000"]) == 2
    assert "metrics cannot be served on 127.0.0.1:70000" in capsys.readouterr().err
