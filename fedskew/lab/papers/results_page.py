"""Generate RESULTS.md from the records in results/: every table and sweep with a rerun.

The comments on tables come from results/findings.yaml, and those on sweeps from the grid files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedskew.errors import UserError, unknown
from fedskew.experiment.config.values import read_yaml
from fedskew.lab.papers.map import federation_results, guide, known_seeds
from fedskew.lab.papers.protocol import protocol
from fedskew.lab.papers.selection import all_tables, read_plan
from fedskew.lab.papers.table_section import device, markdown_row, table_section
from fedskew.lab.sweep.campaign import is_enough
from fedskew.lab.sweep.grid import Point, read_grid
from fedskew.lab.sweep.job import planned_rounds
from fedskew.lab.sweep.records import Records, RecordsFile, read_folder, until
from fedskew.metrics.summary import MeanStd, best, mean_of_last, population_mean_std

GRIDS_FOLDER = "grids"
_LAST = 10
"""Tables of sweeps show means over this many last rounds."""


def grid_sections(folder: str | Path) -> list[str]:
    """Write one table per sweep, with the best combination first."""
    sections = []
    for path in sorted((Path(folder) / GRIDS_FOLDER).glob("*.yaml")):
        records = Records(RecordsFile(path.with_suffix(".jsonl")).read())
        if len(records):
            link = Path("results") / GRIDS_FOLDER / path.name
            sections += [f"## Sweep {path.stem}\n", f"{_about(path)} [The grid]({link}).\n", device_line(records)]
            sections.append(_table(read_grid(path, {}).points(), records))
    return sections


def _about(path: Path) -> str:
    """Return the comments of the grid file, without the command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#") and "fedskew sweep" not in line]
    return " ".join(comments) or "Every combination of its values."


def device_line(records: Records) -> str:
    """Say how many runs there are, and on which machines they ran."""
    where = sorted(
        {f"{r.content['machine'].get('gpu') or r.content['machine']['cpu']}, {r.config.precision}" for r in records}
    )
    return f"{len(records)} runs on {' and '.join(where)}.\n"


def _table(points: Sequence[Point], records: Records) -> str:
    keys = [key for key in points[0].grid_values if key != "seed"]
    groups: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(str(point.grid_values[key]) for key in keys), []).append(point)
    rows = {values: row for values, group in groups.items() if (row := _row(group, records))}
    missing = [" ".join(values) for values in groups if values not in rows]
    not_run = [f"\nNot run: {', '.join(missing)}."] if missing else []
    cells = _one_row_per_federation(keys, rows) if len(keys) > 2 and "method" in keys else _ranking(keys, rows)
    return "\n".join([*(f"| {' | '.join(line)} |" for line in cells), *not_run]) + "\n"


def _ranking(keys: list[str], rows: Mapping[tuple[str, ...], _Row]) -> list[list[str]]:
    """List one combination per row, the best first."""
    ranked = sorted(rows, key=lambda values: -rows[values].mean_last.mean)
    headings = [
        *keys,
        "accuracy of the last 10 rounds (%)",
        "best",
        "worst class",
        "compute (FedAvg: 1)",
        "seeds",
    ]
    return [headings, ["---"] * len(headings), *([*values, *rows[values].cells()] for values in ranked)]


def _one_row_per_federation(keys: list[str], rows: Mapping[tuple[str, ...], _Row]) -> list[list[str]]:
    """List the accuracy of the last 10 rounds, with one column per method. The best of a row is bold."""
    at = keys.index("method")
    methods = list(dict.fromkeys(values[at] for values in rows))
    by_setting: dict[tuple[str, ...], dict[str, _Row]] = {}
    for values, row in rows.items():
        by_setting.setdefault(values[:at] + values[at + 1 :], {})[values[at]] = row
    headings = [*(key for key in keys if key != "method"), *methods, "seeds"]
    cells = [headings, ["---"] * len(headings)]
    for setting, found in by_setting.items():
        best = max(found, key=lambda method: found[method].mean_last.mean)
        shown = {method: row.cells()[0] for method, row in found.items()}
        shown[best] = f"**{shown[best]}**"
        seeds = sorted({row.seeds for row in found.values()})
        cells.append(
            [
                *setting,
                *(shown.get(method, "") for method in methods),
                "–".join(map(str, seeds[:: len(seeds) - 1 or 1])),
            ]
        )
    return cells


@dataclass(frozen=True)
class _Row:
    """Means over the seeds of one combination."""

    mean_last: MeanStd
    """Accuracy as a mean over the last rounds, because single rounds vary."""
    best: MeanStd
    worst: MeanStd
    compute: float
    seeds: int
    rounds: int
    planned_rounds: int

    def cells(self) -> list[str]:
        note = "" if self.rounds >= self.planned_rounds else f" ({self.rounds} of {self.planned_rounds} rounds)"
        shown = [
            str(value) if self.seeds > 1 else f"{100 * value.mean:.2f}"
            for value in (self.mean_last, self.best, self.worst)
        ]
        return [shown[0] + note, *shown[1:], f"{self.compute:.2f}", str(self.seeds)]


