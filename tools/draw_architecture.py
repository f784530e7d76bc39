"""Draw docs/images/architecture.svg: the packages of fedskew, and the steps of a round.

python tools/draw_architecture.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "architecture.svg"

PACKAGES = [
    [("cli", "one thin module per command")],
    [("lab", "instruments: sweep, papers, benchmark, diagnosis")],
    [("choose", "races methods on a federation")],
    [("report", "page, figures"), ("live", ""), ("tracking", ""), ("export", ""), ("flower", "sites")],
    [("results", "what was recorded, for all that read it")],
    [("experiment", "a run: config, loop, round, storage")],
    [("engine", "trains clients: plain, stacked, parallel, kernels")],
    [("methods", "one file per method"), ("losses", "terms of the papers")],
    [("data", "datasets, partitions"), ("models", "architectures"), ("metrics", "from predictions")],
]
"""Rows of packages with a few words each. A row imports from the rows below it, never from those above."""

ROUND = [
    (
        "plan",
        "experiment/round/plan.py",
        "who takes part and what each client receives",
        "sampler.py; the method's downlink",
    ),
    (
        "train",
        "engine/contract.py",
        "the clients' models, and what they send besides",
        "an engine; the method's loss, term and direction",
    ),
    (
        "aggregate",
        "experiment/round/aggregate.py",
        "the next model; updates that are not finite are left out",
        "the method's server rule",
    ),
    (
        "evaluate",
        "experiment/round/evaluate.py",
        "numbers on the test set, every N rounds",
        "engine/evaluation.py; metrics",
    ),
    (
        "record",
        "experiment/round/record.py",
        "a RoundRow: all that is known about the round",
        "the method's own counts and notes",
    ),
    (
        "checkpoint",
        "experiment/recorder.py",
        "rounds.jsonl and a state from which the run resumes",
        "storage/run_folder.py; callbacks may stop the run",
    ),
]
"""The steps of a round: name, module, what comes out, and what the step calls."""

WIDTH, TOP, ROW, GAP = 1120, 64, 58, 10
LEFT, LEFT_WIDTH = 52, 470
RIGHT, RIGHT_WIDTH = 580, 490
STEP = 72
INK, FAINT, LINE, PAPER = "#1f2933", "#5b6770", "#9aa5b1", "#ffffff"
FILLS = {"experiment": "#d6e8fa", "engine": "#dcefdc", "methods": "#fbe7cd", "losses": "#fbe7cd"}
STEP_FILLS = {"train": FILLS["engine"]}


def text(x: float, y: float, words: str, size: int = 13, colour: str = INK, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" {extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    return f'{shape} fill="{fill}" stroke="{LINE}"/>'


def arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="1.6" marker-end="url(#head)"/>'


def packages() -> list[str]:
    """The left half: packages in layers."""
    drawn = [text(LEFT, 40, "The packages: imports point down", 16, extra='font-weight="bold"')]
    for row, names in enumerate(PACKAGES):
        y = TOP + row * (ROW + GAP)
        shares = [max(len(name) * 1.4, len(words)) + 3 for name, words in names]
        x = float(LEFT)
        for (name, words), share in zip(names, shares, strict=True):
            width = (LEFT_WIDTH - GAP * (len(names) - 1)) * share / sum(shares)
            drawn.append(box(x, y, width, ROW, FILLS.get(name, "#eef1f4")))
            drawn.append(text(x + 10, y + (24 if words else 34), name, 15, extra='font-weight="bold"'))
            drawn.append(text(x + 10, y + 44, words, 12, FAINT))
            x += width + GAP
    bottom = TOP + len(PACKAGES) * (ROW + GAP) - GAP
    return [*drawn, arrow(f"M {LEFT - 20} {TOP + 4} V {bottom - 4}")]


def way_of_a_round() -> list[str]:
    """The right half: the steps of experiment/loop.py, and the way back to the first."""
    drawn = [text(RIGHT, 40, "A round: fedskew/experiment/loop.py", 16, extra='font-weight="bold"')]
    for number, (name, module, result, calls) in enumerate(ROUND):
        y = TOP + number * (STEP + 18)
        drawn.append(box(RIGHT, y, RIGHT_WIDTH, STEP, STEP_FILLS.get(name, FILLS["experiment"])))
        drawn.append(text(RIGHT + 12, y + 23, name, 15, extra='font-weight="bold"'))
        drawn.append(text(RIGHT + 124, y + 23, module, 13, extra='font-family="monospace"'))
        drawn.append(text(RIGHT + 124, y + 43, f"→ {result}", 12))
        drawn.append(text(RIGHT + 124, y + 61, f"calls {calls}", 12, FAINT))
        if number:
            drawn.append(arrow(f"M {RIGHT + 50} {y - 18} V {y - 3}"))
    bottom = TOP + (len(ROUND) - 1) * (STEP + 18) + STEP / 2
    side = RIGHT + RIGHT_WIDTH
    return [*drawn, arrow(f"M {side} {bottom:g} H {side + 26} V {TOP + STEP / 2:g} H {side + 4}")]


def picture() -> str:
    """The whole drawing as SVG."""
    height = TOP + max(len(PACKAGES) * (ROW + GAP), len(ROUND) * (STEP + 18)) + 16
    head = f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker>'  # noqa: E501
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            "<title>The packages of fedskew, and the steps of a round</title>",
            f"<defs>{head}</defs>",
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>',
            *packages(),
            *way_of_a_round(),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
