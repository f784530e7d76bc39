"""The benchmark's page, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INTRODUCTION = """# A federation in which something fails every few seconds

`{command}`, {date}, {machine}.

SuperLink, {sites} SuperNodes, their workers and the ServerApp are processes of one machine, with TLS and node keys. A
small TCP proxy is between each site and the SuperLink. During the whole run, one process or link after another fails,
every {shortest:g} to {longest:g} seconds, by a schedule that follows from the seed. What ends is started again, as a
service manager does. The method is {method}, whose sites keep a state between rounds. A round needs {minimum} of the
{sites} sites.
"""

_CHECKS = """## What was checked

- The run ended by itself with {rounds} rounds, and no process is left.
- The model is finite. A simulation with the same participants in each round ends with the same model: the largest
  difference of any number is {difference:.1e} (allowed: 1e-6).
- The server acknowledged {acknowledged} updates. {counted} of them are in the rounds' models, {discarded} were
  discarded for a reason that the audit log has, and {superseded} are of rounds in which the site was asked again. Each
  of them is in the audit log of its site, with the same digest.
- The hash chains of the server's and of all sites' audit logs are intact.
"""

_FLOWER = """## What Flower 1.41 limits

- A ServerApp that was killed is noticed after 60 s, when its heartbeat is missing. Until then, the run stands still.
- A SuperNode that was killed is refused for up to 60 s when it returns. So one kill costs a site one or more rounds.
- A message is delivered at most once. If a connection breaks while a SuperNode receives a request, the request is lost,
  and the site takes part in the next round.
- If the upload of a reply breaks off, Flower's SuperNode deletes the reply, and the SuperLink forgets it after 180 s.
- A SuperNode asks for work every 3 s.
"""


def render(found: Mapping[str, Any]) -> str:
    """Write the page in Markdown."""
    updates, shortest_longest = found["updates"], found["every"]
    introduction = _INTRODUCTION.format(shortest=shortest_longest[0], longest=shortest_longest[1], **found)
    if found["problems"]:
        result = "## Problems\n\n" + "\n".join(f"- {problem}" for problem in found["problems"]) + "\n"
    else:
        acknowledged = sum(updates.values())
        result = _CHECKS.format(acknowledged=acknowledged, **updates, **found)
    return _unwrap("\n".join([introduction, _measured(found), _faults(found), _rounds(found), result, _FLOWER]))


def _unwrap(text: str) -> str:
    """Join the lines of each paragraph and list item."""
    lines: list[str] = []
    for line in text.splitlines():
        begins = not line or line.startswith(("#", "|", "- ", "`")) or not lines or not lines[-1]
        if begins or lines[-1].startswith(("#", "|")):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(lines) + "\n"


def _measured(found: Mapping[str, Any]) -> str:
    memory, seconds, load = found["memory"], sorted(found["round_seconds"]), found["load"]
    participants, sites = found["participants"], found["sites"]
    rows = [
        ("seconds of the whole run, with the start of all processes", f"{found['seconds']:.0f}"),
        ("seconds per round: median, longest", f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}"),
        ("load average of the machine: least, median, most", ", ".join(f"{number:.1f}" for number in load)),
        ("faults", f"{sum(found['faults'].values())}"),
        ("starts of the ServerApp, of which resumed the run", f"{found['starts']}, {found['starts'] - 1}"),
        (
            "requests that were repeated, for sites that started again or after a resume",
            f"{found['repeated_requests']}",
        ),
        ("updates per round: least, mean, most", _spread(participants)),
        (f"of {sites} sites, not connected when a round began: least, mean, most", _spread(found["absent"])),
        ("memory of a site without work: median, largest", f"{memory['site']:.0f}, {memory['largest_site']:.0f} MB"),
        ("memory of a site's worker: median, largest", f"{memory['worker']:.0f}, {memory['largest_worker']:.0f} MB"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""## Measured

| | |
|---|---|
{table}

Memory is PSS, in which pages that several processes share are divided among them. A site without work is its SuperNode
with its SuperExec. The workers of a trial are forks, which share the memory of torch.
"""


def _spread(numbers: list[int]) -> str:
    return f"{min(numbers)}, {sum(numbers) / len(numbers):.1f}, {max(numbers)}"


def _faults(found: Mapping[str, Any]) -> str:
    kinds: dict[str, dict[str, int]] = {}
    for name, number in found["faults"].items():
        target, _, kind = name.partition(" ")
        kinds.setdefault(target, {})[kind] = number
    columns = sorted({kind for numbers in kinds.values() for kind in numbers})
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for target, numbers in kinds.items():
        lines.append(f"| {target} | {' | '.join(str(numbers.get(kind, '')) for kind in columns)} |")
    return "## Faults\n\n" + "\n".join(lines) + _FAULT_NOTES


_FAULT_NOTES = """

kill: SIGKILL. restart: SIGTERM. pause: SIGSTOP, and SIGCONT after 1 to 15 s. slow: each chunk of at most 16 kB is
delayed by up to 0.3 s, for 1 to 15 s. broken: all connections are reset, and new ones are refused for 1 to 15 s.
"""


def _rounds(found: Mapping[str, Any]) -> str:
    lines = ["## Rounds", "", "| round | seconds | updates | not connected |", "|---|---|---|---|"]
    for number, (seconds, participants, absent) in enumerate(
        zip(found["round_seconds"], found["participants"], found["absent"], strict=True), start=1
    ):
        lines.append(f"| {number} | {seconds:.1f} | {participants} | {absent} |")
    reasons = [f"- {number} times: {reason}" for reason, number in found["reasons"].items()]
    missing = ["", "Why planned updates are missing:", "", *reasons] if reasons else []
    return "\n".join([*lines, *missing, "", _ROUND_NOTES]) + "\n"


_ROUND_NOTES = """The seconds of a round that was resumed are those of its last attempt, in which only the sites trained
whose updates had not arrived before. Other work shared the machine, as the load average shows."""
