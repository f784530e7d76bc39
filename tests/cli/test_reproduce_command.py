"""`fedskew reproduce` and `fedskew results`: what they list and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.lab.papers import listing


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_rate", lambda *_: 1000.0)


def test_the_list_has_every_paper_and_what_its_tables_cost(cli) -> None:
    out = cli("reproduce", "--list").out
    for said in ("fedlmd/table3: best accuracy and speed-up", "fedvls/table17", "pkd/table3", "--variant code"):
        assert said in out
    assert "local steps, about" in out


def test_a_tables_list_has_its_printed_numbers(cli) -> None:
    told = cli("reproduce", "fedlmd/table3", "--list", "--dataset", "cifar10", "--split", "dirichlet:0.05",
               "--methods", "fedavg,fedlmd", "--json").json  # fmt: skip
    assert [line["what"] for line in told] == ["cifar10 dirichlet:0.05 FedAvg", "cifar10 dirichlet:0.05 FedLMD"]
    assert told[0]["about"] == "best 33.02, speed-up 1"
    # 200 rounds, 5 epochs, 10 clients of 500 images in batches of 50
    assert told[0]["steps"] == 200 * 5 * 10
    assert told[0]["seconds"] == pytest.approx(200 * 5 * 10 * 500 / 1000)
    assert told[1]["seconds"] == pytest.approx(told[0]["seconds"] * 4 / 3)
    out = cli("reproduce", "fedlmd/table3", "--list", "--dataset", "cifar10", "--split", "dirichlet:0.05").out
    assert "cifar10 dirichlet:0.05 FedAvg: best 33.02, speed-up 1 [one run, 10,000 local steps, about" in out


def test_a_list_of_several_tables_keeps_to_what_is_wanted(cli) -> None:
    out = cli("reproduce", "--list", "fedlmd/table3", "pkd/table1", "fedvls/table5", "--dataset", "mnist").out
    assert "fedlmd/table3: best accuracy and speed-up, 44 cells [22 runs, " in out
    assert "pkd/table1: class-wise accuracy, 12 cells [4 runs, " in out
    assert "fedvls/table5" not in out
    assert "known flaw: The abstract's gaps, 36.9 and 45.4" in out


def test_a_plans_list_has_its_entries(cli) -> None:
    Path("plan.yaml").write_text("- {tables: fedlmd/table1, seeds: 3}\n- {tables: fedvls/table17, rounds: 4}\n")
    told = cli("reproduce", "--list", "--plan", "plan.yaml", "--json").json
    assert [line["what"] for line in told] == ["fedlmd/table1; 3 seeds", "fedvls/table17; rounds 4; one seed"]
    assert [line["runs"] for line in told] == [12, 4]


def test_a_model_that_several_updates_begin_with_is_trained_once(cli) -> None:
    (told,) = (line for line in cli("reproduce", "--list", "fedvls", "--json").json if "table12" in line["what"])
    an_epoch = 5000 / 64
    assert told["runs"] == 6 + 1
    assert told["steps"] == pytest.approx((100 + 6) * 10 * an_epoch)


def test_an_illegible_number_is_not_called_unpublished(cli) -> None:
    lines = cli("reproduce", "--list", "fedvls/table4", "--dataset", "cifar100", "--methods", "FedVLS", "--json").json
    (illegible,) = (line for line in lines if "lambda=0.1 " in line["what"] and "dirichlet:0.05" in line["what"])
    assert illegible["about"] == "the published number is illegible"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "no table given; expected one such as fedlmd/table3"),
        (("fedlmdd/table3",), "unknown paper 'fedlmdd'; did you mean 'fedlmd'"),
        (("fedlmd/tabel3",), "unknown table of fedlmd 'tabel3'; did you mean 'table3'"),
        (("fedlmd/table3", "--dataset", "cifar"), "unknown dataset of this table 'cifar'; did you mean 'cifar10'"),
        (("fedlmd/table3", "--methods", "fedlmdx"), "did you mean 'fedlmd'"),
        (("fedlmd/table3", "--variant", "cdoe"), "did you mean 'code'"),
        (("fedlmd/table3", "--seeds", "0"), "seeds is '0'; expected"),
        (("fedlmd/table3", "--set", "lr=2020-01-01"), "lr is '2020-01-01'; expected a finite number"),
        (("--list", "fedlmd/table3", "--set", "data=svhn"), "data is 'svhn'; costs can be estimated for mnist, "),
        (("--list", "--dataset", "cifar"), "unknown dataset of these tables 'cifar'; did you mean 'cifar10'"),
        (("--plan", "none.yaml"), "cannot read none.yaml"),
        (("--plan", "none.yaml", "--methods", "fedavg"), "a selection was given besides --plan; expected"),
    ],
)
def test_a_mistake_is_one_line(cli, arguments: tuple[str, ...], complaint: str) -> None:
    outcome = cli("reproduce", *arguments)
    assert outcome.status == 2
    assert complaint in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ("tables: fedlmd/table3\n", "expected a list of entries"),
        ("- {seeds: 3}\n", "entry 1: no tables; expected a mapping such as {tables: fedlmd/table3}"),
        ("- {tables: fedlmd/table3, datasets: cifar10}\n", "entry 1: unknown key 'datasets'; did you mean 'dataset'"),
        ("- fedlmd/table3\n", "entry 1: 'fedlmd/table3'; expected a mapping"),
        ("- {tables: fedlmd/table3, set: bf16}\n", "entry 1: set is 'bf16'; expected a mapping"),
        ("- {tables: fedlmd/table3, rounds: few}\n", "rounds is 'few'; expected a whole number"),
        ("- {tables: fedlmd/table3, variant: [code]}\n", "entry 1: variant is ['code']; expected the name of one"),
    ],
)
def test_a_plan_that_is_none_is_named(cli, plan: str, complaint: str) -> None:
    Path("plan.yaml").write_text(plan)
    outcome = cli("reproduce", "--plan", "plan.yaml")
    assert outcome.status == 2
    assert complaint in outcome.err


def test_a_folder_without_records_leaves_the_page_as_it_is(cli) -> None:
    Path("RESULTS.md").write_text("what was rerun")
    outcome = cli("results", "--results", "reslts")
    assert outcome.status == 2
    assert "no records in 'reslts'" in outcome.err
    assert Path("RESULTS.md").read_text() == "what was rerun"
