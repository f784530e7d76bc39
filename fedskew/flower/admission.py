"""The admission of sites. The server greets every node that connects, and admits it if its reply is acceptable.

A site's name is the one with which its key was registered at the SuperLink. Without keys, it is the name that the site
claims. A greeting has the contract (`contract.py`), and the site checks its data against it before it replies.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedskew.errors import plural
from fedskew.flower.audit import describe_tensors
from fedskew.flower.chained_log import Entry
from fedskew.flower.site_replies import Failure, Reply, describe_answer, read_reply
from fedskew.flower.superlink_calls import SuperLinkCalls, make_message
from fedskew.flower.versions import installed_versions, read_versions, version_problem, version_warnings
from fedskew.flower.wire import Facts, is_count, one_line, tensors_record

_GREET_AGAIN_SECONDS = 30.0
"""Seconds after which a site that was not admitted is greeted again."""
_LOST_SECONDS = 60.0
"""Seconds after which a site that has not replied is greeted again. Flower may lose a message."""
_HELLO_SECONDS = 600.0
"""Seconds in which a site must reply to a greeting. It reads its data before it replies."""


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
    """When the last greeting was sent, in seconds of `time.monotonic`."""
    client: int | None = None
    """The number of the node's site in the federation. None until it is admitted."""
    refusal: str | None = None
    """The reason why the node was not admitted. None before its reply, and if it was admitted."""
    refused_by_server: bool = False
    """Whether the refusal is the server's own, and not the site's. The next greeting then tells the site the reason."""


class Admission:
    """The nodes of a federation. A site's number is the position of its name in `names`."""

    def __init__(
        self,
        names: Sequence[str],
        terms: Facts,
        calls: SuperLinkCalls,
        log: Callable[[str], None],
        audit: Callable[[Entry], object],
        most_samples: int,
        knows_samples: bool,
        start: bytes,
    ) -> None:
        """See `Sites` for the parameters."""
        self._names, self._terms, self._calls = names, terms, calls
        self._log, self._audit = log, audit
        self._most_samples, self._knows_samples, self._start = most_samples, knows_samples, start
        self._nodes: dict[int, _Node] = {}
        """The connected nodes, by Flower's node id."""
        self.admitted: dict[int, int] = {}
        """The node id of each admitted site, by the site's number."""
        self.samples = [0] * len(names)
        """Training samples per site: 0 until it is admitted, and then 1 if sites do not report their numbers."""

    @property
    def has_open_greetings(self) -> bool:
        """Whether a connected node has not replied to its greeting yet."""
        return any(node.greetings for node in self._nodes.values())

    def start_time(self, node_id: int) -> str:
        """When the SuperNode of a node connected, as Flower writes the time."""
        return self._nodes[node_id].started

    def refresh(self) -> None:
        """Update the list of connected nodes, send due greetings, and admit nodes whose replies are acceptable."""
        connected = self._calls.nodes()
        for gone in self._nodes.keys() - connected.keys():
            node = self._nodes.pop(gone)
            if node.client is not None and self.admitted.get(node.client) == gone:
                del self.admitted[node.client]
                self._log(f"warning: {self._names[node.client]} is disconnected")
                self._audit({"event": "disconnected", "site": self._names[node.client]})
        for node_id, info in connected.items():
            self._nodes.setdefault(node_id, _Node(info.name)).started = info.last_activated_at
        self._send_greetings()
        self._receive_replies()

    def _send_greetings(self) -> None:
        now = time.monotonic()
        for node_id, node in self._nodes.items():
            is_waiting, seconds = bool(node.greetings), now - node.greeted_at
            is_new = not is_waiting and node.client is None and node.refusal is None
            is_due_again = not is_waiting and node.refusal is not None and seconds > _GREET_AGAIN_SECONDS
            is_lost = is_waiting and seconds > _LOST_SECONDS
            if is_new or is_due_again or is_lost:
                self._greet(node_id, node)
                node.greeted_at = now

    def _greet(self, node_id: int, node: _Node) -> None:
        facts: Facts = {"terms": self._terms, "versions": installed_versions()}
        facts |= {"refused": node.refusal} if node.refused_by_server else {}
        tensors = tensors_record(self._start) if self._start else None
        greeting = functools.partial(make_message, "hello", facts=facts, tensors=tensors, timeout=_HELLO_SECONDS)
        entry = {"event": "request", "kind": "hello", "sites": [node.name or f"node {node_id}"]}
        self._audit(entry | (describe_tensors(self._start) if self._start else {}))
        node.greetings += self._calls.send(greeting, [node_id])

    def _receive_replies(self) -> None:
        pending = {sent: (node_id, node) for node_id, node in self._nodes.items() for sent in node.greetings}
        if not pending:
            return
        for message in self._calls.fetch_replies(pending):
            node_id, node = pending[message.metadata.reply_to_message_id]
            if not node.greetings:
                continue  # it has already replied to another greeting
            node.greetings = []
            site, reply = node.name or f"node {node_id}", read_reply(message)
            self._audit({"site": site, "kind": "hello"} | describe_answer(reply))
            refusal = self._admit(node_id, node, reply)
            if refusal:  # audited each time, because `run_status` takes an audited reply alone for "connected"
                self._audit({"event": "discarded", "site": site, "kind": "hello", "reason": refusal})
            if refusal and refusal != node.refusal:
                self._log(f"warning: {site} is not admitted: {refusal}")
                node.refused_by_server = isinstance(reply, Reply)
                if node.refused_by_server:
                    node.greeted_at = -_GREET_AGAIN_SECONDS  # greet it again at once, to tell it the reason
            node.refusal = refusal

    def _admit(self, node_id: int, node: _Node, reply: Reply | Failure) -> str | None:
        """Admit a node, or return the reason why not."""
        if isinstance(reply, Failure):
            return reply.reason
        name, samples = one_line(str(reply.facts.get("site"))), reply.facts.get("samples") if self._knows_samples else 1
        versions = read_versions(reply.facts.get("versions"))
        if problem := version_problem(versions.get("fedskew")):
            return problem
        if node.name and name != node.name:
            return f"its key belongs to {node.name!r}, but its site.yaml has the name {name!r}"
        if name not in self._names:
            return f"its name is {name!r}; expected one of {', '.join(self._names)}"
        if not is_count(samples, at_least=1):
            return f"it reports {one_line(repr(samples))} samples; expected a whole number of at least 1"
        if samples > self._most_samples:
            return f"it reports {samples} samples; expected at most {self._most_samples} (federation.most_samples)"
        client = self._names.index(name)
        if self.admitted.get(client, node_id) != node_id:
            return f"node {self.admitted[client]} is already admitted as {name!r}"
        node.client, self.admitted[client], self.samples[client] = client, node_id, samples
        for warning in version_warnings(versions, installed_versions()):
            self._log(f"warning: {name} has {warning}")
        self._log(f"{name} is connected" + (f" with {plural(samples, 'sample')}" if self._knows_samples else ""))
        return None
