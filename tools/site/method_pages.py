"""One page per method, from the catalogue and from the reruns that ship with fedskew."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from statistics import fmean

from fedskew.lab.diagnosis.reruns import Rerun, shipped_reruns
from fedskew.methods import METHODS, make_method
from fedskew.methods.catalogue import UPDATES_REVEAL, Entry
from fedskew.methods.method_list import needs


def method_pages() -> dict[str, str]:
    pages = {f"methods/{entry.name}.md": _method_page(entry) for _, entry in sorted(METHODS.items())}
    return {"methods/index.md": _index(), **pages}


def escape(text: str) -> str:
    """Keep Markdown from reading formulas and names as markup. Code in backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]|])", r"\\\1", part) for part in parts)


def _index() -> str:
    rows = [
        f"| [{entry.name}]({entry.name}.md) | {escape(entry.summary)} | {escape(entry.paper)} "
        f"| {escape(entry.revealed)} | {escape(entry.extra_compute)} | {_short_evidence(entry.name)} |"
        for _, entry in sorted(METHODS.items())
    ]
    return "\n".join(
        [
            "# Methods",
            "",
            "Every method of the catalogue, and what it reveals about labels besides updates. The last column counts "
            "the reruns in which the method ended above FedAvg. Combine methods with `+` "
            "([combinations](../combinations.md)).",
            "",
            "| method | what it does | paper | reveals | extra compute | above FedAvg |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"{UPDATES_REVEAL}.",
            "",
        ]
    )


def _method_page(entry: Entry) -> str:
    names = ", ".join(f"`{name}`" for name in (entry.name, *entry.aliases))
    facts = {
        "names": names,
        "parts": ", ".join(entry.kinds) or "none",
        "paper": escape(entry.paper) or "none",
        "needs": needs(entry),
        "leaves the client": escape(entry.sends),
        "reveals about labels": escape(entry.revealed),
        "extra compute": escape(entry.extra_compute),
        "secure aggregation": "yes"
        if entry.secure_aggregation
        else f"no: it {escape(entry.individual_updates_reason)}",
    }
    return "\n".join(
        [
            f"# {entry.name}",
            "",
            _prose(entry.document),
            "",
            "| | about the method |",
            "|---|---|",
            *(f"| **{name}** | {value} |" for name, value in facts.items()),
            "",
            *([f"{UPDATES_REVEAL}.", ""] if entry.sends_updates else []),
            "## Settings",
            "",
            *_settings(entry),
            "",
            "## Where it helped in our reruns",
            "",
            *_evidence(entry.name),
            "",
            "## Try it",
            "",
            "```bash",
            f"fedskew compare --methods fedavg,{entry.name}"
            if entry.name != "fedavg"
            else "fedskew run --method fedavg",
            f"fedskew methods {entry.name}",
            "```",
            "",
        ]
    )


def _prose(document: str) -> str:
    """A docstring as Markdown. Indented formulas are code blocks, and paths of documents are links."""
    lines = []
    for line in document.splitlines():
        if line.startswith("    "):
            lines.append(line)
        else:
            linked = re.sub(r"docs/([\w-]+)\.md", lambda found: f"LINK({found[1]})", line)
            line = re.sub(r"LINK\(([\w-]+)\)", r"[\1](../\1.md)", escape(linked))
            lines.append(f"{line}  " if line.startswith("Sent to the server") else line)
    return "\n".join(lines)


def _settings(entry: Entry) -> list[str]:
    params = make_method(entry.name).params
    if not params:
        return ["The method has no settings."]
    notes = {name: note for part in entry.parts for cls in reversed(part.__mro__) for name, note in _notes(cls).items()}
    rows = [f"| `{name}` | `{_default(value)}` | {escape(notes.get(name, ''))} |" for name, value in params.items()]
    return ["Set them with `--set method.NAME=VALUE`.", "", "| setting | default | meaning |", "|---|---|---|", *rows]


def _default(value: object) -> str:
    return "none" if value in (None, ()) else str(value)


def _notes(cls: type) -> dict[str, str]:
    """The strings below a class's fields."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return {}
    statements = getattr(body, "body", [])
    return {
        field.target.id: " ".join(ast.literal_eval(note.value).split())
        for field, note in pairwise(statements)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(note, ast.Expr)
        and isinstance(note.value, ast.Constant)
        and isinstance(note.value.value, str)
    }


# -- evidence ----------------------------------------------------------------------------------------------


def _reruns(method: str) -> list[Rerun]:
    found = [rerun for rerun in shipped_reruns() if rerun.method == method]
    return sorted(found, key=lambda rerun: -fmean(rerun.gains))


def _short_evidence(method: str) -> str:
    reruns = _reruns(method)
    return f"{_helped(reruns)} of {len(reruns)}" if reruns else "not rerun"


def _helped(reruns: list[Rerun]) -> int:
    return sum(fmean(rerun.gains) > 0 for rerun in reruns)


def _evidence(method: str) -> list[str]:
    if method == "fedavg":
        return ["FedAvg is the baseline of all reruns. Each method's page has its gain over FedAvg."]
    reruns = _reruns(method)
    if not reruns:
        return ["fedskew has not yet rerun a published setting with this method. Measure it on your federation."]
    rows = [
        f"| {rerun.setting.dataset} | {_split(rerun)} | {rerun.setting.per_round or 'all'} of {rerun.setting.clients} "
        f"| {rerun.protocol} | {len(rerun.accuracy)} | {fmean(rerun.fedavg):.1f} | {fmean(rerun.accuracy):.1f} "
        f"| {_signed(fmean(rerun.gains))} |"
        for rerun in reruns
    ]
    return [
        f"It ended above FedAvg in {_helped(reruns)} of {len(reruns)} reruns. Accuracy in percent is the mean of the "
        "last rounds and of the seeds, and the gain is in points. With one seed, a gain of a point means nothing. "
        "[All results](../results.md).",
        "",
        "| data | split | clients per round | protocol | seeds | FedAvg | " + method + " | gain |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def _split(rerun: Rerun) -> str:
    return " ".join([rerun.setting.rule, *(f"{name} {value}" for name, value in rerun.setting.params)])


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")
