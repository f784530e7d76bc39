"""Health and metrics of a site, from its audit log and the state of its connection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from fedskew.flower.audit import read_site_values, site_log
from fedskew.flower.chained_log import Entry, NewEntries
from fedskew.flower.monitoring import Metric
from fedskew.flower.supernode import Connection

_OUTCOMES = {"reply": "answered", "refused": "refused", "failed": "failed"}
"""Events of the audit log, and what the metrics call them."""


class SiteMonitor:
    """One site and its connection to the server."""

    def __init__(self, site: Path, connection: Connection) -> None:
        """`site` is the path of a valid site.yaml. `load_site` is not used here, because it would import torch."""
        self._connection = connection
        self._policy: dict[str, Any] = read_site_values(site).get("policy") or {}
        self._log = NewEntries(site_log(site).path)
        self._requests = Counter(dict.fromkeys(_OUTCOMES.values(), 0))
        self._sent = 0
        self._last_message: float | None = None
        self._spent: dict[str, float] = {}
        """The ε spent so far, by the policy's key for its budget: `epsilon` or `example_epsilon`."""

    def problem(self) -> str | None:
        return self._connection.problem

    def metrics(self) -> Iterator[Metric]:
        for entry in self._log.read():
            self._add(entry)
        is_connected = float(self._connection.problem is None)
        yield Metric("fedskew_connected", "gauge", "Whether the site is connected to the server.", is_connected)
        requests = {outcome: float(number) for outcome, number in self._requests.items()}
        yield Metric("fedskew_requests_total", "counter", "Requests of the server by outcome.", requests, "outcome")
        yield Metric("fedskew_sent_bytes_total", "counter", "Bytes of this site's replies.", self._sent)
        if self._last_message is not None:
            help = "Time of the last answer to a request."
            yield Metric("fedskew_last_message_timestamp_seconds", "gauge", help, self._last_message)
        yield from self._privacy("epsilon", "", "all updates of this site have spent", "The site's budget.")
        yield from self._privacy(
            "example_epsilon", "example_", "all updates have spent for each sample", "The budget of each sample."
        )

    def _privacy(self, key: str, prefix: str, spent: str, budget: str) -> Iterator[Metric]:
        if key in self._spent:
            help = f"Epsilon that {spent}, infinite without noise."
            yield Metric(f"fedskew_privacy_{prefix}epsilon", "gauge", help, self._spent[key])
        limit = self._policy.get(key)
        if limit is not None:
            value = float(limit)  # in YAML 1.1, a number such as 1e1 is text
            yield Metric(f"fedskew_privacy_{prefix}budget_epsilon", "gauge", budget, value)

    def _add(self, entry: Entry) -> None:
        if entry["event"] not in _OUTCOMES:
            return
        self._requests[_OUTCOMES[entry["event"]]] += 1
        self._last_message = datetime.fromisoformat(entry["time"]).timestamp()
        self._sent += sum(int(entry.get(part, {}).get("bytes", 0)) for part in ("facts", "tensors"))
        if "epsilon" in entry:
            spent = {key: entry["epsilon"].get(key) for key in ("epsilon", "example_epsilon")}
            self._spent = {key: math.inf if value is None else float(value) for key, value in spent.items()}
