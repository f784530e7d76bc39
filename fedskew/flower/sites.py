"""The sites as the server sees them: which ones are connected, the questions to them, and their answers.

A site is known by the name under which its key was registered with the SuperLink; without keys, by its own claim. It is
let in once it has checked its data against the contract.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

from fedskew.errors import UserError
from fedskew.flower.reply_times import ReplyTimes
from fedskew.flower.wire import MOST, Facts, Garbled, from_records, is_count, one_line, tensors_record, to_records

_POLL_SECONDS = 0.5
_ASK_AGAIN_SECONDS = 30.0
_HELLO_SECONDS = 600.0
_SPARE_SECONDS = 5.0
_AT_ONCE = 4
"""Messages per call to Flower: with many large ones in one call, the time to send them is up before they are sent."""
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)

T = TypeVar("T")

_TYPES = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


@dataclass(frozen=True)
class Reply:
    """A site's answer."""

    facts: Facts
    payload: bytes


@dataclass(frozen=True)
class Failure:
    """Why a site gave no usable answer."""

    reason: str


@dataclass(frozen=True)
class Quorum:
    """How many of some clients must reply before the others can be late."""

    number: int
    clients: frozenset[int]

    def is_reached(self, answers: Mapping[int, Reply | Failure]) -> bool:
        replied = [client for client in self.clients if isinstance(answers.get(client), Reply)]
        return len(replied) >= min(self.number, len(self.clients))


@dataclass
class _Node:
    """A node of the SuperLink."""

    name: str
    """The registered name; empty if there is none."""
    asked: str | None = None
    """The greeting that it has not answered yet."""
    asked_at: float = 0.0
    client: int | None = None
    refused: str | None = None
    refused_here: bool = False
    """Whether the server refused the site, which then learns the reason by the next greeting."""


