"""The protocols and the published numbers agree with each other, and every cell is a run that can be prepared."""

from __future__ import annotations

import csv
from collections import defaultdict

import pytest

from fedskew.data import DATASETS
from fedskew.errors import UserError
from fedskew.experiment.preparation import partition_rule
from fedskew.lab.papers.cells import CellChoice, make_job, paper_rounds, select_cells, table_cells, why_not_runnable
from fedskew.lab.papers.measures import MEASURES
from fedskew.lab.papers.protocol import PUBLISHED, numbers, papers, read_protocol
from fedskew.lab.papers.selection import all_tables, plan_jobs, read_plan
from fedskew.methods import METHODS, make_method
from fedskew.models import MODELS

TABLES = all_tables()
IDS = [f"{paper}-{table}" for paper, table in TABLES]
SETTINGS_OF_FEDLMD = {
    "FedCurv": {"lambda": "curvature_weight"},
    "FedProx": {"mu": "mu"},
    "MOON": {"mu": "mu", "tau": "temperature"},
    "FedRS": {"alpha": "alpha"},
    "FedNTD": {"beta": "beta", "tau": "temperature"},
    "FedLMD": {"beta": "beta", "tau": "temperature"},
}
SETTINGS_OF_FEDVLS = {
    "FedProx": {"mu": "mu"},
    "MOON": {"mu": "mu", "tau": "temperature"},
    "FedExP": {"epsilon": "epsilon"},
    "FedLC": {"tau": "tau"},
    "FedRS": {"alpha": "alpha"},
    "FedSAM": {"rho": "rho"},
    "FedNTD": {"beta": "beta"},
    "FedLMD": {"beta": "beta"},
    "FedGF": {"rho": "rho"},
    "FedVLS": {"lambda": "distill_weight"},
}


@pytest.mark.parametrize(("paper", "table"), TABLES, ids=IDS)
@pytest.mark.parametrize("with_variants", [False, True], ids=["as-printed", "variants"])
def test_every_cell_is_a_run(paper: str, table: str, with_variants: bool) -> None:
    for variant in read_protocol(paper).variants if with_variants else [None]:
        for cell in {(*c.setting, c.method): c for c in table_cells(paper, table)}.values():
            assert why_not_runnable(cell) is None, cell
            made = make_job(cell, 0, CellChoice(variant=variant))
            config = made.config
            make_method(config.method, config.method_params)
            partition_rule(config)
            assert config.data in DATASETS
            assert config.model in MODELS
            assert paper_rounds(cell, read_protocol(paper)) <= (made.start or config).rounds


@pytest.mark.parametrize("paper", papers())
def test_no_published_number_is_forgotten(paper: str) -> None:
    """But for settings."""
    protocol = read_protocol(paper)
    reached = {
        (cell.table, *cell.column, cell.method) for table in protocol.tables for cell in table_cells(paper, table)
    }
    for number in numbers(paper):
        if number.hyperparameter is None:
            key = (number.table, number.dataset, number.split, number.condition, number.metric, number.method)
            assert key in reached, number
            assert number.metric in MEASURES


@pytest.mark.parametrize("paper", papers())
def test_a_protocol_names_what_it_has(paper: str) -> None:
    protocol = read_protocol(paper)
    for variant in protocol.variants.values():
        assert set(variant) <= {"why", "settings", "datasets", "methods", "conditions"}
        assert set(variant.get("methods", {})) <= set(protocol.methods)
        assert set(variant.get("datasets", {})) <= set(protocol.datasets)
    for spec in protocol.tables.values():
        assert set(spec.also) | set(spec.methods) <= set(protocol.methods)
        assert set(spec.metrics) <= set(MEASURES)
    for entry in protocol.methods.values():
        assert all(part in METHODS for part in entry["method"].split("+")), entry


def _params(paper: str, table: str, dataset: str, split: str, method: str) -> dict[str, object]:
    cells = [c for c in table_cells(paper, table) if (c.dataset, c.split, c.method) == (dataset, split, method)]
    config = make_job(cells[0], 0, CellChoice()).config
    return dict(make_method(config.method, config.method_params).params)


def test_hyper_parameters_are_those_of_fedlmds_table_6() -> None:
    checked = 0
    for number in numbers("fedlmd"):
        name = SETTINGS_OF_FEDLMD.get(number.method, {}).get(number.hyperparameter or "")
        if name is not None:
            params = _params("fedlmd", "table3", number.dataset, number.split, number.method)
            assert params[name] == number.mean, number
            checked += 1
    assert checked == 126


def test_hyper_parameters_are_those_of_fedvls_table_10() -> None:
    checked = 0
    for number in numbers("fedvls"):
        name = SETTINGS_OF_FEDVLS.get(number.method, {}).get(number.hyperparameter or "")
        if name is not None:
            for dataset in read_protocol("fedvls").datasets if number.dataset == "all" else number.dataset.split("|"):
                if dataset not in ("ag_news", "digits-domains"):
                    params = _params("fedvls", "table1", dataset, "dirichlet:0.1", number.method)
                    assert params[name] == number.mean, number
                    checked += 1
    assert checked == 44


def test_the_preprint_and_the_paper_print_the_same_numbers() -> None:
    def of(paper: str, table: str) -> dict[tuple[str, ...], float | None]:
        rename = {"FedED": "FedVLS"}
        return {
            (n.dataset, n.split, n.condition, rename.get(n.method, n.method)): n.mean
            for n in numbers(paper)
            if n.table == table
        }

    for preprint, paper in (("table1", "table1"), ("table2", "table2"), ("table3", "table3"), ("table4", "table16")):
        before, after = of("feded", preprint), of("fedvls", paper)
        assert before
        assert {key: after[key] for key in before} == before


