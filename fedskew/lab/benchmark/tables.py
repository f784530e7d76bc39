"""The tables of a benchmark, for the terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable

from fedskew.lab.benchmark.peers import OURS
from fedskew.lab.benchmark.results import BARE, Level, Measurement, Results
from fedskew.lab.benchmark.scale import PHASES, ScaleCase
from fedskew.lab.benchmark.targets import rounds_rows, sorted_by_size, steps_rows, targets

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of strings. The first `name_columns` columns are aligned left, the others right."""

    title: str
    headings: Row
    rows: tuple[Row, ...]
    name_columns: int = 1

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if column < self.name_columns else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        rule = ["---" if column < self.name_columns else "---:" for column in range(len(self.headings))]
        lines = [f"| {' | '.join(row)} |" for row in (self.headings, rule, *self.rows)]
        return "\n".join((f"## {self.title}", "", *lines, ""))


def tables(results: Results) -> list[Table]:
    """All tables that are not empty."""
    all_tables = (
        _targets_table(results),
        _steps_ratios(results),
        _contenders(results),
        _rounds(results),
        _growth(results, "federation", "Whole rounds of FedAvg by federation size"),
        _growth(results, "participants", "Whole rounds of FedAvg by number of participants"),
        _commands(results),
        _peers(results),
        _scale(results),
    )
    return [table for table in all_tables if table.rows]


_LEGEND = (
    "- loop: the plain PyTorch loop over the clients; in the ratios of local steps on a GPU, the faster of this loop "
    "and the tuned loop, which uses PyTorch's fastest SGD\n"
    "- limit: one model, trained on one batch as large as all clients' batches together"
)


def markdown(results: Results) -> str:
    """Write a benchmark as a Markdown page."""
    about = [f"- {name}: {value}" for name, value in (*results.machine.items(), *results.versions.items())]
    head = [f"# Benchmark on {results.machine.get('gpu') or results.machine.get('cpu')}", ""]
    about += [_LEGEND] if results.measurements else []
    head += [f"`{results.command}`, {results.date}, {results.seconds:.0f} s", "", *about, ""]
    parts = ["\n".join(head), *(table.markdown() for table in tables(results))]
    if remarks(results):
        parts.append("\n".join(("## Remarks", "", *(f"- {line}" for line in remarks(results)), "")))
    return "\n".join(parts)


def remarks(results: Results) -> list[str]:
    """List the engines' notices, and the measurements that are missing, with the reason."""
    lines = list(dict.fromkeys(results.notices))
    lines += [f"not measured: {failure.label}: {failure.reason}" for failure in results.failures]
    return lines + [f"not measured: {title}: time was up" for title in results.left_out]


def _targets_table(results: Results) -> Table:
    rows = [
        (
            target.what,
            f"{'≥' if target.at_least else '≤'} {target.bound:.2f}",
            f"{target.value:.2f}",
            "met" if target.met else "missed",
        )
        for target in targets(results)
    ]
    return Table("Targets", ("target", "bound", "measured", ""), tuple(rows))


def _steps_ratios(results: Results) -> Table:
    rows = [
        (
            f"{row.model} {row.clients} × {row.batch_size}", row.method,
            _rate_and_format(row.ours), _rate_and_format(row.loop), _rate_and_format(row.limit),
            _format_ratio(row.over_loop),
            ", ".join(f"{precision} {ratio:.2f}" for precision, ratio in row.same_format),
            _format_ratio(row.share_of_limit),
        )
        for row in steps_rows(results.measurements, results.kind)
    ]  # fmt: skip
    headings = (
        "model, clients × batch",
        "method",
        "fedskew",
        "loop",
        "limit",
        "speed / loop",
        "speed / loop, same format",
        "speed / limit",
    )
    return Table("Local steps: samples/s, each contender in its fastest number format", headings, tuple(rows), 2)


def _contenders(results: Results) -> Table:
    steps = [m for m in results.measurements if m.level == "steps"]
    rows = [(_case_name(m), m.method, _name(m), m.precision, *_rate_and_spread(m), _bytes(m.memory)) for m in steps]
    headings = ("model, clients × batch", "method", "contender", "format", "samples/s", "±", "memory")
    return Table("Local steps: every contender", headings, tuple(rows), 4)


