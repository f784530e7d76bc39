"""The audit logs of the sites and of the server have what was requested, what left, and what was refused."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from in_process import Case, answer_as_workers, case, small_data

from fedskew.cli import main
from fedskew.data import Dirichlet, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower import client_app, node
from fedskew.flower.audit import NAME, describe_reply, describe_request, find_log, site_log
from fedskew.flower.chained_log import Entry, head_path, read_chain
from fedskew.flower.policy import Policy
from fedskew.flower.releases import Release
from fedskew.flower.server_app import main as server_main
from fedskew.flower.server_app import run_federation
from fedskew.flower.site_ledger import NAME as LEDGER
from fedskew.flower.site_ledger import SiteLedger
from fedskew.flower.wire import digest, to_records


def audited_case(folder: Path, rounds: int = 2, **own: Any) -> Case:
    """A federation whose sites answer as their workers do, with audit logs."""
    data = small_data(folder)
    split = federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)
    values = {"method": "fedavg", "rounds": rounds, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    here = case(folder, split, data, with_values(Config(), values), **own)
    answer_as_workers(here, data)
    return here


def entries(path: Path) -> list[Entry]:
    chain = read_chain(find_log(path))
    assert chain.problem is None
    return list(chain.entries)


def test_the_sites_and_the_server_record_the_same_messages(tmp_path: Path) -> None:
    here = audited_case(tmp_path)
    run_federation(here.grid, here.context)
    server = entries(tmp_path / "run")
    for name in here.names:
        site = entries(tmp_path / name)
        assert [(entry["kind"], entry.get("round")) for entry in site] == [("hello", None), ("train", 1), ("train", 2)]
        received = [entry for entry in server if entry.get("site") == name]
        for sent, got in zip(site, received, strict=True):
            assert sent["event"] == got["event"] == "reply"
            assert sent["facts"] == got["facts"]
            assert sent.get("tensors") == got.get("tensors")
    left = [message for message in here.grid.sent if message.site == "site-0" and message.kind == "train"]
    logged = [entry for entry in entries(tmp_path / "site-0") if entry["kind"] == "train"]
    for message, entry in zip(left, logged, strict=True):
        assert entry["tensors"]["digest"] == digest(message.payload)
        assert entry["tensors"]["bytes"] == len(message.payload)
        assert entry["tensors"]["shapes"]["trained:params/head.bias"] == "float32[10]"
        assert entry["facts"]["names"] == sorted(message.facts)
    requests = [entry for entry in server if entry["event"] == "request" and entry["kind"] == "train"]
    assert [(entry["round"], entry["sites"]) for entry in requests] == [(1, here.names), (2, here.names)]
    assert server[0]["event"] == "start"


def test_refusals_and_errors_are_recorded_on_both_sides(tmp_path: Path) -> None:
    here = audited_case(tmp_path, rounds=1, minimum=2)
    file = tmp_path / "site-1" / "site.yaml"
    file.write_text(file.read_text() + "policy: {noise: 1}\n")
    run_federation(here.grid, here.context)
    reason = "this site demands local noise (policy.noise); expected federation.privacy = 'local'"
    (refused,) = [entry for entry in entries(tmp_path / "site-1") if entry["event"] == "refused"]
    assert (refused["kind"], refused["round"], refused["reason"]) == ("train", 1, reason)
    (refused,) = [entry for entry in entries(tmp_path / "run") if entry["event"] == "refused"]
    assert (refused["site"], refused["round"], refused["reason"]) == ("site-1", 1, reason)


def test_tests_that_a_site_withholds_are_not_among_what_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"evaluation": "sites", "site_metrics": "total", "local_tests": True}
    here = audited_case(tmp_path, rounds=2, **own)
    for name in here.names[:2]:
        file = tmp_path / name / "site.yaml"
        file.write_text(file.read_text() + "policy: {reveals: [column sums]}\n")
    run_federation(here.grid, here.context)
    for place, site in ((tmp_path / "site-0", {}), (tmp_path / "run", {"site": "site-0"})):
        replies = [
            entry for entry in entries(place) if entry.items() >= {"event": "reply", "kind": "train", **site}.items()
        ]
        tested = [entry for entry in replies if "withheld" in entry]
        assert tested
        assert tested[-1]["withheld"].keys() == {"tests", "local_tests"}
        assert "this site allows metrics: none" in tested[-1]["withheld"]["tests"]
        assert all(not {"tests", "local_tests"} & set(entry["facts"]["names"]) for entry in replies)
    sent = [entry for entry in entries(tmp_path / "site-2") if "tests" in entry.get("facts", {}).get("names", ())]
    assert sent
    assert list(sent[-1]["withheld"]) == ["local_tests"], "metrics: total is the default of a site without a policy"
    capsys.readouterr()
    assert main(["federate", "audit", "show", str(tmp_path / "site-0" / "site.yaml")]) == 0
    line = [line for line in capsys.readouterr().out.splitlines() if "reply  train  round 2" in line][-1]
    assert "facts finite, loss, round, start, visits (" in line
    assert "without tests (the server requests metrics 'total'; this site allows metrics: none (site.yaml))" in line
    assert "without local_tests (" in line


def test_results_beside_a_refusal_count_as_sent() -> None:
    for value in ({"refused": "no", "right": 3}, {"right": 3}, ["refused"], None):
        described = describe_reply({"tests": value, "loss": 1.0}, b"")
        assert described["facts"]["names"] == ["loss", "tests"]
        assert "withheld" not in described


def test_a_discarded_update_and_the_end_are_in_the_server_s_log(tmp_path: Path) -> None:
    here = audited_case(tmp_path, rounds=1, attempts=1)
    here.grid.meddle = lambda site, asked, facts, payload: (
        (facts | {"round": 7}, payload) if (site, asked["kind"]) == ("site-2", "train") else (facts, payload)
    )
    with pytest.raises(UserError, match="too few good updates"):
        server_main(here.grid, here.context)
    *_, discarded, end = entries(tmp_path / "run")
    assert (discarded["event"], discarded["site"]) == ("discarded", "site-2")
    assert "round 7" in discarded["reason"]
    assert (end["event"], end["status"]) == ("end", "stopped")
    assert "too few good updates" in end["reason"]


@pytest.mark.parametrize("named", ["", "site.yaml", "kept", "kept/audit.jsonl"])
def test_the_log_of_a_site_is_in_the_state_folder_of_its_site_yaml(named: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("name: a\ndata: digits\nstate: kept\n")
    for folder in ("state", "kept"):  # the first is of an earlier site.yaml
        (tmp_path / folder).mkdir()
        (tmp_path / folder / NAME).touch()
    assert find_log(tmp_path / named) == tmp_path / "kept" / NAME


def test_the_log_of_a_site_without_site_yaml_is_in_its_folder_state(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / NAME).touch()
    assert find_log(tmp_path) == tmp_path / "state" / NAME
    with pytest.raises(UserError, match="state/none has no audit log; expected a run's folder, a site's folder"):
        find_log(tmp_path / "state" / "none")


def test_a_reply_that_cannot_be_recorded_does_not_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = audited_case(tmp_path, rounds=1, minimum=2)
    (tmp_path / "site-1" / "state").mkdir()
    (tmp_path / "site-1" / "state" / NAME).mkdir()
    run_federation(here.grid, here.context)
    sent = [message for message in here.grid.sent if message.site == "site-1"]
    assert {message.facts["refused"] for message in sent} == {
        "its audit log cannot be written; the reason is in its log"
    }
    assert all(message.payload == b"" for message in sent)
    assert str(tmp_path / "site-1" / "state" / NAME) in capsys.readouterr().err


def test_a_reply_with_a_changed_ledger_does_not_leave_and_is_recorded_as_refused(tmp_path: Path) -> None:
    here = audited_case(tmp_path, rounds=1, minimum=2)
    state = tmp_path / "site-1" / "state"
    for number in (1, 2):
        SiteLedger(state, Policy()).charge(Release("earlier", number, "local", 2.0))
    ledger = state / LEDGER
    ledger.write_text(ledger.read_text().replace('"round":1', '"round":9'))
    run_federation(here.grid, here.context)
    reason = "its state cannot be read or written; the reason is in its log"
    (sent,) = [message for message in here.grid.sent if message.site == "site-1" and message.kind == "train"]
    assert (sent.facts, sent.payload) == ({"refused": reason}, b"")
    last = entries(tmp_path / "site-1")[-1]
    assert (last["event"], last["reason"]) == ("refused", reason)
    assert not last.keys() & {"facts", "tensors", "epsilon"}


def test_a_refused_app_is_recorded_with_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the SuperNode, which does not start the worker for such an app."""
    site = tmp_path / "site.yaml"
    site.write_text("name: a\ndata: digits\nstate: kept\n")
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's own processes do
    monkeypatch.setattr(node.client_app, "app_hash", "abc")
    request = Message(to_records({"kind": "hello"}, None), 1, MessageType.QUERY)
    request.metadata.__dict__["_message_id"] = "1"
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    node.refusing_app("the site has not approved this app", site)(request, context)
    (entry,) = entries(tmp_path / "kept" / NAME)
    assert (entry["event"], entry["kind"], entry["app"]) == ("refused", "hello", "abc")
    assert site_log(site).path == tmp_path / "kept" / NAME