def test_printed_means_of_classes_are_the_means() -> None:
    classes: dict[str, list[float]] = defaultdict(list)
    means = {}
    for number in numbers("fedvls"):
        if number.table == "table12" and number.mean is not None:
            if number.metric == "after update, mean class":
                means[number.method] = number.mean
            else:
                classes[number.method].append(number.mean)
    assert len(means) == 7
    for method, mean in means.items():
        assert len(classes[method]) == 10
        assert sum(classes[method]) / 10 == pytest.approx(mean, abs=0.006)


def test_the_partition_of_table_7_uses_every_image() -> None:
    rows = list(csv.reader((PUBLISHED / "fedvls-table7-counts.csv").read_text().splitlines()))[1:]
    counts = [[int(cell) for cell in row[1:]] for row in rows]
    assert len(counts) == 10
    assert [sum(column) for column in zip(*counts, strict=True)] == [5000] * 10


def test_budgets_are_read_off_one_run() -> None:
    cells = [c for c in table_cells("fedvls", "table16") if c.split == "dirichlet:0.1" and c.method == "FedAvg"]
    assert sorted(c.budget or 0 for c in cells) == [40, 60, 80]
    assert len({make_job(cell, 0, CellChoice()).identity for cell in cells}) == 1
    assert {make_job(cell, 0, CellChoice()).config.rounds for cell in cells} == {80}


def test_a_conditions_value_wins_over_the_methods_own() -> None:
    sweep = [c for c in table_cells("fedvls", "table4") if c.dataset == "cifar10"]
    weights = [make_job(cell, 0, CellChoice()).config.method_params["distill_weight"] for cell in sweep]
    assert weights == [0.05, 0.1, 0.25, 0.5, 1]


def test_a_variant_changes_what_it_says() -> None:
    (cell,) = (c for c in table_cells("fedvls", "table1") if (c.dataset, c.split, c.method)
               == ("mnist", "dirichlet:0.1", "FedVLS"))  # fmt: skip
    usual, code = (make_job(cell, 0, CellChoice(variant=variant)).config for variant in (None, "code"))
    assert (usual.weight_decay, code.weight_decay) == (1e-5, 0)
    assert code.data_params == {"test_fraction": 0.25}
    assert code.partition.params["min_size"] == 256
    with pytest.raises(UserError, match=r"unknown variant of fedvls 'cod'; did you mean 'code'"):
        make_job(cell, 0, CellChoice(variant="cod"))


def test_the_quantity_split_has_the_programs_range_for_each_dataset() -> None:
    """Half of a class at most, but for CIFAR-10 (docs/fidelity.md)."""
    cells = {cell.dataset: cell for cell in table_cells("fedvls", "table2")}
    ranges = {
        name: make_job(cell, 0, CellChoice()).config.partition.params.get("upper") for name, cell in cells.items()
    }
    assert ranges == {"cifar10": None, "cifar100": 0.5, "tiny-imagenet": 0.5}


def test_fedgrs_program_weighs_the_clients_of_two_methods_alone() -> None:
    cells = {cell.method: cell for cell in table_cells("fedgr", "table3")}
    configs = {name: make_job(cell, 0, CellChoice(variant="code")).config for name, cell in cells.items()}
    assert {name for name, config in configs.items() if config.average == "samples"} == {"FedRS", "FedGR"}
    assert configs["FedGR"].method_params["vacant"] == "code"
    assert make_method("moon", configs["MOON"].method_params).params["mu"] == 1e-4
    assert {config.local_epochs for config in configs.values()} == {4}


def test_fedgrs_fedopt_steps_by_a_tenth_of_its_momentum() -> None:
    (cell, *_) = (cell for cell in table_cells("fedgr", "table3") if cell.method == "FedOpt")
    config = make_job(cell, 0, CellChoice()).config
    assert make_method(config.method, config.method_params).params == {"server_momentum": 0.9, "server_lr": 0.1}


def test_cells_are_chosen_by_what_users_call_things() -> None:
    cells = table_cells("fedlmd", "table3")
    few = select_cells(cells, CellChoice(("cifar10",), ("dirichlet:0.05",), (), ("fedavg", "FedNTD", "fedlmd")))
    assert {cell.method for cell in few} == {"FedAvg", "FedNTD", "FedLMD"}
    assert {cell.metric for cell in few} == {"best", "speed-up"}
    for wrong, complaint in (
        (CellChoice(("cifar",)), "unknown dataset of this table 'cifar'; did you mean 'cifar10'"),
        (CellChoice((), ("dirichlet:0.2",)), "unknown split of this table"),
        (CellChoice((), (), (), ("fedlmdd",)), "did you mean 'fedlmd'"),
        (CellChoice(("cifar100",), ("dirichlet:0.05",)), "no cell combines the selected datasets, splits"),
    ):
        with pytest.raises(UserError, match=complaint):
            select_cells(cells, wrong)
    with pytest.raises(UserError, match=r"unknown table of fedlmd 'table33'; did you mean 'table3'"):
        table_cells("fedlmd", "table33")


@pytest.mark.parametrize("name", ["plan-headline.yaml", "plan-mnist-fashion.yaml", "plan-cifar10.yaml"])
def test_the_plans_of_our_own_reruns_hold(name: str, request: pytest.FixtureRequest) -> None:
    path = request.config.rootpath / "results" / name
    jobs = plan_jobs(read_plan(path, {"precision": "bf16"}))
    assert len({one.identity for one in jobs}) == len(jobs) > 200
    assert {one.config.precision for one in jobs} == {"bf16"}