def _rounds(results: Results) -> Table:
    """List the measurements of whole rounds and of the bare steps.

    For FedAvg, fedskew's rows also have the speed relative to bare steps and to the loop. For other methods, they have
    the time per sample relative to FedAvg.
    """
    compared = {id(row.ours): row for row in rounds_rows(results.measurements)}
    rows = []
    for m in (m for m in results.measurements if m.level == "rounds"):
        row = compared.get(id(m))
        ratios = (row.share_of_bare_steps, row.time_over_fedavg, row.over_loop) if row else (None, None, None)
        time = "" if m.contender == BARE else f"{1000 * m.time:.1f}"  # steps alone are not a round
        texts = (_format_ratio(ratio) for ratio in ratios)
        rows.append(
            (_case_name(m), m.method, _name(m), m.precision, *_rate_and_spread(m), time, *texts, _bytes(m.memory))
        )
    headings = (
        "model, clients × batch", "method", "contender", "format", "samples/s", "±", "ms per round",
        "speed / bare steps", "time per sample / FedAvg", "speed / loop", "memory",
    )  # fmt: skip
    title = "Whole rounds: local steps with data, augmentation, aggregation and evaluation"
    return Table(title, headings, tuple(rows), 4)


def _growth(results: Results, level: Level, title: str) -> Table:
    measured = sorted_by_size(results.measurements, level)
    rows = [
        (
            _name(m), f"{m.federation:,}", f"{m.clients:,}", f"{1000 * m.time:.1f}", f"{100 * m.spread:.0f} %",
            f"{1000 * m.time / m.clients:.2f}", _bytes(m.memory),
        )
        for m in measured
    ]  # fmt: skip
    full_title = f"{title} ({measured[0].model}, {measured[0].precision})" if measured else title
    headings = ("engine", "federation", "participants", "ms per round", "±", "ms per participant", "memory")
    return Table(full_title, headings, tuple(rows))


def _commands(results: Results) -> Table:
    rows = [(c.command, c.until, f"{c.time:.2f}", f"{c.cpu_time:.2f}") for c in results.commands]
    return Table("Commands: seconds from the start of the process", ("command", "until", "s", "CPU s"), tuple(rows), 2)


def _peers(results: Results) -> Table:
    ours = {peer.precision: peer for peer in results.peers if peer.peer == OURS}
    rows: list[Row] = []
    for peer in results.peers:
        cells = [peer.peer, peer.precision]
        fedskew = ours.get(peer.precision)
        for key in ("seconds_per_round", "start_up", "whole_run"):
            value = getattr(peer, key)
            cells += [f"{value:.3f}", f"{value / getattr(fedskew, key):.2f}" if fedskew else ""]
        rows.append(tuple(cells))
    work = f"{results.peers[0].work}, {results.peers[0].rounds} rounds" if results.peers else ""
    headings = (
        "", "format", "s per round", "/ fedskew", "s until the first round ends", "/ fedskew", "s in all", "/ fedskew",
    )  # fmt: skip
    return Table(f"fedskew and a JAX script: {work}", headings, tuple(rows), 2)


def _scale(results: Results) -> Table:
    rows: list[Row] = []
    for m in results.scale:
        case = m.case
        name = f"{case.clients:,} × {case.samples}, {case.bytes / 1e9:.1f} GB on disk; {case.model}, {case.precision}"
        rows += [
            (name, _phase_name(phase, case), f"{m.phases[phase]:.1f}", f"{m.cpu_seconds[phase]:.1f}",
             f"{m.memory_after[phase] / 1e9:.1f} GB")
            for phase in PHASES
        ]  # fmt: skip
        total = [f"{sum(seconds.values()):.1f}" for seconds in (m.phases, m.cpu_seconds)]
        rows.append((name, f"whole run ({m.engine})", *total, f"{m.memory / 1e9:.1f} GB"))
    headings = ("clients × samples", "phase", "s", "CPU s", "peak host memory so far")
    return Table("A run of FedAvg on data that stay on disk", headings, tuple(rows), 2)


def _phase_name(phase: str, case: ScaleCase) -> str:
    return f"{case.rounds} rounds of {case.participants:,} participants" if phase == "rounds" else phase


def _case_name(m: Measurement) -> str:
    return f"{m.model} {m.clients} × {m.batch_size}" + ("" if m.sizes == "equal" else ", unequal")


def _rate_and_spread(m: Measurement) -> Row:
    return f"{m.rate:,.0f}", f"{100 * m.spread:.0f} %"


def _name(m: Measurement) -> str:
    return f"{m.contender} (auto)" if m.asked == "auto" and m.contender != BARE else m.contender


def _rate_and_format(m: Measurement | None) -> str:
    return f"{m.rate:,.0f} {m.precision}" if m else ""


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _bytes(number: int | None) -> str:
    if number is None:
        return ""
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
