"""The status of a federation's run, from its folder: how it ended, and what each site does.

The server's audit log has the times of requests and replies, and the end of each attempt. `rounds.jsonl` says which
updates counted. `status.json` is read only if the audit log has no attempt. This module writes nothing, so it can
read the folder of a run in progress.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.storage.files import reporting_os_errors
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.audit import TOO_LATE
from fedskew.flower.chained_log import Entry, read_chain
from fedskew.flower.reply_times import ReplyTimes
from fedskew.flower.settings import FederationSettings
from fedskew.platforms import is_alive, start_mark

STATUS = "status.json"
"""The file in the run's folder that says how the last attempt ended."""
_ANSWERS = ("reply", "refused", "failed")
"""The events with which a site answers a request."""
_STATES = {"refused": "refuses", "failed": "fails", "late": "late", "absent": "absent", "disconnected": "disconnected"}
"""The state of a site after an event."""


@dataclass
class SiteStatus:
    """What is known about one site."""

    name: str
    state: str = "never seen"
    """never seen, not admitted, connected, working, late, refuses, fails, disconnected or absent.

    `absent` means that the last request could not be sent to the site. A site that refuses only tests is connected."""
    last_seen: str | None = None
    """The time of the last reply, refusal or failure."""
    waiting_since: str | None = None
    """The time of the request whose reply the server still waits for. None if there is none."""
    round: int | None = None
    """The last round for which the site sent an update."""
    updates: int = 0
    """The number of updates that counted."""
    missed: int = 0
    """The number of requests for which the site was late or absent."""
    reason: str = ""
    """Why there was no usable reply to the last request, or no tests in it."""


@dataclass(frozen=True)
class Attempt:
    """One start of the run."""

    began: str
    status: str
    """running, killed, unknown, finished, stopped or failed."""
    ended: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class RunStatus:
    """The status of one run."""

    folder: str
    status: str
    """The status of the last attempt. If no attempt is recorded: `finished` or `not started`."""
    reason: str
    round: int
    """The number of completed rounds."""
    sites: list[SiteStatus] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    damage: str | None = None
    """The first sign that the audit log was changed. If a line breaks the chain, no line from there on is used."""
    privacy: dict[str, Any] | None = None
    """Kind, ε and δ of the differential privacy so far. None without noise, and before the first round."""


def read_status(folder: Path, now: datetime) -> RunStatus:
    """Read the status of the run in a folder."""
    run = RunFolder(folder)
    if not run.audit_path.exists() and not run.config_path.exists():
        raise UserError(f"{folder} is not the folder of a federation's run; expected federation.folder of its app")
    chain = read_chain(run.audit_path) if run.audit_path.exists() else None
    history = RunHistory(_configured_names(run))
    for entry in chain.entries if chain else ():
        history.add(entry)
    rows, attempts = run.rounds(), history.attempts()
    if not attempts and (ended := _read_ended(folder)):
        attempts = [ended]
    last = attempts[-1] if attempts else Attempt("", "finished" if run.finished else "not started")
    sites = history.sites(last.status == "running", now)
    _add_updates(sites, rows)
    round = rows[-1].round if rows else 0
    damage, privacy = chain.problem if chain else None, rows[-1].privacy if rows else None
    return RunStatus(str(folder), last.status, last.reason, round, sites, attempts, damage, privacy)


