"""The audit logs of a federation: what was requested, which app requested it, what left a site, and what was refused.

Every site has a log in its state folder, and the server has a log in the run's folder. Each line has
the hash of the line before it (`chained_log.py`). A site writes an entry before its reply leaves. If the entry cannot
be written, the site sends a refusal instead of the reply.

    event      at sites and server: reply, refused, failed, repaired
               at the server only: request, start, end, disconnected, discarded (the reply is not used), late (no
               reply in time), too late (the reply of a late site: only its time is used), absent (the site could not
               be asked)
    kind       what was requested: hello, train, evaluate …
    run, round the run and the round of the request, if it has them
    work       at the server: the kind in more detail, such as the stage. `reply_times.py` keeps a site's usual time
               for each kind of work
    again      at the server: the request was repeated, because the SuperNode has started again
    app        hash of the app that runs at the site or the server, as `fedskew federate approve` shows it
    facts      names of the reply's JSON values, with their size and digest
    withheld   the reasons why test results are not in the reply, by name, such as `tests`. Earlier versions list these
               names in `facts`
    tensors    names, types and shapes of the tensors in the reply or the request, with their size and digest
    epsilon    ε of differential privacy, for the whole site and for one sample, over all updates in all runs
    reason     why a request was refused or failed, a reply is missing or was discarded, or an attempt of the run ended
    site       at the server: the site that the entry is about
    sites      at the server: the sites that were asked
    federation at the server, in the event start: all sites
    process, process_start, machine  at the server, in the event start: where the server runs
    timed_out  at the server: the site did not reply within the round's time-out
    seconds    at a site: how long it worked on the reply; at the server, in the event too late: the time from the
               request to the reply
    status     at the server: how an attempt of the run ended
    torn       in the event repaired: the hashes of lines that a killed process left incomplete

`ChainedLog` adds a number, the time, and the hashes to each entry.

The server logs the digests of the replies that it receives, so its log can be compared with those of the sites.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedskew.errors import UserError, plural
from fedskew.flower.chained_log import ChainedLog, Entry
from fedskew.flower.wire import Facts, digest, one_line

NAME = "audit.jsonl"
TOO_LATE = "too late"
"""The event of a reply that came after its site was late."""
_OUTCOMES = ("refused", "failed")
"""Keys of a reply's facts that give the reason why a request was refused or failed."""
_TESTS = ("tests", "local_tests")
"""Keys of a reply's facts that may have a refusal instead of results. The reply is then an update without them."""
_TYPES = {"F": "float", "I": "int", "U": "uint"}
"""What the first letters of safetensors' types stand for."""


def site_log(site: Path) -> ChainedLog:
    """Find the log of a site. Only the state folder is read from site.yaml."""
    state = read_site_values(site).get("state")
    return ChainedLog(site.parent / ("state" if state is None else str(state)) / NAME)