def test_a_worker_that_ends_without_an_answer_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ClientApp records it, because the worker cannot."""
    site = tmp_path / "site.yaml"
    site.write_text("name: a\ndata: digits\n")

    def hang_up(_: Path) -> socket.socket:
        worker, mine = socket.socketpair()
        worker.close()
        return mine

    monkeypatch.setattr(client_app, "_connect_to_worker", hang_up)
    with pytest.raises(RuntimeError, match="ended twice") as failure:
        client_app._request(site, {"kind": "train", "key": {"round": 1}}, b"")
    assert str(tmp_path) not in str(failure.value), "Flower sends this text to the server"
    (entry,) = entries(tmp_path)
    assert (entry["event"], entry["kind"], entry["round"]) == ("failed", "train", 2)


def test_requests_and_replies_of_any_form_are_described() -> None:
    assert describe_request({"kind": ["\ud800"], "key": 3, "run": 4}) == {"kind": "['\\ud800']"}
    assert describe_request({"kind": "train", "key": {"round": 4}, "run": "a\nb"})["run"] == "a b"
    assert describe_reply({"\ud800": 1}, b"\xff" * 40)["tensors"]["shapes"] is None
    assert describe_reply({}, (4).to_bytes(8, "little") + b"[[]]")["tensors"]["shapes"] is None


def test_the_commands_verify_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = audited_case(tmp_path, rounds=1)
    run_federation(here.grid, here.context)
    capsys.readouterr()
    site, log = str(tmp_path / "site-0" / "site.yaml"), tmp_path / "site-0" / "state" / NAME
    assert main(["federate", "audit", "verify", site, "--json"]) == 0
    verified = json.loads(capsys.readouterr().out)
    assert (verified["entries"], verified["repaired"]) == (2, 0)
    assert main(["federate", "audit", "verify", site, "--contains", verified["head"]]) == 0
    assert f"is intact: 2 entries; last hash {verified['head']}" in capsys.readouterr().out
    assert main(["federate", "audit", "verify", site, "--contains", "abc"]) == 2
    assert "has no entry with the hash 'abc'" in capsys.readouterr().err
    assert main(["federate", "audit", "show", site]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "reply  train  round 1  facts finite, loss, round, start, visits" in shown[1]
    assert main(["federate", "audit", "show", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["event"] == "start"
    head = head_path(log).read_text()
    head_path(log).write_text(json.dumps(json.loads(head) | {"number": 3}))
    assert main(["federate", "audit", "show", site]) == 0
    shown_anyway, warned = capsys.readouterr()
    assert shown_anyway.splitlines() == shown
    assert "names entry 3: the rest is missing" in warned
    assert "not shown" not in warned
    head_path(log).write_text(head)
    log.write_text(log.read_text().replace('"event":"reply"', '"event":"other"', 1))
    assert main(["federate", "audit", "verify", site]) == 2
    assert f"error: {log}: line 1 was changed" in capsys.readouterr().err
    assert main(["federate", "audit", "show", site]) == 0
    warned = " ".join(capsys.readouterr().err.split())
    assert "warning: line 1 was changed" in warned
    assert "the entries from there on are not shown" in warned
    assert main(["federate", "audit", "verify", str(tmp_path)]) == 2
    assert "has no audit log" in capsys.readouterr().err