class Sites:
    """All sites of a federation, by their number: the place of their name in the list."""

    def __init__(
        self,
        grid: Grid,
        names: Sequence[str],
        terms: Facts,
        say: Callable[[str], None],
        most_samples: int = MOST,
        reply_times: ReplyTimes | None = None,
    ) -> None:
        self._grid = grid
        self.names = tuple(names)
        self._terms = terms
        self.say = say
        self._most_samples = most_samples
        self._reply_times = reply_times or ReplyTimes()
        self._nodes: dict[int, _Node] = {}
        self.samples = [0] * len(names)
        """Training samples per site; 0 before it was let in."""
        self._met: dict[int, int] = {}

    @property
    def online(self) -> dict[int, int]:
        """The node of every site that is connected and let in."""
        return dict(self._met)

    def await_some(self, least: int) -> None:
        """Wait until `least` sites are connected."""
        waiting: tuple[str, ...] | None = None
        self.look_around()
        while len(self._met) < least:
            missing = tuple(name for number, name in enumerate(self.names) if number not in self._met)
            if missing != waiting:
                waiting = missing
                self.say(f"{len(self._met)} of {least} sites needed are here; absent: {', '.join(missing)}")
            time.sleep(_POLL_SECONDS)
            self.look_around()

    def look_around(self) -> None:
        """Notice which sites came and went; greet newcomers without waiting for them."""
        there = {node.node_id: node.name for node in self._retry(lambda: list(self._grid.get_nodes()))}
        for gone in self._nodes.keys() - there.keys():
            node = self._nodes.pop(gone)
            if node.client is not None and self._met.get(node.client) == gone:
                del self._met[node.client]
                self.say(f"{self.names[node.client]} is gone")
        for number, name in there.items():
            self._nodes.setdefault(number, _Node(name))
        self._greet()
        self._take_greetings()

    def _greet(self) -> None:
        now = time.monotonic()
        for number, node in self._nodes.items():
            again = node.refused is not None and now - node.asked_at > _ASK_AGAIN_SECONDS
            if (node.asked is None and node.client is None and node.refused is None) or again:
                facts = {"refused": node.refused} if node.refused_here else {}
                greeting = functools.partial(self._message, "hello", facts=facts, tensors=None, timeout=_HELLO_SECONDS)
                (node.asked,) = self._push(greeting, [number])
                node.asked_at = now

    def _take_greetings(self) -> None:
        pending = {node.asked: (number, node) for number, node in self._nodes.items() if node.asked is not None}
        if not pending:
            return
        for message in self._pull(list(pending)):
            number, node = pending[message.metadata.reply_to_message_id]
            node.asked = None
            reply = _read(message)
            refusal = self._introduced(number, node, reply)
            if refusal and refusal != node.refused:
                self.say(f"{node.name or f'node {number}'} is not let in: {refusal}")
                node.refused_here = isinstance(reply, Reply)
                node.asked_at = -_ASK_AGAIN_SECONDS if node.refused_here else node.asked_at  # let it know at once
            node.refused = refusal

    def _introduced(self, number: int, node: _Node, reply: Reply | Failure) -> str | None:
        """Let a node in, or return the reason why not."""
        if isinstance(reply, Failure):
            return reply.reason
        said, samples = one_line(str(reply.facts.get("site"))), reply.facts.get("samples")
        if node.name and said != node.name:
            return f"its key belongs to {node.name!r}, but its site.yaml says {said!r}"
        if said not in self.names:
            return f"it is called {said!r}; expected one of {', '.join(self.names)}"
        if not is_count(samples, least=1):
            return f"it says that it has {one_line(repr(samples))} samples; expected a whole number of at least 1"
        if samples > self._most_samples:
            return f"it claims {samples} samples; expected at most {self._most_samples} (federation.most_samples)"
        client = self.names.index(said)
        if self._met.get(client, number) != number:
            return f"another node, {self._met[client]}, is {said!r} already"
        node.client, self._met[client], self.samples[client] = client, number, samples
        self.say(f"{said} is here with {samples} samples")
        return None

    def ask(
        self,
        kind: str,
        facts: Mapping[int, Facts],
        payload: bytes,
        timeout: float,
        group: str = "",
        enough: Quorum | None = None,
    ) -> dict[int, Reply | Failure]:
        """Send each site its facts, and all of them one payload; return their answers within `timeout` seconds.

        Once `enough` sites have replied, the others have only their usual time and some grace.
        """
        nodes, began = self.online, time.monotonic()
        answers: dict[int, Reply | Failure] = {c: Failure("it is not connected") for c in facts if c not in nodes}
        tensors = tensors_record(payload)
        waiting: dict[str, int] = {}
        for some in _batches([client for client in facts if client in nodes]):
            sent = self._push(lambda c: self._message(kind, nodes[c], facts[c], tensors, timeout, group), some)
            waiting |= {number: client for number, client in zip(sent, some, strict=True) if number}
            refused = [client for number, client in zip(sent, some, strict=True) if not number]
            answers |= dict.fromkeys(refused, Failure("the SuperLink did not accept the message to it"))
        end = time.monotonic() + timeout
        while waiting:
            for message in self._pull(list(waiting)):
                client = waiting.pop(message.metadata.reply_to_message_id)
                answers[client] = _read(message)
                if isinstance(answers[client], Reply):
                    self._reply_times.add(client, time.monotonic() - began)
            if time.monotonic() >= end:
                missing = self._missing(waiting, timeout)
            else:
                missing = self._late(waiting, answers, time.monotonic() - began, enough)
            answers |= missing
            waiting = {number: client for number, client in waiting.items() if client not in missing}
            if waiting:
                time.sleep(_POLL_SECONDS)
        return dict(sorted(answers.items()))

    def _missing(self, waiting: Mapping[str, int], timeout: float) -> dict[int, Failure]:
        """All sites that have not replied when the time is up."""
        for client in waiting.values():
            self._reply_times.add_missed(client)
        return dict.fromkeys(waiting.values(), Failure(f"it did not reply within {timeout:g} s"))

    def _late(
        self, waiting: Mapping[str, int], answers: Mapping[int, Reply | Failure], seconds: float, enough: Quorum | None
    ) -> dict[int, Failure]:
        """The sites that are not waited for any longer, since enough others have replied."""
        if enough is None or not enough.is_reached(answers):
            return {}
        replies = sum(isinstance(answer, Reply) for answer in answers.values())
        return {
            client: Failure(
                f"it is late: no reply after {seconds:.0f} s, and {replies} other sites replied; usual are "
                f"{self._reply_times.usual(client):.0f} s"
            )
            for client in waiting.values()
            if seconds > self._reply_times.limit(client)
        }

    def _push(self, message: Callable[[int], Message], clients: Sequence[int]) -> list[str]:
        """Send each client its message. A failed attempt is repeated with new messages, which Flower requires."""
        return self._retry(lambda: list(self._grid.push_messages([message(client) for client in clients])))

    def _pull(self, sent: Sequence[str]) -> list[Message]:
        return self._retry(lambda: list(self._grid.pull_messages(list(sent))))

    def _retry(self, call: Callable[[], T]) -> T:
        """Call Flower, several times if it fails for a reason that may pass: a busy SuperLink, a locked database."""
        for wait in _RETRY_SECONDS:
            try:
                return call()
            except (httpx.HTTPError, ObjectPushError, ObjectPullError) as error:
                self.say(
                    f"the SuperLink failed ({one_line(f'{type(error).__name__}: {error}')}); next try in {wait:g} s"
                )
                time.sleep(wait)
        return call()

    def _message(
        self, kind: str, node: int, facts: Facts, tensors: ArrayRecord | None, timeout: float, group: str = ""
    ) -> Message:
        content = to_records({"kind": kind, "terms": self._terms, **facts}, tensors)
        message_type = _TYPES.get(facts.get("kind", kind), MessageType.QUERY)
        return Message(content, node, message_type, ttl=timeout + _SPARE_SECONDS, group_id=group)


def _batches(clients: Sequence[int]) -> Iterable[Sequence[int]]:
    return (clients[first : first + _AT_ONCE] for first in range(0, len(clients), _AT_ONCE))


def _read(message: Message) -> Reply | Failure:
    if message.has_error():
        return Failure(f"its ClientApp or its node failed ({_reason(message)})")
    try:
        facts, payload = from_records(message.content)
    except Garbled as error:
        return Failure(f"its message is garbage: {error}")
    for key in ("refused", "failed"):
        if key in facts:
            return Failure(one_line(str(facts[key])))
    return Reply(facts, payload)


def _reason(message: Message) -> str:
    return one_line(str(message.error.reason or f"code {message.error.code}"))


def require_some(answers: Mapping[int, Reply | Failure], names: Sequence[str], what: str) -> None:
    """Refuse to go on without a single answer."""
    if not any(isinstance(answer, Reply) for answer in answers.values()):
        reasons = "; ".join(f"{names[c]}: {a.reason}" for c, a in answers.items() if isinstance(a, Failure))
        raise UserError(f"no site answered {what}: {reasons}")


def good(answers: Mapping[int, Reply | Failure]) -> Iterable[tuple[int, Reply]]:
    return ((client, answer) for client, answer in answers.items() if isinstance(answer, Reply))