def _row(points: Sequence[Point], records: Records) -> _Row | None:
    found = [record for point in points if (record := records.get(point.job)) is not None]
    if not found:
        return None
    planned = planned_rounds(points[0].config)
    curves = [until(record.curve, planned) for record in found]
    done = min(curve[-1][0] for curve in curves)
    return _Row(
        mean_last=population_mean_std([mean_of_last(curve, _LAST).accuracy for curve in curves]),
        best=population_mean_std([best(curve).accuracy for curve in curves]),
        worst=population_mean_std([until(record.worst_curve, planned)[-1][1] for record in found]),
        compute=found[0].content["compute"][len(curves[0]) - 1] / max(1, curves[0][-1][0]),
        seeds=len(found),
        rounds=done,
        planned_rounds=planned,
    )


FINDINGS = "findings.yaml"
VACANT_LOGITS = "vacant-logits"
"""The folder of results/ that tools/vacant_logits fills, and the key of its comment."""
_HEAD = """\
# Results

Published numbers and our reruns. Generated by `fedskew results` from [results/](results); to rerun any of it, see
[docs/reproduce.md](docs/reproduce.md). Numbers are means over seeds ± the population standard deviation; "difference"
is rerun minus paper. The best round is chosen on the test set, as in the papers, which favours every method equally.
"""


def results_page(folder: str | Path) -> str:
    """Write the whole page."""
    records = read_folder(folder)
    seeds = known_seeds(records)
    findings = _findings(Path(folder) / FINDINGS)
    sections = [_HEAD, *_finding(findings, "summary"), *_map(records, seeds, findings), *_choices(Path(folder))]
    sections += _vacant_classes(Path(folder), findings)
    shown: set[str] = set()
    for paper, table in all_tables():
        rules = protocol(paper)
        if rules.extends is not None:  # a preprint with the numbers of the paper
            continue
        for variant in (None, *rules.variants):
            sections += table_section(rules, table, variant, records, seeds, findings, shown)
    sections += [*grid_sections(folder), *_still_to_do(Path(folder), records), _machines(records)]
    return "\n".join(sections).rstrip() + "\n"


def _map(records: Records, seeds: Sequence[int], findings: Mapping[str, str]) -> list[str]:
    """Write the table of best methods, and include the maps."""
    found = federation_results(records, seeds)
    if not found:
        return []
    datasets = dict.fromkeys(federation.dataset for federation in found)
    pictures = [f"![Gain over FedAvg on {name}](results/map-{name}.png)\n" for name in datasets]
    introduction = (
        "All methods under one protocol (`fedskew reproduce fedskew/map --list`), mean accuracy of the last 10 rounds, "
        "over the seeds that all methods have. Methods within a point of the best are listed with it.\n"
    )
    return ["## Which method for my federation\n", *_finding(findings, "guide"), introduction, guide(found), *pictures]


def _choices(folder: Path) -> list[str]:
    """Include the check of `fedskew choose`, which tools/check_choose.py writes."""
    path = folder / "choose" / "table.md"
    if not path.is_file():
        return []
    introduction = (
        "What `fedskew choose` chose, and its test accuracy on fresh splits next to that of all methods with their "
        "default settings (`python tools/check_choose.py`). [docs/choose.md](docs/choose.md) says which "
        "race missed, and what a small budget can do.\n"
    )
    return ["## Does the race choose well?\n", introduction, path.read_text(encoding="utf-8")]


def _vacant_classes(folder: Path, findings: Mapping[str, str]) -> list[str]:
    """Include what tools/vacant_logits measured about the classes that clients lack."""
    path = folder / VACANT_LOGITS / "table.md"
    if not path.is_file():
        return []
    return [
        "## Why calibrated losses lose if all clients take part\n",
        f"![Log-odds of vacant classes, and confused classes](results/{VACANT_LOGITS}/figure.png)\n",
        *_finding(findings, VACANT_LOGITS),
        path.read_text(encoding="utf-8"),
    ]


def _findings(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: expected a mapping of tables to comments")
    known = {"summary", "guide", VACANT_LOGITS, *(f"{paper}/{table}" for paper, table in all_tables())}
    for key in content:
        if str(key).partition(" ")[0] not in known:
            raise UserError(f"{path}: {unknown('table', str(key), known)}")
    return {str(key): str(text).strip() for key, text in content.items()}


def _finding(findings: Mapping[str, str], key: str) -> list[str]:
    return [findings[key] + "\n"] if key in findings else []


def _still_to_do(folder: Path, records: Records) -> list[str]:
    """List the entries of plans that have not been run completely."""
    lines = []
    for path in sorted(folder.glob("plan-*.yaml")):
        for selection in read_plan(path, {}):
            jobs = selection.jobs()
            done = sum((found := records.get(job)) is not None and is_enough(found, job) for job in jobs)
            if done < len(jobs):
                lines.append(f"- {selection}: {done} of {len(jobs)} runs done ([{path.name}](results/{path.name}))")
    return ["## Planned and not run\n", "\n".join(lines) + "\n"] if lines else []


def _machines(records: Records) -> str:
    """List the machines, versions and commands of all runs."""
    lines = [
        "## Machines and versions\n",
        markdown_row(("runs", "machine", "versions", "precision")),
        markdown_row(["---"] * 4),
    ]
    counted = Counter(
        (device(r), ", ".join(f"{k} {v}" for k, v in sorted(r.content["versions"].items())), r.config.precision)
        for r in records
    )
    lines += [markdown_row((str(number), *what)) for what, number in sorted(counted.items())]
    commands = Counter(str(r.content["command"]) for r in records)
    lines += ["", "Commands:\n", "```text", *sorted(commands), "```"]
    return "\n".join(lines) + "\n"
