"""The sites as the server sees them: which ones are connected, the requests to them, and their replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from fedskew.errors import plural
from fedskew.flower.admission import Admission
from fedskew.flower.audit import TOO_LATE, describe_tensors
from fedskew.flower.chained_log import Entry
from fedskew.flower.reply_times import ReplyTimes, kind_of_work
from fedskew.flower.site_replies import Failure, Quorum, Reply, describe_answer, read_reply, usable_replies
from fedskew.flower.superlink_calls import SuperLinkCalls, make_message
from fedskew.flower.wire import MAX_SAMPLES, Facts, tensors_record

_POLL_SECONDS = 0.5
_RESTART_CHECK_SECONDS = 5.0
"""Seconds between two checks for SuperNodes that have started again."""


@dataclass(frozen=True)
class _LateRequest:
    """A request to a site that was late. If the reply arrives, it is not used, but its time counts."""

    client: int
    kind: str
    group: str
    work: str
    began: float
    end: float
    """The end of the request's time-out, after which the SuperLink deletes the message. Like `began`, this is a time of
    `time.monotonic`."""


class Sites:
    """All sites of a federation. A site's number, here `client`, is the position of its name in `names`."""

    def __init__(
        self,
        grid: Grid,
        names: Sequence[str],
        terms: Facts,
        log: Callable[[str], None],
        most_samples: int = MAX_SAMPLES,
        reply_times: ReplyTimes | None = None,
        audit: Callable[[Entry], object] = lambda _entry: None,
        knows_samples: bool = True,
        start: bytes = b"",
    ) -> None:
        """`audit` receives entries about the requests, the replies, and the reasons why replies are missing.

        If `knows_samples` is False, sites do not report their numbers of samples. Each site then counts as one sample
        when it is admitted. `start` has tensors that are sent with every greeting.
        """
        self.names = tuple(names)
        self.terms = terms
        """What every site needs to know about the run."""
        self.log, self.audit = log, audit
        self._reply_times = reply_times or ReplyTimes()
        self._calls = SuperLinkCalls(grid, log)
        self._late: dict[str, _LateRequest] = {}
        """The requests whose sites were late before the time-out, by their message's id."""
        self._admission = Admission(
            self.names, terms, self._calls, log, audit, most_samples, knows_samples=knows_samples, start=start
        )

    @property
    def samples(self) -> list[int]:
        """Training samples per site. 0 until the site is admitted."""
        return self._admission.samples

    @property
    def online(self) -> dict[int, int]:
        """The node of every site that is connected and admitted."""
        return dict(self._admission.admitted)

    def wait_for(self, number: int) -> None:
        """Wait until this many sites are connected and admitted."""
        waiting: tuple[str, ...] | None = None
        self.refresh()
        while len(self.online) < number:
            missing = tuple(name for client, name in enumerate(self.names) if client not in self.online)
            if missing != waiting:
                waiting = missing
                self.log(f"{len(self.online)} of {number} required sites are admitted; missing: {', '.join(missing)}")
            time.sleep(_POLL_SECONDS)
            self.refresh()

    def wait_for_greetings(self, seconds: float) -> None:
        """Wait until all connected sites have replied to their greetings, but at most this long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._admission.has_open_greetings:
            time.sleep(_POLL_SECONDS)
            self.refresh()

    def refresh(self) -> None:
        """Update the list of connected sites. Greet new ones without waiting for their replies."""
        self._admission.refresh()

    def request(
        self,
        kind: str,
        facts: Mapping[int, Facts],
        payload: bytes,
        timeout: float,
        group: str = "",
        quorum: Quorum | None = None,
        keep: Callable[[int, Reply], None] = lambda _client, _reply: None,
        repeats: bool = False,
    ) -> dict[int, Reply | Failure]:
        """Send each site its own facts and the same payload. Return each site's reply, or why there is none.

        If a site's facts have a `kind`, it replaces `kind` for this site. `group` is the number of the round that is
        trained, which Flower's logs show. It is empty in other requests.

        The server waits at most `timeout` seconds. After `quorum` is reached, a site's usual time for such work also
        limits the wait for this site (see `reply_times`). `keep` is called with each reply before the audit log records
        it.

        With `repeats`, a site whose SuperNode has started again gets its request again. A SuperNode that ends loses its
        requests.
        """
        nodes, began = self.online, time.monotonic()
        self._record_requests(kind, facts, payload, group)
        works = {client: kind_of_work(kind, sent) for client, sent in facts.items()}
        answers: dict[int, Reply | Failure] = {}
        tensors = tensors_record(payload)

        def make(client: int) -> Message:
            return make_message(kind, nodes[client], {"terms": self.terms, **facts[client]}, tensors, timeout, group)

        def accept(found: Mapping[int, Reply | Failure]) -> None:
            answers.update(found)
            for client, answer in found.items():
                self._record_answer(kind, client, facts[client], group, answer)

        reachable = [client for client in facts if client in nodes]
        starts = {client: self._admission.start_time(nodes[client]) for client in reachable}
        waiting = self._calls.send(make, reachable)
        refused = set(reachable) - set(waiting.values())
        accept({client: Failure("it is not connected", "absent") for client in facts if client not in nodes})
        accept(dict.fromkeys(refused, Failure("the SuperLink did not accept the message to it", "absent")))
        end, next_check = time.monotonic() + timeout, began + _RESTART_CHECK_SECONDS
        while waiting:
            self._late = {number: late for number, late in self._late.items() if time.monotonic() < late.end}
            for message in self._calls.fetch_replies({**waiting, **self._late}):
                if message.metadata.reply_to_message_id in self._late:
                    self._record_late(self._late.pop(message.metadata.reply_to_message_id), read_reply(message))
                    continue
                if message.metadata.reply_to_message_id not in waiting:
                    continue  # the site has already replied to the same request
                client = waiting[message.metadata.reply_to_message_id]
                waiting = {message_id: c for message_id, c in waiting.items() if c != client}
                answer = read_reply(message)
                if isinstance(answer, Reply):
                    keep(client, answer)
                accept({client: answer})
                if isinstance(answer, Reply):
                    self._reply_times.add(client, works[client], time.monotonic() - began)
            open_works = {client: works[client] for client in waiting.values()}
            if time.monotonic() >= end:
                given_up = self._timed_out(open_works, timeout)
            else:
                given_up = self._find_late(open_works, answers, time.monotonic() - began, quorum)
                for message_id, client in waiting.items():
                    if client in given_up:
                        own_kind = str(facts[client].get("kind", kind))
                        self._late[message_id] = _LateRequest(client, own_kind, group, works[client], began, end)
            accept(given_up)
            waiting = {message_id: client for message_id, client in waiting.items() if client not in given_up}
            if repeats and waiting and time.monotonic() >= next_check:
                next_check = time.monotonic() + _RESTART_CHECK_SECONDS
                again = self._find_restarted(set(waiting.values()), nodes, starts)
                self._record_requests(kind, {client: facts[client] for client in again}, payload, group, again=True)
                waiting |= self._calls.send(make, again)
            if waiting:
                time.sleep(_POLL_SECONDS)
        return dict(sorted(answers.items()))

    def _find_restarted(self, clients: set[int], nodes: Mapping[int, int], starts: dict[int, str]) -> list[int]:
        """Find the clients whose SuperNodes have started again.

        `starts` has the times of the last known starts. This function updates it.
        """
        now = {number: node.last_activated_at for number, node in self._calls.nodes().items()}
        again = [client for client in sorted(clients) if now.get(nodes[client], starts[client]) != starts[client]]
        for client in again:
            starts[client] = now[nodes[client]]
            self.log(f"{self.names[client]} started again and gets its request again")
        return again

    def _record_requests(
        self, kind: str, facts: Mapping[int, Facts], payload: bytes, group: str, again: bool = False
    ) -> None:
        """Record the requests in the audit log: one entry per kind of work, with the names of the sites."""
        names_by_work: dict[tuple[str, str], list[str]] = {}
        for client, sent in facts.items():
            key = str(sent.get("kind", kind)), kind_of_work(kind, sent)
            names_by_work.setdefault(key, []).append(self.names[client])
        for (own_kind, work), names in sorted(names_by_work.items()):
            entry = {"event": "request", "kind": own_kind, **_round(group), "work": work, "sites": names}
            self.audit(entry | ({"again": True} if again else {}) | describe_tensors(payload))

    def _record_answer(self, kind: str, client: int, sent: Facts, group: str, answer: Reply | Failure) -> None:
        entry = {"site": self.names[client], "kind": sent.get("kind", kind), **_round(group)}
        self.audit(entry | describe_answer(answer))

    def _record_late(self, late: _LateRequest, answer: Reply | Failure) -> None:
        """Record how long a late site took to reply, so that later rounds know its usual time for such work."""
        if isinstance(answer, Reply):
            seconds = time.monotonic() - late.began
            self._reply_times.add(late.client, late.work, seconds)
            entry: Entry = {"site": self.names[late.client], "kind": late.kind, **_round(late.group), "work": late.work}
            self.audit(entry | describe_answer(answer) | {"event": TOO_LATE, "seconds": round(seconds, 3)})

    def _timed_out(self, works: Mapping[int, str], timeout: float) -> dict[int, Failure]:
        """Return failures for all sites that have not replied when the time is up. `works` has their kinds of work."""
        for client, work in works.items():
            self._reply_times.add_missed(client, work)
        return dict.fromkeys(works, Failure(f"it did not reply within {timeout:g} s", "late", timed_out=True))

    def _find_late(
        self, works: Mapping[int, str], answers: Mapping[int, Reply | Failure], seconds: float, quorum: Quorum | None
    ) -> dict[int, Failure]:
        """Return failures for the sites that are late after `seconds`. No site is late before the quorum is reached.

        `works` has the kinds of work of the sites that have not replied.
        """
        if quorum is None or not quorum.is_reached(answers):
            return {}
        replied = len(dict(usable_replies(answers)))
        return {
            client: Failure(
                f"it is late: no reply after {seconds:.0f} s, but {plural(replied, 'other site')} replied; its usual "
                f"time is {self._reply_times.usual(client, work):.0f} s",
                "late",
            )
            for client, work in works.items()
            if seconds > self._reply_times.limit(client, work)
        }


def _round(group: str) -> Entry:
    """Return the round's number for an entry of the audit log. Empty for a request that belongs to no round."""
    return {"round": int(group)} if group.isdigit() else {}
