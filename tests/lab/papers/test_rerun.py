"""Paper and rerun side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fedskew.experiment.config import Config
from fedskew.lab.papers.cells import Cell, CellChoice, make_job, table_cells
from fedskew.lab.papers.protocol import PrintedNumber
from fedskew.lab.papers.rerun import CellRerun, collect_rerun, compare_order, rerun_json, rich_table, row, title
from fedskew.lab.sweep.records import Record, Records


def again(method: str, printed: float | None, *values: float, metric: str = "best", rounds: int = 200) -> CellRerun:
    number = PrintedNumber("table3", "cifar10", "dirichlet:0.05", "", method, metric, printed, None, "")
    cell = Cell("fedlmd", "table3", "cifar10", "dirichlet:0.05", "", method, metric, number)
    return CellRerun(cell, values, tuple(record(rounds, rounds) for _ in values), 200)


def record(wanted: int, done: int, **more: int) -> Record:
    return Record({"rounds": [0, done], "config": Config(rounds=wanted).to_mapping(), **more})


def test_an_update_of_a_model_that_was_trained_less_is_shortened() -> None:
    one = again("FedAvg", 33.02, 44.0, rounds=1)
    trained = CellRerun(one.cell, one.values, (record(1, 1, start_rounds=40),), 200)
    assert trained.shortened == 40
    assert CellRerun(one.cell, one.values, (record(1, 1, start_rounds=200),), 200).shortened is None


def test_a_run_that_was_stopped_is_shown_and_compared_with_nothing() -> None:
    full = [again("a", 30, 40), again("b", 50, 60)]
    one = again("c", 90, 10)
    stopped = CellRerun(one.cell, one.values, (record(200, 21),), 200)
    assert row(stopped)[2:4] == ("10.00 (stopped after 21 of 200 rounds)", "")
    told = compare_order([*full, stopped])
    assert told is not None
    assert told.pairs == 1
    assert told.holds


def test_what_was_never_reached_is_not_what_nobody_ran() -> None:
    one = again("FedGR", 300, metric="rounds to FedAvg")
    assert row(one)[2:] == ("–", "", "0")
    assert row(replace(one, never=2))[2:] == ("never", "", "2")
    some = replace(again("FedGR", 300, 200.0, metric="rounds to FedAvg"), never=2)
    assert row(some)[2:] == ("200.00 (2 of 3 never)", "", "3"), "the lucky seeds are not the paper's mean"
    assert compare_order([some, again("FedLC", 400, 300.0, metric="rounds to FedAvg")]) is None


@pytest.mark.parametrize(
    ("fedavg", "fedgr", "shown"),
    [
        (range(11), [0.0] * 11, "never (10 of 1000 rounds)"),
        (range(11), [0.0] * 6, "–"),
        (range(6), [*range(6), *[5] * 995], "5.00 (5 of 1000 rounds)"),
    ],
)
def test_rounds_to_fedavg_know_how_far_both_runs_went(fedavg: list[float], fedgr: list[float], shown: str) -> None:
    """A run that ended before FedAvg's might have got there; where FedAvg's was short, so was the way."""
    cells = {cell.method: cell for cell in table_cells("fedgr", "table4") if cell.metric == "rounds to FedAvg"}
    done = Records(curve(cells[method], values) for method, values in (("FedAvg", fedavg), ("FedGR", fedgr)))
    told = collect_rerun(cells["FedGR"], [0], done, CellChoice())
    assert row(told)[2] == shown
    assert told.difference is None


def curve(cell: Cell, accuracy: Sequence[float]) -> Record:
    one = make_job(cell, 0, CellChoice(values={"rounds": len(accuracy) - 1}))
    return Record({
        "experiment": one.identity, "config": one.config.to_mapping(), "accuracy": accuracy,
        "rounds": list(range(len(accuracy))),
    })  # fmt: skip


def test_rounds_to_what_fedavg_had_after_fewer_are_not_compared_with_the_papers() -> None:
    for metric, difference in (("rounds to FedAvg", None), ("best", -100.0)):
        assert again("FedGR", 300, 200.0, metric=metric, rounds=40).difference == difference
    assert again("FedGR", 300, 200.0, metric="rounds to FedAvg").difference == -100.0


def test_only_runs_of_equally_many_rounds_are_ranked() -> None:
    shorter = [again(name, printed, value, rounds=40) for name, printed, value in (("a", 1, 1), ("b", 2, 2))]
    told = compare_order([*shorter, again("c", 3, 0)])
    assert told is not None
    assert told.pairs == 1


def test_an_order_holds_if_every_pair_does() -> None:
    told = compare_order([again("a", 30, 40), again("b", 50, 60), again("c", 40, 50)])
    assert told is not None
    assert told.holds
    assert str(told) == "3 of 3 pairs in the paper's order, the same best"


def test_an_order_that_does_not_hold_names_the_best() -> None:
    told = compare_order([again("a", 30, 70), again("b", 50, 60), again("c", 40, 50), again("d", None, 99)])
    assert told is not None
    assert not told.holds
    assert str(told) == "1 of 3 pairs in the paper's order, best is a, not b"


def test_less_may_be_better() -> None:
    told = compare_order([again("a", 3, 4, metric="drift diversity"), again("b", 5, 6, metric="drift diversity")])
    assert told is not None
    assert told.best_printed == told.best_rerun == "a"


def test_one_method_has_no_order() -> None:
    assert compare_order([again("a", 3, 4), again("b", 3)]) is None


def test_a_row_tells_mean_difference_and_what_was_shortened() -> None:
    assert row(again("FedAvg", 33.02, 44.0, 46.0)) == ("FedAvg", "33.02", "45.00 ± 1.00", "+11.98", "2")
    assert row(again("FedAvg", 33.02, 44.0, rounds=40))[2] == "44.00 (40 of 200 rounds)"
    assert row(again("FedNova", None))[1:] == ("illegible", "–", "", "0")
    assert title([again("FedAvg", 33.02)]) == "fedlmd/table3: cifar10 dirichlet:0.05, best (%)"
    assert rerun_json(again("FedAvg", 33.02, 44.0))["difference"] == 44.0 - 33.02


def test_a_table_says_which_deviation_it_shows() -> None:
    assert "± population standard deviation over the seeds" in str(
        rich_table([again("FedAvg", 33.02, 44.0, 46.0)]).caption
    )
    assert rich_table([again("FedAvg", 33.02, 44.0)]).caption is None


def test_a_tie_for_the_best_is_said() -> None:
    in_paper = compare_order([again("a", 50, 40), again("b", 50, 60), again("c", 30, 20)])
    assert str(in_paper) == "3 of 3 pairs in the paper's order, the same best"
    in_rerun = compare_order([again("a", 40, 60), again("b", 50, 60), again("c", 30, 20)])
    assert str(in_rerun) == "2 of 3 pairs in the paper's order, a ties with the paper's best, b"


def test_a_seed_that_is_set_is_the_first_of_several() -> None:
    cells = {table: table_cells("fedvls", table)[0] for table in ("table1", "table12")}
    for cell in cells.values():
        jobs = [make_job(cell, seed, CellChoice(values={"seed": 5})) for seed in range(2)]
        assert [job.config.seed for job in jobs] == [5, 6]
        assert [job.start.seed for job in jobs if job.start is not None] in ([], [5, 6])
        assert [job.label[-6:] for job in jobs] == ["seed 5", "seed 6"]
    assert make_job(cells["table12"], 0, CellChoice()).start is not None
