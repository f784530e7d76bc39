"""The sites as the server sees them: which ones are connected, the requests to them, and their replies.

A site's name is the one with which its key was registered at the SuperLink. Without keys, it is the name that the site
claims. The server admits a site once the site has checked its data against the contract.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

from fedskew.errors import UserError, plural
from fedskew.flower.audit import describe_reply, describe_tensors
from fedskew.flower.chained_log import Entry
from fedskew.flower.reply_times import ReplyTimes
from fedskew.flower.versions import installed_versions, read_versions, version_problem, version_warnings
from fedskew.flower.wire import (
    MAX_SAMPLES,
    Facts,
    Garbled,
    from_records,
    is_count,
    one_line,
    tensors_record,
    to_records,
)

_POLL_SECONDS = 0.5
_GREET_AGAIN_SECONDS = 30.0
"""Seconds after which a site that was not admitted is greeted again."""
_LOST_SECONDS = 60.0
"""Seconds after which a site that has not replied is greeted again. Flower delivers a message at most once."""
_HELLO_SECONDS = 600.0
"""Seconds in which a site must reply to a greeting. It reads its data in this time."""
_SPARE_SECONDS = 5.0
"""Flower deletes a message this many seconds after the server has stopped waiting for the reply."""
_RESTART_CHECK_SECONDS = 5.0
"""Seconds after which the server looks again for SuperNodes that started again."""
_BATCH_SIZE = 4
"""Messages per call to Flower, which limits the time of a call. More large messages could not be sent in that time."""
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between attempts to reach the SuperLink."""

T = TypeVar("T")

_MESSAGE_TYPES = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}
"""Flower's message types. Other requests are queries."""


@dataclass(frozen=True)
class Reply:
    """A site's reply."""

    facts: Facts
    payload: bytes


@dataclass(frozen=True)
class Failure:
    """The reason why there is no usable reply."""

    reason: str
    event: str = "failed"
    """What the audit log calls it: `refused`, `failed` (also if a reply cannot be read), `late` or `absent`."""


@dataclass(frozen=True)
class Quorum:
    """How many of `clients` must reply before the server stops waiting for late sites."""

    number: int
    clients: frozenset[int]

    def is_reached(self, answers: Mapping[int, Reply | Failure]) -> bool:
        replied = [client for client in self.clients if isinstance(answers.get(client), Reply)]
        return len(replied) >= min(self.number, len(self.clients))


@dataclass
class _Node:
    """A node of the SuperLink."""

    name: str
    """The registered name. Empty if there is none."""
    started: str = ""
    """When its SuperNode connected, as Flower writes the time."""
    greetings: list[str] = field(default_factory=list)
    """The ids of greetings to which the node has not replied yet. More than one if the first may be lost."""
    greeted_at: float = 0.0
    client: int | None = None
    """The number of the node's site in the federation. None until it is admitted."""
    refusal: str | None = None
    """The reason why the node was not admitted."""
    refused_by_server: bool = False
    """Whether the server refused the site. The next greeting then tells the site the reason."""


