"""`fedskew doctor`."""

from __future__ import annotations

import socket


def test_it_shows_every_section_and_ends_with_a_verdict(cli):
    outcome = cli("doctor")
    assert outcome.status == 0
    for shown in ("versions", "torch", "devices", "cpu", "extras", "flower", "data", "federation", "port 9092"):
        assert shown in outcome.out
    assert outcome.out.rstrip().endswith("everything needed works")


def test_json_has_the_status_of_every_check(cli):
    report = cli("doctor", "--json").json
    assert report["healthy"] is True
    assert report["versions"]["torch"]["status"] == "ok"
    assert {"versions", "devices", "extras", "data", "federation"} < report.keys()


def test_the_exit_status_is_1_if_something_needed_is_broken(cli):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        outcome = cli("doctor", "--port", str(port))
    assert outcome.status == 1
    assert outcome.out.rstrip().endswith(f"broken: port {port}")


def test_a_mistake_is_one_line(cli):
    outcome = cli("doctor", "--keys", "absent")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
