"""`fedskew federate survey`: ask the sites about their data before training.

`fedskew diagnose` and `fedskew choose` can use the label counts in `counts.csv`.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.storage.files import write_file
from fedskew.flower.contract import Contract
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import Failure, Reply
from fedskew.flower.sites import Sites
from fedskew.flower.wire import Facts, Garbled, is_count, one_line

COUNTS, SURVEY = "counts.csv", "survey.json"
_MAX_VALUES = 10_000
"""The maximum number of categories per column that a site may name."""
_SUMMARY = ("low", "median", "high")
"""What a site reports of a column of numbers (see `site_survey`). All three are None if the column has few values."""


def survey_sites(sites: Sites, contract: Contract, settings: FederationSettings) -> dict[str, Any]:
    """Request a description of each connected site's data. Return the answers, and why other sites gave none."""
    sites.wait_for(settings.begin_with or settings.required_sites)
    sites.wait_for_greetings(settings.grace_seconds)
    answers = sites.request("describe", {client: {} for client in sites.online}, b"", settings.round_timeout)
    described: dict[str, Any] = {}
    declined: dict[str, str] = {}
    for client, answer in answers.items():
        name = sites.names[client]
        try:
            described[name] = read_description(answer, contract)
        except Garbled as problem:
            declined[name] = str(problem)
            sites.log(f"the survey has no usable answer from {name}: {problem}")
    if not described:
        raise UserError(
            f"no site gave a usable answer to the survey: {'; '.join(f'{n}: {r}' for n, r in declined.items())}"
        )
    absent = [name for client, name in enumerate(sites.names) if client not in answers]
    return {"classes": list(contract.classes), "sites": described, "declined": declined, "absent": absent}


def read_description(answer: Reply | Failure, contract: Contract) -> dict[str, Any]:
    """Read a site's answer. Raise `Garbled` if there is none or if it does not have the expected form."""
    if isinstance(answer, Failure):
        raise Garbled(answer.reason)
    counts, columns, rules = (answer.facts.get(key) for key in ("label_counts", "columns", "rules"))
    if not isinstance(counts, list) or len(counts) != len(contract.classes) or not all(map(is_count, counts)):
        raise Garbled(f"it does not report label counts of {len(contract.classes)} classes")
    if not isinstance(columns, list) or not all(map(_is_column, columns)):
        raise Garbled("its description of the columns does not have the expected form")
    if not isinstance(rules, dict) or rules.keys() != {"hide_below", "round_to", "epsilon"}:
        raise Garbled("it does not say how it hides single samples")
    if not all(isinstance(value, int | float | None) for value in rules.values()):
        raise Garbled("it does not say how it hides single samples")
    return {"label_counts": counts, "columns": list(map(_with_plain_texts, columns)), "rules": rules}


def _is_column(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not _is_share(found.get("missing")):
        return False
    if found.get("kind") == "category":
        values = found.get("values")
        is_list = isinstance(values, list) and len(values) <= _MAX_VALUES and all(isinstance(v, str) for v in values)
        return is_list and found.keys() == {"name", "kind", "missing", "values"}
    summary = [found.get(key) for key in _SUMMARY]
    are_numbers = all(isinstance(value, int | float) and abs(value) <= sys.float_info.max for value in summary)
    has_form = are_numbers or summary == [None] * len(summary)
    return found.get("kind") == "number" and has_form and found.keys() == {"name", "kind", "missing", *_SUMMARY}


def _with_plain_texts(column: Facts) -> Facts:
    """Return a column with texts that are safe to print. A site's data may have long texts and special characters."""
    values = {"values": [one_line(value) for value in column["values"]]} if "values" in column else {}
    return {**column, "name": one_line(column["name"]), **values}


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def write_survey(folder: Path, survey: Facts) -> None:
    """Write the answers, and a table of the label counts with a row per site. A site with only zeros has no row."""
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["site", *survey["classes"]])
    counts = {name: found["label_counts"] for name, found in survey["sites"].items()}
    rows.writerows([name, *found] for name, found in counts.items() if any(found))
    write_file(folder / COUNTS, table.getvalue())
    write_file(folder / SURVEY, json.dumps(survey, indent=2) + "\n")
