"""Replies of sites as the server reads them, and the reasons why a reply is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message

from fedskew.errors import UserError
from fedskew.flower.audit import describe_reply
from fedskew.flower.chained_log import Entry
from fedskew.flower.wire import Facts, Garbled, from_records, one_line


@dataclass(frozen=True)
class Reply:
    """A site's reply."""

    facts: Facts
    payload: bytes


@dataclass(frozen=True)
class Failure:
    """The reason why a site has no usable reply."""

    reason: str
    event: str = "failed"
    """The event in the audit log: `refused`, `failed` (also if a reply cannot be read), `late` or `absent`."""
    timed_out: bool = False
    """Whether the site did not reply within the request's time-out. A site can be late before that."""


@dataclass(frozen=True)
class Quorum:
    """How many of `clients` must reply before the server stops waiting for late sites."""

    number: int
    clients: frozenset[int]

    def is_reached(self, answers: Mapping[int, Reply | Failure]) -> bool:
        replied = [client for client in self.clients if isinstance(answers.get(client), Reply)]
        return len(replied) >= min(self.number, len(self.clients))


def read_reply(message: Message) -> Reply | Failure:
    """Read the message with which a site answers a request."""
    if message.has_error():
        reason = one_line(str(message.error.reason or f"code {message.error.code}"))
        return Failure(f"its ClientApp or its node failed ({reason})")
    try:
        facts, payload = from_records(message.content)
    except Garbled as error:
        return Failure(f"its message cannot be read: {error}")
    for key in ("refused", "failed"):
        if key in facts:
            return Failure(one_line(str(facts[key])), key)
    return Reply(facts, payload)


def describe_answer(answer: Reply | Failure) -> Entry:
    """Describe a site's answer for the audit log."""
    if isinstance(answer, Failure):
        return {"event": answer.event, "reason": answer.reason} | ({"timed_out": True} if answer.timed_out else {})
    return describe_reply(answer.facts, answer.payload)


def usable_replies(answers: Mapping[int, Reply | Failure]) -> Iterable[tuple[int, Reply]]:
    """Select the sites that replied, with their replies."""
    return ((client, answer) for client, answer in answers.items() if isinstance(answer, Reply))


def require_any_reply(answers: Mapping[int, Reply | Failure], names: Sequence[str], what: str) -> None:
    """Raise a UserError if no site replied. `what` completes its text, such as `with its tests`."""
    if not any(isinstance(answer, Reply) for answer in answers.values()):
        reasons = "; ".join(f"{names[c]}: {a.reason}" for c, a in answers.items() if isinstance(a, Failure))
        raise UserError(f"no site replied {what}: {reasons}")
