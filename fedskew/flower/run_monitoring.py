"""Health and metrics of a run on the server, from the run's folder: its rows and its audit log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.chained_log import Entry, NewEntries
from fedskew.flower.monitoring import Metric
from fedskew.flower.run_status import Attempt, RunHistory

_PRESENT = ("connected", "working", "late", "refuses", "fails")
"""The states of a site that is connected to the server."""
_HEALTHY = ("running", "finished")


class RunMonitor:
    """The run in one folder."""

    def __init__(self, folder: Path) -> None:
        self._run = RunFolder(folder)
        self._log, self._history = NewEntries(self._run.audit_path), RunHistory()
        self._traffic = _Traffic()
        self._refusals: Counter[str] = Counter()

    def problem(self) -> str | None:
        """Say why the run is not in progress. None if it is, or if it is finished."""
        self._read_log()
        last = self._last_attempt()
        if last is None:
            return "the run has not started"
        return None if last.status in _HEALTHY else f"{last.status}: {last.reason}"

    def metrics(self) -> Iterator[Metric]:
        self._read_log()
        rows = [row for row in self._run.rounds() if row.round]
        yield Metric("fedskew_rounds_total", "counter", "Completed rounds of the run.", rows[-1].round if rows else 0)
        seconds = {"sum": math.fsum(row.seconds for row in rows), "count": len(rows)}
        yield Metric("fedskew_round_seconds", "summary", "Duration of the rounds.", seconds)
        yield from self._traffic.metrics()
        yield from self._site_metrics()
        attempts = len(self._history.attempts())
        yield Metric("fedskew_attempts_total", "counter", "Starts of the run, including restarts.", attempts)
        privacy = next((row.privacy for row in reversed(rows) if row.privacy is not None), None)
        if privacy is not None and privacy["kind"] == "example":
            help = "Epsilon of one sample of a site that took part in every round."
            yield Metric("fedskew_privacy_example_epsilon", "gauge", help, float(privacy["epsilon"]))
        elif privacy is not None:
            help = "Epsilon of a site that took part in every round."
            yield Metric("fedskew_privacy_epsilon", "gauge", help, float(privacy["epsilon"]))

    def _site_metrics(self) -> Iterator[Metric]:
        last = self._last_attempt()
        is_running = last is not None and last.status == "running"
        sites = self._history.sites(is_running, datetime.now(UTC))
        present = {site.name: float(is_running and site.state in _PRESENT) for site in sites}
        yield Metric("fedskew_sites", "gauge", "Sites of the federation.", len(sites))
        yield Metric("fedskew_sites_present", "gauge", "Sites that are connected.", sum(present.values()))
        yield Metric("fedskew_site_present", "gauge", "Whether a site is connected.", present, "site")
        refusals = {site.name: float(self._refusals[site.name]) for site in sites}
        yield Metric("fedskew_refusals_total", "counter", "Requests that a site refused.", refusals, "site")
        missed = {site.name: float(site.missed) for site in sites}
        yield Metric("fedskew_missed_total", "counter", "Requests without a reply in time.", missed, "site")

    def _read_log(self) -> None:
        for entry in self._log.read():
            self._history.add(entry)
            self._traffic.add(entry)
            if entry["event"] == "refused":
                self._refusals[str(entry.get("site"))] += 1

    def _last_attempt(self) -> Attempt | None:
        attempts = self._history.attempts()
        return attempts[-1] if attempts else None


class _Traffic:
    """The bytes of the tensors that the server sent, and of the replies that it received, from the audit log."""

    def __init__(self) -> None:
        self._sent = self._received = 0
        self._open: dict[str, int] = {}
        """Bytes sent to each site that are not counted yet, because the site may turn out not to be connected."""

    def add(self, entry: Entry) -> None:
        if entry["event"] == "request":
            for site in entry["sites"]:
                self._close(site)
                self._open[site] = _tensor_bytes(entry)
        elif entry["event"] == "absent":
            self._open.pop(entry["site"], None)
        elif "site" in entry:
            self._close(entry["site"])
            self._received += _tensor_bytes(entry) + int(entry.get("facts", {}).get("bytes", 0))

    def _close(self, site: str) -> None:
        self._sent += self._open.pop(site, 0)

    def metrics(self) -> Iterator[Metric]:
        help = "Bytes of the tensors in requests to connected sites."
        yield Metric("fedskew_sent_bytes_total", "counter", help, self._sent)
        yield Metric("fedskew_received_bytes_total", "counter", "Bytes of the sites' replies.", self._received)


def _tensor_bytes(entry: Entry) -> int:
    return int(entry.get("tensors", {}).get("bytes", 0))
