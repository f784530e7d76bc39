"""How long sites usually take to reply, and how long a round waits for those that have not replied yet.

A reply time is the time from a request to the reply. A site's usual time for a kind of work is the median of its last
reply times for such work. Once enough sites have replied, every other site is late when it has taken more than `grace`
times its usual time, and more than `at_least` seconds. So the round waits for a site that is always slow, but not for a
site that hangs.

Before a site's first reply to a kind of work, its usual time is unknown, and only the round's time-out limits the wait.
If the site misses this time-out, its usual time for such work is the median of all sites' reply times, until the site
replies to such work. As long as a site has replied to nothing since it missed a time-out, this holds for every kind of
work to which it has never replied.

The reply of a late site is not used, but its time counts, so a slow site does not stay late.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

from fedskew.flower.wire import Facts

_REMEMBERED = 5
"""Number of last replies from which a site's usual time is computed."""


def kind_of_work(kind: str, facts: Facts) -> str:
    """Name the work of a request. Requests of the same name take a site about the same time.

    A site may test in seconds and train in minutes. The training differs by stage, and the tests in a request for
    training may take longer than the training.
    """
    words = [str(facts.get("kind", kind))]
    words += [f"{key} {facts[key]}" for key in ("stage", "model") if key in facts]
    words += [key for key in ("frozen", "tests", "local_tests") if facts.get(key)]
    return ", ".join(words)


class ReplyTimes:
    """The reply times of all sites of a run."""

    def __init__(self, grace: float = 0.0, at_least: float = 0.0) -> None:
        """`grace` multiplies a site's usual time. 0 means no limit. Every site has at least `at_least` seconds."""
        self._grace, self._at_least = grace, at_least
        self._seconds: defaultdict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        """The last reply times, by client and kind of work."""
        self._missed: set[tuple[int, str]] = set()
        """Clients and kinds of work for which they missed a time-out."""
        self._silent: set[int] = set()
        """Clients that have not replied to anything since they missed a time-out."""

    def add(self, client: int, work: str, seconds: float) -> None:
        self._seconds[client, work].append(seconds)
        self._silent.discard(client)

    def add_missed(self, client: int, work: str) -> None:
        """Record that a site did not reply in time."""
        self._missed.add((client, work))
        self._silent.add(client)

    def usual(self, client: int, work: str) -> float | None:
        """The site's usual time for this kind of work. None if it is not known."""
        known = list(self._seconds.get((client, work), ()))
        if not known and (client in self._silent or (client, work) in self._missed):
            known = [seconds for (_, other), times in self._seconds.items() if other == work for seconds in times]
        return median(known) if known else None

    def limit(self, client: int, work: str) -> float:
        """Seconds from the request after which the site is late, once enough others have replied."""
        usual = self.usual(client, work)
        if not self._grace or usual is None:
            return math.inf
        return max(self._at_least, self._grace * usual)
