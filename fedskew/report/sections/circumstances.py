"""The configuration, command, versions and machine of the runs, and problems in their folders."""

from __future__ import annotations

import json
from typing import Any

from fedskew.report.charts.table import Cell, Table
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, Result


def circumstances(comparison: Comparison) -> Section:
    """Build the section: the configuration, the methods, the machines, and problems in the folders."""
    runs = comparison.runs
    tables = [_configuration(comparison), _methods(comparison), _machines(runs)]
    missing = [f"{run.folder}: {line}" for run in runs for line in _problems(run)]
    paragraphs = [
        "The first table has the configuration of all runs. For keys that may differ between runs, such as the device, "
        "it has the value of the first run. The first line of a run's config.yaml says how to repeat the run."
    ]
    return Section("circumstances", "What was run", paragraphs, tables=tables, missing=missing)


def _problems(run: Result) -> list[str]:
    problems = list(run.warnings)
    if not run.history:
        problems.append("no round was recorded")
    elif not run.finished:
        recorded = f"unfinished: recorded up to round {run.history[-1].round}"
        problems.append(f"{recorded}; if it no longer runs, repeat its command to resume")
    if not run.about:
        problems.append("about.json is missing or damaged, so command, versions and machine are unknown")
    return problems


def _configuration(comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for key, value in comparison.config.to_mapping().items():
        if key in ("method", "seed"):
            continue
        inner = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        rows += [[name, _text(v)] for name, v in inner.items()]
    return Table("configuration", "Configuration without method and seed", ["key", "value"], rows)


def _methods(comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for method in comparison.methods:
        params = method.runs[0].config.method_params
        listed = ", ".join(f"{name}={_text(value)}" for name, value in params.items())
        rows.append([method.label, listed or "none", ", ".join(str(run.seed) for run in method.runs)])
    return Table("methods", "Methods, their parameters and seeds", ["method", "parameters", "seeds"], rows)


def _machines(runs: list[Result]) -> Table:
    rows: list[list[Cell]] = []
    for run in runs:
        about = run.about
        versions = ", ".join(f"{name} {v}" for name, v in about.get("versions", {}).items())
        machine = about.get("machine", {})
        described = ", ".join(str(machine[k]) for k in ("cpu", "gpu", "system") if machine.get(k))
        parameters = about.get("model", {}).get("parameters")
        rows.append([run.name, about.get("begun"), about.get("command"), versions or None,
                     described or None, parameters])  # fmt: skip
    columns = ["run", "started (UTC)", "command", "versions", "machine", "model parameters"]
    return Table("machines", "Command, versions and machine of each run", columns, rows)


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