class Sites:
    """All sites of a federation. A site's number is the position of its name in the list."""

    def __init__(
        self,
        grid: Grid,
        names: Sequence[str],
        terms: Facts,
        log: Callable[[str], None],
        most_samples: int = MAX_SAMPLES,
        reply_times: ReplyTimes | None = None,
        audit: Callable[[Entry], object] = dict,
        knows_samples: bool = True,
        start: bytes = b"",
    ) -> None:
        """`audit` receives an entry for each request and each reply. If the server does not know the sites' numbers of
        samples, each site counts as one sample when it is admitted. `start` has tensors that every greeting sends."""
        self._grid = grid
        self.names = tuple(names)
        self.terms = terms
        """What every site needs to know about the run."""
        self.log, self.audit = log, audit
        self._start = start
        self._most_samples, self._knows_samples = most_samples, knows_samples
        self._reply_times = reply_times or ReplyTimes()
        self._nodes: dict[int, _Node] = {}
        self.samples = [0] * len(names)
        """Training samples per site. 0 until it is admitted."""
        self._admitted: dict[int, int] = {}
        """The node of each admitted site."""

    @property
    def online(self) -> dict[int, int]:
        """The node of every site that is connected and admitted."""
        return dict(self._admitted)

    def wait_for(self, number: int) -> None:
        """Wait until this many sites are connected."""
        waiting: tuple[str, ...] | None = None
        self.refresh()
        while len(self._admitted) < number:
            missing = tuple(name for client, name in enumerate(self.names) if client not in self._admitted)
            if missing != waiting:
                waiting = missing
                self.log(
                    f"{len(self._admitted)} of {number} required sites are connected; absent: {', '.join(missing)}"
                )
            time.sleep(_POLL_SECONDS)
            self.refresh()

    def wait_for_greetings(self, seconds: float) -> None:
        """Wait until all connected sites have replied to their greetings, but at most this long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(node.greetings for node in self._nodes.values()):
            time.sleep(_POLL_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Update the list of connected sites. Greet new ones without waiting for their replies."""
        connected = {node.node_id: node for node in self._retry(lambda: list(self._grid.get_nodes()))}
        for gone in self._nodes.keys() - connected.keys():
            node = self._nodes.pop(gone)
            if node.client is not None and self._admitted.get(node.client) == gone:
                del self._admitted[node.client]
                self.log(f"warning: {self.names[node.client]} is disconnected")
                self.audit({"event": "disconnected", "site": self.names[node.client]})
        for number, info in connected.items():
            self._nodes.setdefault(number, _Node(info.name)).started = info.last_activated_at
        self._send_greetings()
        self._receive_greetings()

    def _send_greetings(self) -> None:
        now = time.monotonic()
        for number, node in self._nodes.items():
            is_new = not node.greetings and node.client is None and node.refusal is None
            seconds = now - node.greeted_at
            is_due_again = node.refusal is not None and seconds > _GREET_AGAIN_SECONDS
            is_lost = bool(node.greetings) and seconds > _LOST_SECONDS
            if is_new or is_due_again or is_lost:
                facts: Facts = {"versions": installed_versions()}
                facts |= {"refused": node.refusal} if node.refused_by_server else {}
                tensors = tensors_record(self._start) if self._start else None
                greeting = functools.partial(
                    self._message, "hello", facts=facts, tensors=tensors, timeout=_HELLO_SECONDS
                )
                entry = {"event": "request", "kind": "hello", "sites": [node.name or f"node {number}"]}
                self.audit(entry | (describe_tensors(self._start) if self._start else {}))
                node.greetings += filter(None, self._push(greeting, [number]))
                node.greeted_at = now

    def _receive_greetings(self) -> None:
        pending = {sent: (number, node) for number, node in self._nodes.items() for sent in node.greetings}
        if not pending:
            return
        for message in self._pull(list(pending)):
            number, node = pending[message.metadata.reply_to_message_id]
            if not node.greetings:
                continue  # it has already replied to another greeting
            node.greetings = []
            reply = _read(message)
            self.audit({"site": node.name or f"node {number}", "kind": "hello"} | _describe(reply))
            refusal = self._admit(number, node, reply)
            if refusal and refusal != node.refusal:
                self.log(f"warning: {node.name or f'node {number}'} is not admitted: {refusal}")
                self.audit(
                    {"event": "discarded", "site": node.name or f"node {number}", "kind": "hello", "reason": refusal}
                )
                node.refused_by_server = isinstance(reply, Reply)
                node.greeted_at = (
                    -_GREET_AGAIN_SECONDS if node.refused_by_server else node.greeted_at
                )  # greet it again at once
            node.refusal = refusal

    def _admit(self, number: int, node: _Node, reply: Reply | Failure) -> str | None:
        """Admit a node, or return the reason why not."""
        if isinstance(reply, Failure):
            return reply.reason
        name, samples = one_line(str(reply.facts.get("site"))), reply.facts.get("samples") if self._knows_samples else 1
        versions = read_versions(reply.facts.get("versions"))
        if problem := version_problem(versions.get("fedskew")):
            return problem
        if node.name and name != node.name:
            return f"its key belongs to {node.name!r}, but its site.yaml has the name {name!r}"
        if name not in self.names:
            return f"its name is {name!r}; expected one of {', '.join(self.names)}"
        if not is_count(samples, at_least=1):
            return f"it reports {one_line(repr(samples))} samples; expected a whole number of at least 1"
        if samples > self._most_samples:
            return f"it reports {samples} samples; expected at most {self._most_samples} (federation.most_samples)"
        client = self.names.index(name)
        if self._admitted.get(client, number) != number:
            return f"another node, {self._admitted[client]}, is already {name!r}"
        node.client, self._admitted[client], self.samples[client] = client, number, samples
        for warning in version_warnings(versions, installed_versions()):
            self.log(f"warning: {name} has {warning}")
        self.log(f"{name} is connected" + (f" with {plural(samples, 'sample')}" if self._knows_samples else ""))
        return None

    def request(
        self,
        kind: str,
        facts: Mapping[int, Facts],
        payload: bytes,
        timeout: float,
        group: str = "",
        quorum: Quorum | None = None,
        is_timed: bool = True,
        keep: Callable[[int, Reply], None] = lambda _client, _reply: None,
        repeats: bool = False,
    ) -> dict[int, Reply | Failure]:
        """Send each site its facts, and all of them the same payload. Return their replies within `timeout` seconds.

        Once `quorum` is reached, a site has only its usual time, times some grace (see `reply_times`). Without
        `is_timed`, the replies do not change the usual times. `keep` is called with each reply before the audit log
        records it. With `repeats`, a site whose SuperNode was started again gets its request again, because it has lost
        the first one.
        """
        nodes, began = self.online, time.monotonic()
        self._record_requests(kind, facts, payload, group)
        answers: dict[int, Reply | Failure] = {
            c: Failure("it is not connected", "absent") for c in facts if c not in nodes
        }
        tensors = tensors_record(payload)

        def make(client: int) -> Message:
            return self._message(kind, nodes[client], facts[client], tensors, timeout, group)

        sent = [client for client in facts if client in nodes]
        starts = {client: self._nodes[nodes[client]].started for client in sent}
        waiting = self._send(make, sent)
        refused = set(sent) - set(waiting.values())
        answers |= dict.fromkeys(refused, Failure("the SuperLink did not accept the message to it", "absent"))
        for client, answer in answers.items():
            self._record_answer(kind, client, facts[client], group, answer)
        end, next_check = time.monotonic() + timeout, began + _RESTART_CHECK_SECONDS
        while waiting:
            for message in self._pull(list(waiting)):
                if message.metadata.reply_to_message_id not in waiting:
                    continue  # the site has already replied to the same request
                client = waiting[message.metadata.reply_to_message_id]
                waiting = {message_id: c for message_id, c in waiting.items() if c != client}
                answers[client] = answer = _read(message)
                if isinstance(answer, Reply):
                    keep(client, answer)
                self._record_answer(kind, client, facts[client], group, answer)
                if is_timed and isinstance(answer, Reply):
                    self._reply_times.add(client, time.monotonic() - began)
            if time.monotonic() >= end:
                missing = self._missing(waiting, timeout)
            else:
                missing = self._late(waiting, answers, time.monotonic() - began, quorum)
            answers |= missing
            for client, answer in missing.items():
                self._record_answer(kind, client, facts[client], group, answer)
            waiting = {message_id: client for message_id, client in waiting.items() if client not in missing}
            if repeats and waiting and time.monotonic() >= next_check:
                next_check = time.monotonic() + _RESTART_CHECK_SECONDS
                again = self._find_restarted(set(waiting.values()), nodes, starts)
                self._record_requests(kind, {client: facts[client] for client in again}, payload, group)
                waiting |= self._send(make, again)
            if waiting:
                time.sleep(_POLL_SECONDS)
        return dict(sorted(answers.items()))

    def _send(self, make: Callable[[int], Message], clients: Sequence[int]) -> dict[str, int]:
        """Send these clients their messages. Return the clients by the ids of the messages that Flower accepted."""
        sent: dict[str, int] = {}
        for batch in _batches(clients):
            ids = self._push(make, batch)
            sent |= {message_id: client for message_id, client in zip(ids, batch, strict=True) if message_id}
        return sent

    def _find_restarted(self, clients: set[int], nodes: Mapping[int, int], starts: dict[int, str]) -> list[int]:
        """Find the clients whose SuperNodes started again, and update `starts`, the times of their last starts."""
        now = {node.node_id: node.last_activated_at for node in self._retry(lambda: list(self._grid.get_nodes()))}
        again = [client for client in sorted(clients) if now.get(nodes[client], starts[client]) != starts[client]]
        for client in again:
            starts[client] = now[nodes[client]]
            self.log(f"{self.names[client]} started again and gets its request again")
        return again

    def _record_requests(self, kind: str, facts: Mapping[int, Facts], payload: bytes, group: str) -> None:
        """Record one request for each kind, with the sites that receive it."""
        round = {"round": int(group)} if group.isdigit() else {}
        for each in sorted({str(sent.get("kind", kind)) for sent in facts.values()}):
            names = [self.names[client] for client, sent in facts.items() if sent.get("kind", kind) == each]
            self.audit({"event": "request", "kind": each, **round, "sites": names} | describe_tensors(payload))

    def _record_answer(self, kind: str, client: int, sent: Facts, group: str, answer: Reply | Failure) -> None:
        round = {"round": int(group)} if group.isdigit() else {}
        self.audit({"site": self.names[client], "kind": sent.get("kind", kind), **round} | _describe(answer))

    def _missing(self, waiting: Mapping[str, int], timeout: float) -> dict[int, Failure]:
        """Return failures for all sites that have not replied when the time is up."""
        for client in waiting.values():
            self._reply_times.add_missed(client)
        return dict.fromkeys(waiting.values(), Failure(f"it did not reply within {timeout:g} s", "late"))

    def _late(
        self, waiting: Mapping[str, int], answers: Mapping[int, Reply | Failure], seconds: float, quorum: Quorum | None
    ) -> dict[int, Failure]:
        """Return failures for the sites for which the server no longer waits, because enough others have replied."""
        if quorum is None or not quorum.is_reached(answers):
            return {}
        replied = len(dict(usable_replies(answers)))
        return {
            client: Failure(
                f"it is late: no reply after {seconds:.0f} s, but {plural(replied, 'other site')} replied; its usual "
                f"time is {self._reply_times.usual(client):.0f} s",
                "late",
            )
            for client in waiting.values()
            if seconds > self._reply_times.limit(client)
        }

    def _push(self, message: Callable[[int], Message], clients: Sequence[int]) -> list[str]:
        """Send each client its message and return the message ids. A retry makes new messages, as Flower requires."""
        return self._retry(lambda: list(self._grid.push_messages([message(client) for client in clients])))

    def _pull(self, message_ids: Sequence[str]) -> list[Message]:
        return self._retry(lambda: list(self._grid.pull_messages(list(message_ids))))

    def _retry(self, call: Callable[[], T]) -> T:
        """Call Flower. Repeat the call if it fails for a reason that may pass, such as a busy SuperLink."""
        for wait in _RETRY_SECONDS:
            try:
                return call()
            except (httpx.HTTPError, ObjectPushError, ObjectPullError) as error:
                reason = one_line(f"{type(error).__name__}: {error}")
                self.log(f"warning: the SuperLink failed ({reason}); next attempt in {wait:g} s")
                time.sleep(wait)
        return call()

    def _message(
        self, kind: str, node: int, facts: Facts, tensors: ArrayRecord | None, timeout: float, group: str = ""
    ) -> Message:
        content = to_records({"kind": kind, "terms": self.terms, **facts}, tensors)
        message_type = _MESSAGE_TYPES.get(facts.get("kind", kind), MessageType.QUERY)
        return Message(content, node, message_type, ttl=timeout + _SPARE_SECONDS, group_id=group)


