"""`fedskew bench`: measure the speed of rounds on this machine."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.commands import INTERRUPTED, Json, Quiet, add_command, option, split_names
from fedskew.errors import UserError, unknown

if TYPE_CHECKING:
    from fedskew.lab.benchmark.plan import Plan
    from fedskew.lab.benchmark.results import Results
    from fedskew.lab.benchmark.run import ShowProgress

_MIN_WIDTH = 170
"""The minimum width of a table in characters. In a narrower table, numbers would be cut off."""


def add_to(app: typer.Typer) -> None:
    add_command(app, "bench", _command, "fedskew bench --quick --models dnn --only steps")


def _command(
    context: typer.Context,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N")] = "auto",
    models: Annotated[str | None, option("--models", "A,B", "models (default: those that suit the device)")] = None,
    clients: Annotated[
        str | None, option("--clients", "N,M", "clients per round (default: 10, or 10,100 on a GPU)")
    ] = None,
    methods: Annotated[
        str | None, option("--methods", "A,B", "methods (default: fedavg,fedvls,scaffold)")
    ] = None,
    precisions: Annotated[
        str | None, option("--precisions", "A,B", "precisions (default: float32, or bf16,tf32,float32 on a GPU)")
    ] = None,
    only: Annotated[
        str | None,
        option("--only", "A,B", "measure only these: steps, rounds, federation, participants, start-up, whole-runs "
               "(GPU), peers, scale; peers needs JAX and a clone of the repository; scale writes 7 GB, or 13 GB for a "
               "GPU, to a temporary folder (default: all but peers and scale)"),
    ] = None,
    scale_clients: Annotated[
        str | None, option("--scale-clients", "N", "clients of the federation for scale (default: 1000000)")
    ] = None,
    budget: Annotated[
        str | None,
        option("--budget", "SECONDS", "start no measurement after this time, except peers and scale if --only names "
               "them; the most important measurements come first (default: 600, or 420 on a GPU)"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="smoke test, under a minute, with smaller defaults")] = False,
    out: Annotated[str | None, option("--out", "FILE", "also write the results to this file, as JSON")] = None,
    render: Annotated[
        str | None, option("--render", "FILE", "print a JSON file written by --out as Markdown, without measuring")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Compare the speed of rounds with a plain PyTorch loop and with one model trained on one large batch."""
    if render is not None:
        _render(render)
        return
    lists = {"models": models, "clients": clients, "methods": methods, "precisions": precisions, "only": only}
    plan = _plan(device, quick, lists, budget, scale_clients)
    from fedskew.lab.benchmark.run import Benchmark

    interrupted = False
    benchmark = Benchmark(plan, _command_line(context))
    _write(benchmark.results, out)  # fail before measuring if the file cannot be written
    try:
        with _progress(as_json or quiet) as show_progress:
            benchmark.run(show_progress, lambda results: _write(results, out))
    except KeyboardInterrupt:
        interrupted = True
    _write(benchmark.results, out)
    _report(benchmark.results, as_json)
    if interrupted:
        from fedskew.cli.terminal import notice

        done = benchmark.results.measurements or benchmark.results.commands or benchmark.results.peers
        notice("stopped; " + ("the remaining measurements were skipped" if done else "nothing was measured"))
        raise typer.Exit(INTERRUPTED)


def _plan(
    device: str, is_quick: bool, lists: Mapping[str, str | None], budget: str | None, scale_clients: str | None
) -> Plan:
    """Override the device's default plan with the user's choices."""
    from fedskew.engine import choose_device
    from fedskew.experiment.config import values
    from fedskew.lab.benchmark.cases import CLASSES, METHODS, PRECISIONS, SETTINGS
    from fedskew.lab.benchmark.plan import default_plan, quick_plan
    from fedskew.lab.benchmark.results import LEVELS, PEERS, SCALE

    name = str(choose_device(values.device("device", device)))
    levels = _known_names("measurement", lists["only"], (*LEVELS, PEERS, SCALE))
    if "whole-runs" in levels and not name.startswith("cuda"):
        raise UserError(f"whole-runs measures commands on a CUDA GPU, but the device is {name!r}")
    chosen: dict[str, Any] = {
        "models": _known_names("model", lists["models"], SETTINGS),
        "clients": tuple(values.integer(1)("clients", n) for n in dict.fromkeys(split_names(lists["clients"]))),
        "methods": _known_names("method", lists["methods"], METHODS),
        "precisions": _known_names("precision", lists["precisions"], PRECISIONS),
        "levels": levels,
        "scale_clients": None if scale_clients is None else values.integer(CLASSES)("scale_clients", scale_clients),
        "budget": None if budget is None else values.real(above=0)("budget", budget),
    }
    return replace(
        quick_plan(name) if is_quick else default_plan(name), **{key: value for key, value in chosen.items() if value}
    )


def _command_line(context: typer.Context) -> str:
    """Return the command line that repeats this benchmark."""
    words = ["fedskew", "bench"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value not in (None, False, parameter.default):
            words += parameter.opts[:1] if value is True else [parameter.opts[0], str(value)]
    return shlex.join(words)


def _known_names(kind: str, text: str | None, choices: Any) -> tuple[str, ...]:
    """Split a list of names, and refuse a name that is not among the choices."""
    names = tuple(dict.fromkeys(split_names(text)))
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)
    return names


@contextmanager
def _progress(quiet: bool) -> Iterator[ShowProgress]:
    """Show progress as a bar in a terminal, and as one line per group elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from fedskew.cli.terminal import notice, stderr

    console = stderr()
    if quiet:
        yield lambda *_: None
        return
    if not console.is_terminal:
        printed: set[int] = set()
        start = time.monotonic()

        def show(done: int, total: int, group: str, _: str) -> None:
            if done not in printed:
                printed.add(done)
                notice(f"{time.monotonic() - start:.0f} s: {done + 1}/{total} {group}")

        yield show
        return
    columns = (BarColumn(bar_width=12), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=1)
        yield lambda done, total, _, line: bar.update(task, completed=done, total=total, description=line)


def _json(results: Results) -> dict[str, Any]:
    from fedskew.lab.benchmark.targets import targets

    return results.to_json() | {"targets": [target.to_json() for target in targets(results)]}


def _write(results: Results, out: str | None) -> None:
    import json

    if out is not None:
        try:
            Path(out).write_text(json.dumps(_json(results), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror or error}") from error


def _report(results: Results, as_json: bool) -> None:
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.lab.benchmark.tables import remarks, tables

    if as_json:
        print_json(_json(results))
        return
    console = stdout()
    console.width = max(console.width, _MIN_WIDTH)
    for table in tables(results):
        console.print(table.rich())
    for line in remarks(results):
        notice(line)


def _render(path: str) -> None:
    from fedskew.lab.benchmark.results import read_results
    from fedskew.lab.benchmark.tables import markdown

    sys.stdout.write(markdown(read_results(path)))
