"""Updates on the server's disk: who can read them, and what a damaged file does."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.flower.received_replies import FOLDER, ReceivedReplies, request_digest
from fedskew.flower.site_replies import Reply


def test_a_reply_is_found_for_its_own_request_only(tmp_path: Path) -> None:
    replies, reply = ReceivedReplies(tmp_path), Reply({"round": 2}, b"tensors\nof a site")
    asked = request_digest({"key": {"round": 2}}, b"model")
    replies.keep(3, "north", asked, 70, reply)
    assert (tmp_path / FOLDER).stat().st_mode & 0o077 == 0
    assert replies.find(3, "north", asked) == reply
    assert replies.samples() == {"north": 70}
    for other in (request_digest({"key": {"round": 2}}, b"other"), request_digest({"key": {"round": 1}}, b"model")):
        assert replies.find(3, "north", other) is None
    assert replies.find(4, "north", asked) is None
    assert replies.find(3, "south", asked) is None
    replies.forget_before(4)
    assert replies.find(3, "north", asked) is None


def test_a_reply_with_tests_is_found_without_them_but_not_for_others(tmp_path: Path) -> None:
    replies, facts, tests = ReceivedReplies(tmp_path), {"key": {"round": 2}}, {"model": "global", "round": 2}
    asked, reply = request_digest({**facts, "tests": tests}, b"model"), Reply({"tests": {"right": 1}}, b"tensors")
    assert asked == request_digest(facts, b"model")
    replies.keep(3, "north", asked, 70, reply, tests)
    assert replies.find(3, "north", asked, tests) == replies.find(3, "north", asked) == reply
    assert replies.find(3, "north", asked, {**tests, "round": 3}) is None
    replies.keep(3, "north", asked, 70, reply)
    assert replies.find(3, "north", asked) == reply
    assert replies.find(3, "north", asked, tests) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]\n", b"\xff\n", b'{"request": "a", "facts": []}\n', b"7\nx"])
def test_a_damaged_file_counts_as_no_reply(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "round-1.north").write_bytes(content)
    assert ReceivedReplies(tmp_path).find(1, "north", "a") is None
    assert ReceivedReplies(tmp_path).samples() == {}
