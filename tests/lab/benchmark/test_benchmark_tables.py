"""Medians, ratios and targets from given numbers, and the file that keeps them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedskew.errors import UserError
from fedskew.lab.benchmark.results import Failure, Measurement, Results, read_results
from fedskew.lab.benchmark.tables import markdown, tables
from fedskew.lab.benchmark.targets import rounds_rows, steps_rows, targets


def measured(contender: str, seconds: float | tuple[float, ...], **what: Any) -> Measurement:
    default_plan = {
        "level": "steps", "model": "cnn", "clients": 10, "federation": 10, "batch_size": 50, "method": "fedavg",
        "precision": "bf16", "sizes": "equal", "samples": 500, "memory": 2**30,
    }  # fmt: skip
    return Measurement(
        contender=contender, seconds=seconds if isinstance(seconds, tuple) else (seconds,), **{**default_plan, **what}
    )


def results(*measurements: Measurement, kind: str = "cuda") -> Results:
    machine = {"device": kind, "cpu": "a CPU", "gpu": "a GPU"}
    return Results(machine, {"torch": "2"}, "fedskew bench", "2026-11-15", list(measurements))


def said(made: Results) -> dict[str, tuple[float, bool]]:
    return {target.what: (round(target.value, 6), target.met) for target in targets(made)}


def test_median_and_spread() -> None:
    m = measured("stacked", (0.5, 1.0, 0.6))
    assert m.time == 0.6
    assert m.rate == pytest.approx(500 / 0.6)
    assert m.spread == pytest.approx(0.25 / 0.6)


def test_each_side_counts_in_its_fastest_format() -> None:
    [row] = steps_rows(
        [
            measured("stacked", 0.02, precision="tf32"),
            measured("stacked", 0.01),
            measured("loop", 0.4),
            measured("loop", 0.2, precision="float32"),
            measured("tuned loop", 0.16, precision="tf32"),
            measured("limit", 0.008),
            measured("limit", 0.009, precision="tf32"),
        ],
        "cuda",
    )
    assert (row.ours.precision, row.loop.contender, row.limit.precision) == ("bf16", "tuned loop", "bf16")
    assert row.over_loop == pytest.approx(16)
    assert dict(row.same_format) == {"tf32": pytest.approx(8), "bf16": pytest.approx(40)}
    assert row.share_of_limit == pytest.approx(0.8)


def test_on_a_cpu_auto_counts_against_the_loop_as_it_comes() -> None:
    [row] = steps_rows(
        [
            measured("plain", 0.5, asked="auto"),
            measured("stacked", 0.1, asked="stacked"),
            measured("loop", 1.0),
            measured("tuned loop", 0.1),
        ],
        "cpu",
    )
    assert row.over_loop == pytest.approx(2)
    assert row.same_format == (("bf16", pytest.approx(2)),)
    assert row.share_of_limit is None


def test_targets_of_steps() -> None:
    made = results(measured("stacked", 0.01), measured("loop", 0.16), measured("limit", 0.005))
    assert said(made) == {
        "cnn, 10 × 50: steps / loop": (16, True),
        "cnn, 10 × 50: steps / limit": (0.5, False),
    }
    assert said(results(measured("stacked", 0.01), measured("loop", 0.16), kind="cpu")) == {
        "cnn, 10 × 50: steps / loop": (16, True)
    }


def test_only_what_was_measured_on_both_sides_is_judged() -> None:
    assert said(results(measured("stacked", 0.01))) == {}
    assert said(results(measured("stacked", 0.01, clients=7), measured("loop", 0.16, clients=7))) == {}
    assert said(results(measured("stacked", 0.01, method="fedvls"), measured("loop", 0.16, method="fedvls"))) == {}


def test_targets_of_rounds() -> None:
    made = results(
        measured("bare steps", 0.01, level="rounds"),
        measured("stacked", 0.1, level="rounds", samples=4500),
        measured("stacked", 0.15, level="rounds", samples=4500, method="fedvls"),
        measured("stacked", 0.2, level="rounds", samples=4500, method="scaffold"),
        measured("stacked", 0.125, level="rounds", samples=4500, sizes="unequal"),
        measured("loop", 1.0, level="rounds", samples=4500),
    )
    assert said(made) == {
        "cnn, 10 × 50, bf16: whole round / bare steps": (0.9, True),
        "cnn, 10 × 50, bf16: time of FedVLS / FedAvg": (1.5, False),
        "cnn, 10 × 50, bf16: whole round of unequal clients / bare steps": (0.72, False),
    }
    fedavg, fedvls, scaffold, unequal = rounds_rows(made.measurements)
    assert (fedavg.over_loop, fedavg.time_over_fedavg) == (pytest.approx(10), None)
    assert (fedvls.over_loop, fedvls.share_of_bare_steps) == (None, None)
    assert scaffold.time_over_fedavg == pytest.approx(2)
    assert unequal.share_of_bare_steps == pytest.approx(0.72)


def test_rounds_are_compared_within_a_number_format() -> None:
    rows = rounds_rows(
        [
            measured("stacked", 0.1, level="rounds"),
            measured("stacked", 0.3, level="rounds", precision="float32"),
            measured("stacked", 0.6, level="rounds", precision="float32", method="fedvls"),
        ]
    )
    assert [row.time_over_fedavg for row in rows] == [None, None, pytest.approx(2)]


def test_targets_of_growth() -> None:
    sizes = [
        measured("stacked", seconds, level="federation", federation=size, memory=memory)
        for size, seconds, memory in ((1000, 1.05, 100), (100, 1.0, 100), (100_000, 1.2, 105))
    ]
    numbers = [
        measured("stacked", seconds, level="participants", federation=500, clients=clients)
        for clients, seconds in ((10, 1.0), (100, 2.0), (500, 10.5))
    ]
    assert said(results(*sizes, *numbers)) == {
        "100 to 100,000 clients: change in time per round": (0.2, False),
        "100 to 100,000 clients: change in memory": (0.05, True),
        "100 to 500 participants: ratio of times per participant": (1.05, True),
    }


def whole() -> Results:
    made = results(
        measured("stacked", (0.01, 0.012)),
        measured("loop", 0.16),
        measured("limit", 0.005),
        measured("stacked", 0.1, level="rounds", method="fedvls", asked="auto"),
        measured("stacked", 0.1, level="federation", federation=1000, memory=None),
        measured("stacked", 0.1, level="participants"),
    )
    made.failures.append(Failure("limit: resnet18", "out of memory"))
    made.notices.append("stacked: in chunks of 40")
    made.left_out.append("steps of scaffold on dnn, 10 clients")
    return made


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(whole().to_json()))
    again = read_results(str(file))
    assert again == whole()
    assert markdown(again) == markdown(whole())


def test_the_page_has_every_table_and_what_is_missing() -> None:
    page = markdown(whole())
    assert page.startswith("# Benchmark on a GPU\n")
    assert "`fedskew bench`, 2026-11-15" in page
    assert page.count("## ") == 7
    assert "| cnn 10 × 50 | fedavg | 45,455 bf16 | 3,125 bf16 | 100,000 bf16 | 14.55 | bf16 14.55 | 0.45 |" in page
    assert "| cnn, 10 × 50: steps / loop | ≥ 15.00 | 14.55 | missed |" in page
    assert "- not measured: limit: resnet18: out of memory" in page
    assert "- stacked: in chunks of 40" in page
    assert "- not measured: steps of scaffold on dnn, 10 clients: time was up" in page


def test_every_row_of_a_table_has_all_columns() -> None:
    for table in tables(whole()):
        assert {len(row) for row in table.rows} == {len(table.headings)}
        assert table.rich().row_count == len(table.rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.pop("format"), "not a benchmark"),
        (lambda value: value.pop("machine"), "damaged"),
        (lambda value: value["measurements"][0].pop("samples"), "damaged"),
        (lambda value: value["measurements"][0].update(seconds=[]), "damaged"),
        (lambda value: value["measurements"][0].update(seconds=[0.0]), "damaged"),
        (lambda value: value["measurements"][0].update(level="nothing"), "damaged"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(change: Any, message: str, tmp_path: Path) -> None:
    value = whole().to_json()
    change(value)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(value))
    with pytest.raises(UserError, match=message):
        read_results(str(file))


def _our_files() -> list[Path]:
    folder = Path(__file__).parents[3] / "benchmarks"
    return [path for path in sorted(folder.glob("*.json")) if "measurements" in json.loads(path.read_text("utf-8"))]


@pytest.mark.parametrize("path", _our_files(), ids=lambda path: path.stem)
def test_our_tables_are_those_of_the_measurements(path: Path) -> None:
    """`fedskew bench --render benchmarks/NAME.json` prints benchmarks/NAME.md."""
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert page.strip() == markdown(read_results(path)).strip()


def test_the_page_of_targets_has_the_figures_of_those_that_were_missed() -> None:
    folder = Path(__file__).parents[3] / "benchmarks"
    page = (
        (folder / "README.md").read_text(encoding="utf-8").partition("## Targets on one H200")[2].partition("\n## ")[0]
    )
    shown = [number for line in page.splitlines() if line.startswith("| ") for number in _numbers(line.split(" | ")[2])]
    # The single runs in the table of the comparison and the sweep were measured again later.
    names = set(re.findall(r"\]\((h200-[\w-]+)\.md\)", page)) - {"h200-compare-and-sweep"}
    missed = [t for name in names for t in targets(read_results(folder / f"{name}.json")) if not t.met]
    assert len(missed) >= 9
    for target in missed:
        assert any(round(target.value, len(n.partition(".")[2])) == float(n) for n in shown if "." in n), target


def _numbers(cell: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", cell)
