"""List tables, cells or a plan for `reproduce --list`, with their estimated cost on this machine.

The estimate is the number of samples trained on, times the measured time per sample. On a CPU, one step of one client
is timed. A GPU trains all clients of a round together. A step of all clients takes about as long as one step of one
model on their batches (docs/speed.md), so the latter is timed. The cost of tables and cells is for one seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from fedskew.data import DATASETS
from fedskew.engine import choose_device
from fedskew.errors import UserError, plural
from fedskew.experiment.config import Config
from fedskew.lab.papers.cells import Cell, CellChoice, make_job, why_not_runnable
from fedskew.lab.papers.protocol import Protocol, read_protocol
from fedskew.lab.papers.selection import Selection
from fedskew.lab.sweep.job import Job, identity, merge_jobs
from fedskew.methods import Objective, make_method
from fedskew.models import DataShape, make_model

_SHAPES = {
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "cinic10": (3, 32, 32),
    "tiny-imagenet": (3, 64, 64),
    "digits-domains": (3, 32, 32),
    "digits": (1, 8, 8),
    "ag_news": (200,),
    "20newsgroups": (200,),
}
"""The shape of a sample, by dataset."""
_VOCABULARY = 98_635
"""The default maximum number of token ids. The estimate uses it for every text dataset."""
_ASSUMED_CLIENTS = 10
"""The number of clients in the estimate, if the configuration does not set it."""
_SECONDS_PER_MODEL = 0.1
"""Seconds of timing per model."""
_MIN_STEPS = 3
"""The minimum number of timed steps. The first one takes many times longer than the others."""
_MAX_CPU_BATCH = 16
"""The largest batch of a timed step on a CPU. Larger batches take about as long per sample."""


@dataclass(frozen=True)
class Work:
    """The amount of computation in a run."""

    visits: float
    """Samples trained on in all rounds, epochs and clients, including extra passes of the method."""
    steps: float
    """Local steps that must run one after another."""


def needed_runs(jobs: Iterable[Job]) -> list[Config]:
    """List the runs that the jobs need. A start model that several jobs share is trained once."""
    listed = list(jobs)
    starts = {identity(job.start): job.start for job in listed if job.start is not None}
    return [*(job.config for job in listed), *starts.values()]


def estimate_work(config: Config) -> Work:
    """Estimate the amount of computation from the configuration."""
    if config.data not in _SHAPES:
        raise UserError(f"data is {config.data!r}; costs can be estimated for {', '.join(_SHAPES)}")
    clients = config.partition.clients or _ASSUMED_CLIENTS
    participants = min(config.clients_per_round or clients, clients)
    samples_per_client = DATASETS[config.data].train / clients
    passes = config.rounds * config.local_epochs
    method = make_method(config.method, config.method_params)
    factor = float(method.solver.gradients())
    if isinstance(method.objective, Objective):
        factor += method.objective.extra_forwards(1.0, {}) / 3  # a forward pass costs a third of a training step
    return Work(
        passes * participants * samples_per_client * factor, passes * max(1.0, samples_per_client / config.batch_size)
    )


def estimate_seconds(config: Config, device: str) -> float:
    """Estimate the duration of a run on this machine."""
    clients = config.partition.clients or _ASSUMED_CLIENTS
    participants = min(config.clients_per_round or clients, clients)
    return estimate_work(config).visits / _rate(config.data, config.model, config.batch_size, participants, device)


@cache
def _rate(data: str, model: str, batch_size: int, participants: int, device: str) -> float:
    """Measure the samples per second."""
    chosen, shape, classes = choose_device(device), _SHAPES[data], DATASETS[data].classes
    is_text = DATASETS[data].kind == "text"
    network = make_model(model, DataShape(shape, classes, _VOCABULARY if is_text else 0), 0).to(chosen)
    batch = min(batch_size, _MAX_CPU_BATCH) if chosen.type == "cpu" else batch_size * participants
    x = torch.randint(1, 1000, (batch, *shape), device=chosen) if is_text else torch.rand(batch, *shape, device=chosen)
    y = torch.randint(0, classes, (batch,), device=chosen)
    return batch / _step_seconds(network, x, y)


def _step_seconds(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Time a few steps, and return the fastest."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    fastest, steps, began = float("inf"), 0, time.perf_counter()
    while steps < _MIN_STEPS or time.perf_counter() - began < _SECONDS_PER_MODEL:
        step_began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(nn.functional.cross_entropy(network(x), y))
        optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        fastest, steps = min(fastest, time.perf_counter() - step_began), steps + 1
    return fastest


@dataclass(frozen=True)
class Line:
    """One line of the list. `runs` is 0 for a line without a cost. The training of a start model is a run, too."""

    what: str
    about: str
    runs: int
    steps: float
    seconds: float

    def __str__(self) -> str:
        runs = "one run" if self.runs == 1 else f"{self.runs} runs"
        cost = f"{runs}, {self.steps:,.0f} local steps, about {format_duration(self.seconds)}"
        return f"{self.what}: {self.about}" + (f" [{cost}]" if self.runs else "")

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def list_tables(cells: Sequence[Cell], choice: CellChoice, device: str) -> list[Line]:
    """List, for each paper, its citation, variants and known flaws, then one line per table."""
    lines, before = [], ""
    for (paper, table), found in _grouped(cells, lambda cell: (cell.paper, cell.table)).items():
        protocol = read_protocol(paper)
        if paper != before:
            before = paper
            lines += _about(protocol)
        about = f"{protocol.tables[table].title}, {plural(len(found), 'cell')}"
        lines.append(_line(f"  {paper}/{table}", about, _jobs(found, choice), device))
    return lines


def _about(protocol: Protocol) -> list[Line]:
    lines = [(protocol.name, protocol.citation)]
    lines += [(f"  --variant {name}", " ".join(variant["why"].split())) for name, variant in protocol.variants.items()]
    lines += [("  known flaw", flaw) for flaw in protocol.misprints]
    return [Line(what, about, 0, 0.0, 0.0) for what, about in lines]


def list_plan(plan: Sequence[Selection], device: str) -> list[Line]:
    """List one line per entry of a plan, for all its seeds."""
    return [_line(str(entry), plural(len(entry.cells()), "cell"), entry.jobs(), device) for entry in plan]


def list_cells(cells: Sequence[Cell], choice: CellChoice, device: str) -> list[Line]:
    """List one line per setting and method, with the paper's numbers."""
    lines = []
    for (setting, method), found in _grouped(cells, lambda c: (" ".join(filter(None, c.setting)), c.method)).items():
        printed = [f"{c.metric} {c.printed.mean:g}" for c in found if c.printed and c.printed.mean is not None]
        about = ", ".join(printed) or _why_no_number(found)
        if why := why_not_runnable(found[0]):
            lines.append(Line(f"{setting} {method}", f"{about}; {why.partition(';')[0]}", 0, 0.0, 0.0))
        else:
            lines.append(_line(f"{setting} {method}", about, _jobs(found, choice), device))
    return lines


def _why_no_number(cells: Sequence[Cell]) -> str:
    illegible = any(c.printed is not None and "illegible" in c.printed.note for c in cells)
    return "the published number is illegible" if illegible else "no published number"


def _grouped(cells: Sequence[Cell], key: Callable[[Cell], tuple[str, str]]) -> dict[tuple[str, str], list[Cell]]:
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return found


def _jobs(cells: Sequence[Cell], choice: CellChoice) -> list[Job]:
    jobs = (make_job(cell, 0, choice) for cell in cells if not why_not_runnable(cell))
    return merge_jobs(jobs)


def _line(what: str, about: str, jobs: Sequence[Job], device: str) -> Line:
    runs = needed_runs(jobs)
    steps = sum(estimate_work(run).steps for run in runs)
    return Line(what, about, len(runs), steps, sum(estimate_seconds(run, device) for run in runs))


def format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
