"""How long sites usually take to reply, and how long a round waits for those that have not replied yet.

A site's usual time is the median of its last reply times, which count from the request. Once enough sites have
replied, every other site is late when it has taken more than `grace` times its usual time, and more than `at_least`
seconds. So the round waits for a site that is always slow, but not for a site that hangs.

Before a site's first reply, only the round's time-out limits the wait. If the site misses the time-out, its
usual time is the median over the replies of all sites, until it replies itself.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median

_REMEMBERED = 5
"""Number of last replies from which a site's usual time is computed."""


class ReplyTimes:
    """The reply times of all sites of a run."""

    def __init__(self, grace: float = 0.0, at_least: float = 0.0) -> None:
        """`grace` multiplies a site's usual time. 0 means no limit. Every site has at least `at_least` seconds."""
        self._grace, self._at_least = grace, at_least
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._missed: set[int] = set()

    def add(self, client: int, seconds: float) -> None:
        self._seconds[client].append(seconds)

    def add_missed(self, client: int) -> None:
        """Record that a site did not reply within the time-out."""
        self._missed.add(client)

    def usual(self, client: int) -> float | None:
        """The site's usual time. None if it is not known."""
        known = list(self._seconds.get(client, ()))
        if not known and client in self._missed:
            known = [seconds for times in self._seconds.values() for seconds in times]
        return median(known) if known else None

    def limit(self, client: int) -> float:
        """Seconds from the request after which the site is late, once enough others have replied."""
        usual = self.usual(client)
        if not self._grace or usual is None:
            return math.inf
        return max(self._at_least, self._grace * usual)
