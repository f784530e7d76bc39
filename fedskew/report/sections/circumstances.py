"""What was run: configuration, command, versions, machine, and what is wrong with a folder."""

from __future__ import annotations

import json
from typing import Any

from fedskew.report.charts.table import Cell, Table
from fedskew.report.sections.section import Section
from fedskew.results import Comparison, Result


def circumstances(setting: Comparison) -> Section:
    runs = setting.runs
    tables = [_configuration(setting), _methods(setting), _machines(runs)]
    missing = [f"{run.folder}: {line}" for run in runs for line in _problems(run)]
    words = ["The configuration is complete: written to a YAML file, fedskew run -c FILE repeats the run."]
    return Section("circumstances", "What was run", words, tables=tables, missing=missing)


def _problems(run: Result) -> list[str]:
    said = list(run.warnings)
    if not run.history:
        said.append("no round was recorded")
    elif not run.finished:
        said.append(f"not finished: it stands after round {run.history[-1].round}; the same command continues it")
    if not run.about:
        said.append("no about.json, so command, versions and machine are not known")
    return said


def _configuration(setting: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for key, value in setting.config.to_mapping().items():
        if key in ("method", "seed"):
            continue
        inner = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        rows += [[name, _text(v)] for name, v in inner.items()]
    return Table("configuration", "Configuration that the runs share", ["key", "value"], rows)


def _methods(setting: Comparison) -> Table:
    rows: list[list[Cell]] = []
    for c in setting.methods:
        params = c.runs[0].config.method_params
        told = ", ".join(f"{name}={_text(value)}" for name, value in params.items())
        rows.append([c.label, told or "none", ", ".join(str(run.seed) for run in c.runs)])
    return Table("methods", "Methods, their parameters and seeds", ["method", "parameters", "seeds"], rows)


def _machines(runs: list[Result]) -> Table:
    rows: list[list[Cell]] = []
    for run in runs:
        about = run.about
        versions = ", ".join(f"{name} {v}" for name, v in about.get("versions", {}).items())
        machine = about.get("machine", {})
        told = ", ".join(str(machine[k]) for k in ("cpu", "gpu", "system") if machine.get(k))
        parameters = about.get("model", {}).get("parameters")
        rows.append([run.name, about.get("begun"), about.get("command"), versions or None,
                     told or None, parameters])  # fmt: skip
    columns = ["run", "begun (UTC)", "command", "versions", "machine", "model's parameters"]
    return Table("machines", "Command, versions and machine of each run", columns, rows)


def _text(value: Any) -> str:
    if value is None or value == []:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
