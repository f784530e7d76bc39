"""A federation of real processes in which something fails every few seconds.

    python benchmarks/chaos/federation_chaos.py --sites 30 --rounds 20 --out benchmarks/chaos

It starts what `fedskew federate up` starts (SuperLink, SuperNodes, workers and ServerApp, with TLS and node keys) and
puts a link between each site and the SuperLink. During the whole run, it kills, pauses, restarts, slows down or cuts
off one of them every few seconds, by a schedule that follows from --seed. At the end it checks the run, and writes
OUT.json and OUT.md. It exits with status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checks import TOLERANCE, account_for_updates, counted, largest_difference, read_intact, simulate
from faults import Injector, draw_faults
from links import Links
from memory import MemorySampler
from page import render

from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import build_federation
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.audit import NAME
from fedskew.flower.guardian import marked_processes
from fedskew.flower.local_federation import LocalFederation
from fedskew.flower.run_status import read_status
from fedskew.flower.trial import plan_trial, run_folder, run_trial


def main() -> None:
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = Path(given.folder or temporary)
        found = run_with_faults(folder, given)
    text = json.dumps(found, indent=2) + "\n"
    print(text)
    if given.out:
        Path(f"{given.out}.json").write_text(text, encoding="utf-8")
        Path(f"{given.out}.md").write_text(render(found), encoding="utf-8")
    sys.exit(1 if found["problems"] else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--every", type=float, nargs=2, default=(2.0, 6.0), metavar="S", help="seconds between faults")
    parser.add_argument("--method", default="scaffold", help="by default one whose sites keep a state")
    parser.add_argument("--minimum", type=float, default=0.5, help="share of the sites that a round needs")
    parser.add_argument("--folder", help="keep the trial's folder here; the default is a temporary one")
    parser.add_argument("--out", help="write OUT.json and OUT.md")
    return parser.parse_args()


def run_with_faults(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run the federation with faults, and return what was measured and what went wrong."""
    values = {"data": "digits", "model": "dnn", "method": given.method, "rounds": given.rounds, "local_epochs": 1}
    config = with_values(Config(), {**values, "device": "cpu", "partition.clients": given.sites})
    settings = {
        "minimum": max(1, round(given.minimum * given.sites)),
        "begin_with": given.sites,
        "round_timeout": 180,
        "grace_seconds": 15,
        "attempts": 10,
    }
    trial = plan_trial(folder, config, settings)
    log, faults = folder / "chaos.log", folder / "faults.jsonl"
    began, load = time.monotonic(), [os.getloadavg()[0]]
    problem = None

    def show(line: str) -> None:
        load.append(os.getloadavg()[0])
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n")

    with Links(list(trial.sites), lambda: trial.port) as links, trial:
        trial.addresses = {site: f"127.0.0.1:{link.port}" for site, link in links.by_site.items()}
        injector, memory = Injector(trial, links, faults), MemorySampler(trial)
        try:
            trial.start()
            injector.start(draw_faults(trial.sites, given.seed, *given.every))
            memory.start()
            run_trial(trial, show)
        except Exception as error:  # a benchmark reports it with everything else
            problem = f"the run did not end well: {type(error).__name__}: {error}"
        finally:
            memory.stop()
            injector.stop()
    seconds = time.monotonic() - began
    run, problems = run_folder(trial), [] if problem is None else [problem]
    left = marked_processes(str(trial.folder))
    problems += [f"{len(left)} processes are left: {left}"] if left else []
    found = {
        "command": _command(given),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {_cpu()}, Python {platform.python_version()}, Flower {version('flwr')}",
        "sites": given.sites,
        "rounds": given.rounds,
        "minimum": settings["minimum"],
        "method": given.method,
        "every": list(given.every),
        "seconds": seconds,
        "load": [min(load), statistics.median(load), max(load)],
        "faults": dict(sorted(injector.counts.items())),
        "missed_faults": injector.missed,
        "memory": memory.summary(),
    }
    return found | _check(trial, run, config, problems) | {"problems": problems}


def _check(trial: LocalFederation, run: RunFolder, config: Config, problems: list[str]) -> dict[str, Any]:
    """Check what the run left behind, and add to the problems."""
    names, rows = list(trial.sites), [row for row in run.rounds() if row.round]
    if not run.finished or [row.round for row in rows] != list(range(1, config.rounds + 1)):
        problems.append(f"the run has {len(rows)} of {config.rounds} rounds, finished: {run.finished}")
    server = read_intact(run.audit_path, problems)
    sites = {name: read_intact(trial.site_file(name).parent / "state" / NAME, problems) for name in names}
    updates = account_for_updates(server, sites, rows)
    problems += updates.problems
    difference = None
    if run.finished:
        difference = largest_difference(run, simulate(run, config, build_federation(config), names))
        if not difference <= TOLERANCE:
            problems.append(f"the model differs from the simulated one by {difference:g}")
    attempts = read_status(run.path, datetime.now(UTC)).attempts
    requests = [e["round"] for e in server if e["event"] == "request" and e.get("kind") == "train"]
    return {
        "difference": difference,
        "starts": len(attempts),
        "ends": [attempt.status for attempt in attempts],
        "round_requests": len(requests),
        "repeated_requests": len(requests) - len(set(requests)),
        "round_seconds": [round(row.seconds, 1) for row in rows],
        "participants": [len(counted(row, names)) for row in rows],
        "absent": [len(row.absent or []) for row in rows],
        "reasons": _reasons(rows),
        "updates": {"counted": updates.counted, "discarded": updates.discarded, "superseded": updates.superseded},
        "accuracy": rows[-1].evaluation.accuracy if rows and rows[-1].evaluation else None,
    }


def _command(given: argparse.Namespace) -> str:
    """The command without the paths."""
    options = {"sites": given.sites, "rounds": given.rounds, "seed": given.seed, "method": given.method}
    words = [f"--{name} {value}" for name, value in options.items()]
    shortest, longest = given.every
    script = "python benchmarks/chaos/federation_chaos.py"
    return " ".join([script, *words, f"--every {shortest:g} {longest:g} --minimum {given.minimum:g}"])


def _reasons(rows: list[Any]) -> dict[str, int]:
    """Count the reasons why a site's update is missing, without the numbers in them."""
    reasons: dict[str, int] = {}
    for row in rows:
        for reason in (row.failed or {}).values():
            words = reason.partition(":")[0].partition("(")[0].strip()
            reasons[words] = reasons.get(words, 0) + 1
    return dict(sorted(reasons.items(), key=lambda item: -item[1]))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