def read_site_values(site: Path) -> dict[str, Any]:
    """Read a site.yaml without checking its values, because the checks import torch."""
    import yaml  # most ClientApps do not need it

    try:
        values = yaml.safe_load(site.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {site}: {error}") from error
    return values if isinstance(values, dict) else {}


def find_log(path: Path) -> Path:
    """Find the log that a user names: a file, a run's folder, a site's folder, or its site.yaml."""
    if path.is_file() and path.suffix not in (".yaml", ".yml"):
        return path
    site = path / "site.yaml" if path.is_dir() else path
    state_log = site_log(site).path if site.is_file() else path / "state" / NAME
    for place in (path / NAME, state_log):
        if place.is_file():
            return place
    raise UserError(f"{path} has no audit log; expected a run's folder, a site's folder, or a file such as {NAME}")


def describe_request(facts: Facts) -> Entry:
    """Describe a request. The server may send values of any form."""
    entry: Entry = {"kind": one_line(str(facts.get("kind")))}
    if isinstance(facts.get("run"), str):
        entry["run"] = one_line(facts["run"])
    key = facts.get("key")
    if isinstance(key, Mapping) and isinstance(key.get("round"), int):
        entry["round"] = key["round"] + 1
    return entry


def describe_reply(facts: Facts, payload: bytes) -> Entry:
    """Describe a reply: the outcome, and the names, sizes and digests of what leaves."""
    for outcome in _OUTCOMES:
        if outcome in facts:
            return {"event": outcome, "reason": one_line(str(facts[outcome]))}
    text, withheld = json.dumps(facts).encode(), _withheld(facts)
    names = sorted(one_line(name) for name in facts if name not in withheld)
    entry: Entry = {"event": "reply", "facts": {"names": names, "bytes": len(text), "digest": digest(text)}}
    return entry | ({"withheld": withheld} if withheld else {}) | describe_tensors(payload)


def _withheld(facts: Facts) -> dict[str, str]:
    """Return the reasons why test results are not in a reply that has everything else."""
    found = {name: facts[name] for name in _TESTS if isinstance(facts.get(name), Mapping)}
    return {name: one_line(str(value["refused"])) for name, value in found.items() if list(value) == ["refused"]}


def describe_tensors(payload: bytes) -> Entry:
    """Describe the tensors of a message. Empty if it has none."""
    if not payload:
        return {}
    return {"tensors": {"shapes": _shapes(payload), "bytes": len(payload), "digest": digest(payload)}}


def _shapes(payload: bytes) -> dict[str, str] | None:
    """Read names, types and shapes from a safetensors header. None if the bytes are something else."""
    length = int.from_bytes(payload[:8], "little")
    try:
        header = json.loads(payload[8 : 8 + length])
        return {
            one_line(name): f"{_type(form['dtype'])}{[int(size) for size in form['shape']]}"
            for name, form in sorted(header.items())
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None


def _type(name: Any) -> str:
    text = one_line(str(name))
    return _TYPES.get(text[:1], text[:1].lower()) + text[1:].lower()


def finite_or_none(number: float) -> float | None:
    """Return None for infinity and NaN, which JSON does not have."""
    return number if math.isfinite(number) else None


def describe_entry(entry: Entry) -> str:
    """Describe an entry in one line, for people."""
    words = [str(entry["time"]), str(entry["event"])]
    words += [str(entry[key]) for key in ("site", "kind", "status") if key in entry]
    words += [f"round {entry['round']}"] if "round" in entry else []
    words += [f"to {', '.join(entry['sites'])}"] if "sites" in entry else []
    words += list(_sizes(entry))
    words += [f"app {str(entry['app'])[:12]}"] if entry.get("app") else []
    if "epsilon" in entry:
        words.append(_describe_epsilon(entry["epsilon"]))
    words += [plural(len(entry["torn"]), "incomplete line")] if "torn" in entry else []
    return "  ".join(words) + (f": {entry['reason']}" if entry.get("reason") else "")


def _describe_epsilon(spent: Entry) -> str:
    """Describe the ε of the whole site or, if that is infinite, of one sample."""
    if spent["epsilon"] is not None:
        return f"ε {spent['epsilon']:.3g} at δ {spent['delta']:g} for the site"
    if spent.get("example_epsilon") is not None:  # earlier versions do not have it
        return f"ε {spent['example_epsilon']:.3g} at δ {spent['delta']:g} for one sample, unbounded for the site"
    return "ε unbounded"


def _sizes(entry: Entry) -> Iterable[str]:
    if "facts" in entry:
        yield f"facts {', '.join(entry['facts']['names'])} ({entry['facts']['bytes']} bytes)"
    for name, reason in entry.get("withheld", {}).items():
        yield f"without {name} ({reason})"
    if "tensors" in entry:
        tensors = entry["tensors"]
        count = "? tensors" if tensors["shapes"] is None else plural(len(tensors["shapes"]), "tensor")
        yield f"{count} ({tensors['bytes']} bytes, {tensors['digest'][:12]})"