def _read_ended(folder: Path) -> Attempt | None:
    """Read from `status.json` how the last attempt ended."""
    path = folder / STATUS
    with reporting_os_errors("read", path):
        text = path.read_text(encoding="utf-8") if path.exists() else None
    if text is None:
        return None
    try:
        found = json.loads(text)
        return Attempt("", str(found["status"]), str(found["time"]), str(found["reason"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged; delete it") from error


class RunHistory:
    """What a run's audit log says about its attempts and its sites. Entries are added one by one."""

    def __init__(self, names: Sequence[str] = (), times: ReplyTimes | None = None) -> None:
        """`names` are the sites, if the log does not name them. `times` collects how long they take to reply.

        The log does not have the run's `grace`. So without `times`, the default `grace` decides which sites are late.
        """
        self._names = list(names)
        self._sites = {name: SiteStatus(name) for name in names}
        self._works: dict[str, str] = {}
        """The kind of work of the last request to each site."""
        self._times = times or ReplyTimes(FederationSettings.grace, FederationSettings.grace_seconds)
        self._ended: list[Attempt] = []
        self._began: Entry | None = None
        """The start of the attempt that has not ended."""

    def add(self, entry: Entry) -> None:
        event = entry["event"]
        if event in ("start", "end"):
            self._add_boundary(entry)
        elif event == "request" and not entry.get("again"):
            for name in self._sites.keys() & entry["sites"]:
                self._sites[name].waiting_since = entry["time"]
                self._works[name] = str(entry.get("work", entry["kind"]))
        elif entry.get("site") in self._names:
            self._add_reply_time(entry)
            _update_status(self._sites[entry["site"]], entry)

    def _add_reply_time(self, entry: Entry) -> None:
        """Record how long a site took to reply, or that it missed a time-out, as the running server does.

        A refusal or a failure does not show how long the work takes. A reply to a greeting does not count either.
        """
        name, event = entry["site"], entry["event"]
        number, since = self._names.index(name), self._sites[name].waiting_since
        if event == "reply" and since is not None and entry.get("kind") != "hello":
            self._times.add(number, self._works[name], _seconds(since, datetime.fromisoformat(entry["time"])))
        elif event == TOO_LATE:
            self._times.add(number, entry["work"], entry["seconds"])
        elif entry.get("timed_out") and name in self._works:
            self._times.add_missed(number, self._works[name])

    def _add_boundary(self, entry: Entry) -> None:
        """Add the start or the end of an attempt. If a start follows another start, the earlier attempt was killed."""
        for site in self._sites.values():
            site.waiting_since = None
        if self._began is not None and entry["event"] == "start":
            self._ended.append(Attempt(self._began["time"], "killed", None, "its process ended without a reason"))
        elif self._began is not None:
            self._ended.append(Attempt(self._began["time"], entry["status"], entry["time"], entry.get("reason", "")))
        self._began = entry if entry["event"] == "start" else None
        if self._began is not None and "federation" in entry:
            self._names = [str(name) for name in entry["federation"]]
            self._sites = {name: self._sites.get(name) or SiteStatus(name) for name in self._names}

    def attempts(self) -> list[Attempt]:
        """List the attempts. If the last one has not ended and its process is gone, it was killed."""
        return [*self._ended, *([] if self._began is None else [_open_attempt(self._began)])]

    def sites(self, running: bool, now: datetime) -> list[SiteStatus]:
        """List the sites. In a run that is `running`, a site with an open request is working or late."""
        found = [replace(self._sites[name]) for name in self._names]
        for number, site in enumerate(found):
            if running and site.waiting_since is not None:
                is_late = _seconds(site.waiting_since, now) > self._times.limit(number, self._works[site.name])
                site.state = "late" if is_late else "working"
        return found


def _configured_names(run: RunFolder) -> list[str]:
    params = run.config.partition.params if run.config_path.exists() else {}
    return [str(name) for name in params.get("names", ())]


def _open_attempt(began: Entry) -> Attempt:
    if began.get("machine") != socket.gethostname():
        return Attempt(
            began["time"], "unknown", None, f"it was started on {began.get('machine')}, and no end is recorded"
        )
    if is_alive(began["process"]) and not _is_another(began):
        return Attempt(began["time"], "running")
    return Attempt(began["time"], "killed", None, "its process ended without a reason; start the run again to resume")


def _is_another(began: Entry) -> bool:
    """Whether the process with the ID in this entry is another one. If so, the process of the entry has ended."""
    mark = began.get("process_start")
    return mark is not None and mark != start_mark(began["process"])


def _update_status(site: SiteStatus, entry: Entry) -> None:
    """Update a site's status with an entry about it."""
    event = entry["event"]
    if event == TOO_LATE:
        site.last_seen = entry["time"]
        return
    refuses_tests = event == "refused" and entry.get("kind") == "evaluate"
    if not (refuses_tests and site.state == "refuses"):  # the reason why it does not train is more important
        site.reason = _describe_reason(entry, refuses_tests)
    if event in _ANSWERS:
        site.last_seen = entry["time"]
    if event == "reply":
        site.state, site.round = "connected", entry["round"] if entry.get("kind") == "train" else site.round
    elif event == "discarded":
        site.state = "not admitted" if entry.get("kind") == "hello" else site.state
    elif refuses_tests:
        site.state = "refuses" if site.state == "refuses" else "connected"
    elif event in _STATES:
        site.state = _STATES[event]
        site.missed += event in ("late", "absent")
    if event != "disconnected":  # a disconnected site may come back and reply
        site.waiting_since = None


def _describe_reason(entry: Entry, refuses_tests: bool) -> str:
    """Say why a site sent no reply, or no tests in it. Empty if it sent everything."""
    if "withheld" in entry:
        return "no tests: " + "; ".join(dict.fromkeys(map(str, entry["withheld"].values())))
    return ("no tests: " if refuses_tests else "") + str(entry.get("reason", ""))


def _add_updates(sites: Sequence[SiteStatus], rows: Sequence[RoundRow]) -> None:
    for row in rows:
        for client in set(row.clients) - set(row.diverged):
            if client < len(sites) and sites[client].name not in (row.failed or {}):
                sites[client].updates += 1


def _seconds(since: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(since)).total_seconds()


def describe_age(since: str | None, now: datetime) -> str:
    """Describe how long ago something was, for people."""
    if since is None:
        return "–"
    seconds = max(0, round(_seconds(since, now)))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
