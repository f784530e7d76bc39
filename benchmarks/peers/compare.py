"""Measure fedskew and its peers on the same work, one after another, and write one table.

    python benchmarks/peers/compare.py --out benchmarks/peers-cpu
    python benchmarks/peers/compare.py --device cuda --size paper --rounds 100 --out benchmarks/peers-h200

Peers that are not installed are left out and named. A peer is looked for in benchmarks/peers/.venvs/NAME, then in the
interpreter that runs this script; `--python NAME=PATH` names another interpreter. README.md says how to install them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from measure import Measurement, ScriptError, measure
from table import OURS, Comparison, Row, markdown
from work import PRECISIONS, SIZES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LONG_RUN = 60.0
"""Seconds above which a run is not repeated."""


@dataclass(frozen=True)
class Peer:
    """A script, and the packages that it needs."""

    name: str
    key: str
    """What the peer is called on the command line, and its environment's folder."""
    script: str
    packages: tuple[str, ...]


PEERS = (
    Peer(OURS, "fedskew", "fedskew_run.py", ("fedskew", "torch")),
    Peer("plain PyTorch loop", "plain", "plain_loop.py", ("torch",)),
    Peer("pfl-research", "pfl", "pfl_research.py", ("pfl", "torch")),
    Peer("Flower simulation", "flower", "flower_simulation.py", ("flwr", "ray", "torch")),
    Peer("fluke", "fluke", "fluke_fl.py", ("fluke", "torch")),
    Peer("JAX vmap", "jax", "jax_vmap.py", ("jax",)),
)


def main(arguments: Sequence[str] | None = None) -> None:
    flags = _read_flags(arguments)
    if flags.render:
        print(markdown(Comparison.from_json(json.loads(Path(flags.render).read_text(encoding="utf-8")))), end="")
        return
    comparison = Comparison(
        machine=_machine(flags.device),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["python", "benchmarks/peers/compare.py", *(arguments or sys.argv[1:])]),
        device=flags.device,
        work=SIZES[flags.size].description,
        rounds=flags.rounds,
    )
    interpreters = _interpreters(flags, comparison.skipped)
    _measure_all(flags, interpreters, comparison)
    page = markdown(comparison)
    if flags.out:
        text = json.dumps(comparison.to_json(), indent=1) + "\n"
        Path(f"{flags.out}.json").write_text(text, encoding="utf-8")
        Path(f"{flags.out}.md").write_text(page, encoding="utf-8")
    print(page, end="")


def _read_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None,
        epilog=f"Peers: {', '.join(peer.key for peer in PEERS)}.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=sorted(SIZES), help="default: small, or paper on a GPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precisions", metavar="A,B", help="default: float32, or all on a GPU")
    parser.add_argument("--peers", metavar="A,B", help="default: all")
    parser.add_argument(
        "--skip", metavar="PEER:FORMAT", action="append", default=[], help="leave out a peer in one number format"
    )
    parser.add_argument("--python", metavar="NAME=PATH", action="append", default=[], help="a peer's interpreter")
    parser.add_argument("--out", metavar="FILE", help="write FILE.json and FILE.md")
    parser.add_argument("--render", metavar="FILE.json", help="print the table of an earlier comparison")
    flags = parser.parse_args(arguments)
    flags.size = flags.size or ("paper" if flags.device == "cuda" else "small")
    flags.precisions = (flags.precisions or ("float32" if flags.device == "cpu" else ",".join(PRECISIONS))).split(",")
    flags.peers = (flags.peers or ",".join(peer.key for peer in PEERS)).split(",")
    flags.python = dict(pair.split("=", 1) for pair in flags.python if "=" in pair)
    _check(parser, "--precisions", flags.precisions, PRECISIONS)
    _check(parser, "--skip", flags.skip, [f"{peer.key}:{precision}" for peer in PEERS for precision in PRECISIONS])
    _check(parser, "--peers", [*flags.peers, *flags.python], [peer.key for peer in PEERS])
    return flags


def _check(parser: argparse.ArgumentParser, flag: str, names: Sequence[str], choices: Sequence[str]) -> None:
    for name in names:
        if name not in choices:
            parser.error(f"{flag}: unknown {name!r}; expected some of {', '.join(choices)}")


def _interpreters(flags: argparse.Namespace, skipped: list[str]) -> dict[Peer, str]:
    """Find an interpreter for each requested peer. Peers without one are added to `skipped`."""
    found = {}
    for peer in PEERS:
        if peer.key not in flags.peers:
            continue
        own = HERE / ".venvs" / peer.key / "bin" / "python"
        python = flags.python.get(peer.key) or (str(own) if own.exists() else sys.executable)
        missing = [package for package in peer.packages if not _has(python, package)]
        if missing:
            skipped.append(f"{peer.name}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed")
        else:
            found[peer] = python
    return found


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    environment = _environment()
    return subprocess.run([python, "-c", code], env=environment, cwd=HERE, check=False).returncode == 0


def _environment() -> Mapping[str, str]:
    """The environment of all scripts: all cores, threads that sleep while they wait, and Python's bytecode.

    On a busy machine, spinning threads would measure the other programs. Without bytecode, every run would compile all
    modules that it imports.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.endswith("_NUM_THREADS") and key != "PYTHONDONTWRITEBYTECODE"
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _measure_all(flags: argparse.Namespace, interpreters: Mapping[Peer, str], comparison: Comparison) -> None:
    """Run every peer once per repeat, in turn, so that a busy moment does not hit one of them alone."""
    measured: dict[tuple[Peer, str], list[Measurement]] = {}
    done: set[tuple[Peer, str]] = set()
    for repeat in range(flags.repeats):
        for precision in flags.precisions:
            for peer, python in interpreters.items():
                if (peer, precision) in done or f"{peer.key}:{precision}" in flags.skip:
                    continue
                print(f"{repeat + 1}/{flags.repeats} {peer.name}, {precision}", file=sys.stderr, flush=True)
                command = [
                    python, str(HERE / peer.script), "--device", flags.device, "--precision", precision,
                    "--rounds", str(flags.rounds), "--size", flags.size,
                ]  # fmt: skip
                comparison.load.append(round(os.getloadavg()[0], 1))
                try:
                    run = measure(command, _environment())
                except ScriptError as error:
                    done.add((peer, precision))
                    comparison.skipped.append(f"{peer.name}, {precision}: {error}")
                    continue
                measured.setdefault((peer, precision), []).append(run)
                if run.whole_run > LONG_RUN:
                    done.add((peer, precision))
    comparison.rows += [Row(peer.name, precision, runs) for (peer, precision), runs in measured.items()]


def _machine(device: str) -> str:
    words = [f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    if device == "cuda":
        query = ["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"]
        words.insert(0, subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())
    return ", ".join(words)


if __name__ == "__main__":
    main()