def _describe(answer: Reply | Failure) -> Entry:
    """Describe a site's reply for the audit log."""
    if isinstance(answer, Failure):
        return {"event": answer.event, "reason": answer.reason}
    return describe_reply(answer.facts, answer.payload)


def _batches(clients: Sequence[int]) -> Iterable[Sequence[int]]:
    return (clients[first : first + _BATCH_SIZE] for first in range(0, len(clients), _BATCH_SIZE))


def _read(message: Message) -> Reply | Failure:
    if message.has_error():
        return Failure(f"its ClientApp or its node failed ({_reason(message)})")
    try:
        facts, payload = from_records(message.content)
    except Garbled as error:
        return Failure(f"its message cannot be read: {error}")
    for key in ("refused", "failed"):
        if key in facts:
            return Failure(one_line(str(facts[key])), key)
    return Reply(facts, payload)


def _reason(message: Message) -> str:
    return one_line(str(message.error.reason or f"code {message.error.code}"))


def require_any_reply(answers: Mapping[int, Reply | Failure], names: Sequence[str], what: str) -> None:
    """Raise a UserError if no site replied."""
    if not any(isinstance(answer, Reply) for answer in answers.values()):
        reasons = "; ".join(f"{names[c]}: {a.reason}" for c, a in answers.items() if isinstance(a, Failure))
        raise UserError(f"no site replied {what}: {reasons}")


def usable_replies(answers: Mapping[int, Reply | Failure]) -> Iterable[tuple[int, Reply]]:
    """Select the sites that replied, with their replies."""
    return ((client, answer) for client, answer in answers.items() if isinstance(answer, Reply))
