"""`fedskew bench`: how fast rounds are on this machine."""

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

from fedskew.cli import INTERRUPTED
from fedskew.cli.flags import Json, Quiet
from fedskew.cli.run import examples
from fedskew.errors import UserError, unknown

if TYPE_CHECKING:
    from fedskew.lab.benchmark.plan import Plan
    from fedskew.lab.benchmark.results import Results
    from fedskew.lab.benchmark.run import Tell

EXAMPLES = ("fedskew bench --quick --models dnn --only steps",)

_WIDE = 140
"""Characters: no figure is cut off, however narrow the terminal."""


def add_to(app: typer.Typer) -> None:
    app.command("bench", epilog=examples(EXAMPLES))(_command)


def _command(
    context: typer.Context,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N")] = "auto",
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="default: those that suit the device",
                                 show_default=False),
    ] = None,
    clients: Annotated[
        str | None, typer.Option("--clients", metavar="N,M", help="clients in a round (default: 10, on a GPU 10,100)",
                                 show_default=False),
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", metavar="A,B", help="default: fedavg,fedvls,scaffold",
                                 show_default=False),
    ] = None,
    precisions: Annotated[
        str | None, typer.Option("--precisions", metavar="A,B", help="default: float32, on a GPU bf16,tf32,float32",
                                 show_default=False),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="A,B", help="steps, rounds, federation, participants (default: all)",
                                 show_default=False),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="SECONDS", help="after which no further measurement begins; the "
                                 "most important come first (default: 600, on a GPU 420)", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a look at whether everything works, under a minute")] = False,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="write the JSON there, too", show_default=False)
    ] = None,
    render: Annotated[
        str | None, typer.Option("--render", metavar="FILE", help="measure nothing: print such a JSON as Markdown",
                                 show_default=False),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Measure rounds against a plain PyTorch loop, and against the fastest that the device could do."""
    if render is not None:
        _render(render)
        return
    said = {"models": models, "clients": clients, "methods": methods, "precisions": precisions, "only": only}
    plan = _plan(device, quick, said, budget)
    from fedskew.lab.benchmark.run import Benchmark

    interrupted = False
    benchmark = Benchmark(plan, _spelled(context))
    _keep(benchmark.results, out)  # a file that cannot be written is found before the measuring, not after it
    try:
        with _progress(as_json or quiet) as tell:
            benchmark.run(tell, lambda results: _keep(results, out))
    except KeyboardInterrupt:
        interrupted = True
    _keep(benchmark.results, out)
    _report(benchmark.results, as_json)
    if interrupted:
        from fedskew.cli.terminal import notice

        measured = benchmark.results.measurements
        notice("stopped; " + ("the rest was not measured" if measured else "nothing was measured yet"))
        raise typer.Exit(INTERRUPTED)


def _plan(device: str, is_quick: bool, lists: Mapping[str, str | None], budget: str | None) -> Plan:
    """What the device suggests, with what the user says."""
    from fedskew.engine import choose_device
    from fedskew.experiment.config import checks
    from fedskew.lab.benchmark.cases import METHODS, PRECISIONS, SETTINGS
    from fedskew.lab.benchmark.measurement import LEVELS
    from fedskew.lab.benchmark.plan import quick, usual

    name = str(choose_device(checks.device("device", device)))
    said: dict[str, Any] = {
        "models": _names("model", lists["models"], SETTINGS),
        "clients": tuple(checks.integer(1)("clients", n) for n in _split(lists["clients"])),
        "methods": _names("method", lists["methods"], METHODS),
        "precisions": _names("precision", lists["precisions"], PRECISIONS),
        "levels": _names("measurement", lists["only"], LEVELS),
        "budget": None if budget is None else checks.real(above=0)("budget", budget),
    }
    return replace(quick(name) if is_quick else usual(name), **{key: value for key, value in said.items() if value})


def _spelled(context: typer.Context) -> str:
    """The command as it can be given again."""
    words = ["fedskew", "bench"]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if value not in (None, False, option.default):
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return shlex.join(words)


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def _names(kind: str, text: str | None, choices: Any) -> tuple[str, ...]:
    names = _split(text)
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)
    return names


@contextmanager
def _progress(quiet: bool) -> Iterator[Tell]:
    """A bar in a terminal, a line for each group elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from fedskew.cli.terminal import notice, stderr

    console = stderr()
    if quiet:
        yield lambda *_: None
        return
    if not console.is_terminal:
        told: set[int] = set()
        start = time.monotonic()

        def say(done: int, total: int, group: str, _: str) -> None:
            if done not in told:
                told.add(done)
                notice(f"{time.monotonic() - start:.0f} s: {done + 1}/{total} {group}")

        yield say
        return
    columns = (BarColumn(bar_width=12), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=1)
        yield lambda done, total, _, line: bar.update(task, completed=done, total=total, description=line)


def _json(results: Results) -> dict[str, Any]:
    from fedskew.lab.benchmark.targets import targets

    return results.to_json() | {"targets": [target.to_json() for target in targets(results)]}


def _keep(results: Results, out: str | None) -> None:
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
    console.width = max(console.width, _WIDE)
    for table in tables(results):
        console.print(table.rich())
    for line in remarks(results):
        notice(line)


def _render(path: str) -> None:
    from fedskew.lab.benchmark.results import read_results
    from fedskew.lab.benchmark.tables import markdown

    sys.stdout.write(markdown(read_results(path)))
