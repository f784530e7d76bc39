"""`fedskew compare`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from method_cases import KINDS, slow

from fedskew.methods import METHODS

TINY = (
    "compare",
    "--rounds",
    "2",
    "--clients",
    "6",
    "--clients-per-round",
    "2",
    "--local-epochs",
    "1",
    "--beta",
    "0.5",
)


def test_all_methods_meet_the_same_federations(cli):
    told = cli(*TINY, "--methods", "fedavg,fedprox+fedavgm", "--seeds", "2", "--set", "method.mu=0", "--set",
               "method.server_momentum=0", "--json").json  # fmt: skip
    fedavg, other = told["methods"]
    assert other["method"] == "fedprox+fedavgm (mu=0.0, server_momentum=0.0)"
    assert fedavg["seeds"] == other["seeds"] == [0, 1]
    assert fedavg["class_accuracy"] == pytest.approx(other["class_accuracy"])
    assert fedavg["params"] == {}
    assert other["params"] == {"mu": 0.0, "server_momentum": 0.0, "server_lr": 1.0}


@pytest.mark.parametrize(
    ("methods", "expected"),
    [(",".join(KINDS.values()), list(KINDS.values())), *slow(("all", sorted(set(METHODS) - {"fedbn", "fedlaw"})))],
    ids=["one of each kind", "all"],  # FedBN needs BatchNorm, and FedLAW samples at the server
)
def test_every_method_runs_and_none_complains(methods, expected, cli):
    outcome = cli(*TINY, "--methods", methods, "--lr", "0.02", "--json")
    assert outcome.status == 0
    assert [method["method"] for method in outcome.json["methods"]] == expected
    assert "warning" not in outcome.err.lower()
    assert "cannot" not in outcome.err


def test_all_leaves_out_what_does_not_fit_and_says_why(cli, monkeypatch):
    monkeypatch.setattr("fedskew.methods.METHODS", {name: METHODS[name] for name in ("fedavg", "fedbn", "fedlaw")})
    outcome = cli(*TINY, "--methods", "all", "--json")
    assert outcome.status == 0
    assert [method["method"] for method in outcome.json["methods"]] == ["fedavg"]
    assert "fedbn is left out: FedBN keeps BatchNorm layers on the clients, but the model has none" in outcome.err
    assert "fedlaw is left out: method 'fedlaw' needs samples at the server" in outcome.err
    assert cli(*TINY, "--methods", "fedavg,fedbn").status == 2, "a method that is listed by name must fit"


def test_the_table_is_in_the_order_given_and_marks_the_best(cli):
    outcome = cli(*TINY, "--methods", "fedvls,fedavg")
    rows = [line.split() for line in outcome.out.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["fedvls", "fedavg"]
    assert sum(row[2] == "*" for row in rows) == 1
    assert "±" not in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_several_seeds_have_a_spread(cli):
    outcome = cli(*TINY, "--methods", "fedavg,fedlmd,fedvls", "--seeds", "2", "--quiet")
    assert "mean ± sample standard deviation of 2 seeds" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_finished_runs_are_not_run_again(cli):
    cli(*TINY, "--methods", "fedavg", "--quiet")
    outcome = cli(*TINY, "--methods", "fedavg,fedprox", "--quiet")
    assert outcome.err.count("already finished") == 1
    assert len(list(Path("runs").iterdir())) == 2


def test_a_parameter_goes_to_the_methods_that_have_it(cli):
    told = cli(*TINY, "--methods", "fedavg,fedlmd,fedntd", "--set", "method.beta=0.5",
               "--set", "method.fedntd.temperature=2", "--json").json  # fmt: skip
    fedavg, fedlmd, fedntd = (method["params"] for method in told["methods"])
    assert fedavg == {}
    assert (fedlmd["beta"], fedlmd["temperature"]) == (0.5, 1.0)
    assert (fedntd["beta"], fedntd["temperature"]) == (0.5, 2.0)


@pytest.mark.parametrize("owner", ["fedprox", "solver"])
def test_a_parameter_that_two_parts_share_goes_to_the_part_that_is_named(cli, owner):
    told = cli(*TINY, "--methods", "fedprox,moon+fedprox", "--set", f"method.{owner}.mu=0.5", "--json").json
    fedprox, combined = (method["params"] for method in told["methods"])
    assert fedprox["mu"] == 0.5
    assert combined["solver.mu"] == 0.5
    assert combined["objective.mu"] != 0.5


def test_a_parameter_that_two_parts_share_is_not_left_out_in_silence(cli):
    outcome = cli(*TINY, "--methods", "fedprox,moon+fedprox", "--set", "method.mu=0.5")
    assert outcome.status == 2
    assert "parameter 'mu' belongs to moon and fedprox; write moon.mu" in outcome.err


def test_empty_values_in_a_file_are_the_defaults(cli):
    Path("c.yaml").write_text("methods: fedavg\nseeds:\nrank_by:\nrounds: 1\npartition: {rule: iid, clients: 4}\n")
    assert cli("compare", "-c", "c.yaml", "--quiet").status == 0


def test_a_file_may_list_methods_and_seeds(cli):
    Path("c.yaml").write_text(
        "methods: [fedavg, {name: fedprox, mu: 0.3}]\nseeds: 2\nrounds: 1\nlocal_epochs: 1\n"
        "partition: {rule: iid, clients: 4}\n"
    )
    told = cli("compare", "-c", "c.yaml", "--json").json["methods"]
    assert [method["method"] for method in told] == ["fedavg", "fedprox (mu=0.3)"]
    assert told[1]["params"] == {"mu": 0.3}
    assert told[0]["seeds"] == [0, 1]
    fewer = cli("compare", "-c", "c.yaml", "--seeds", "1", "--methods", "fedlc", "--json").json["methods"]
    assert [(method["method"], method["seeds"]) for method in fewer] == [("fedlc", [0])]


def test_the_metric_that_ranks_is_marked_and_stated(cli):
    command = ("compare", "--methods", "fedavg,fedvls", "--rounds", "1", "--clients", "4", "-q")
    told = json.loads(cli(*command, "--rank-by", "auroc", "--json").out)
    best = max(told["methods"], key=lambda method: method["auroc"]["mean"])
    assert (told["rank_by"], told["best"]) == ("auroc", best["method"])
    table = cli(*command, "--rank-by", "auroc").out
    assert "* highest AUROC after the last round" in table
    assert f"{best['method']} *" in table
    outcome = cli(*command, "--rank-by", "macrof1")
    assert outcome.status == 2
    assert "unknown ranking metric 'macrof1'; did you mean 'macro-f1'" in outcome.err


def test_the_verdict_follows_the_table(cli):
    outcome = cli(*TINY, "--methods", "fedavg,fedvls", "--seeds", "2", "--quiet")
    sentences = " ".join(outcome.out.split())
    assert "is best here: " in sentences
    assert "of 2 seeds); a test needs at least 3 seeds: --seeds 3." in sentences
    more = " ".join(cli(*TINY, "--methods", "fedavg,fedvls", "--seeds", "3", "--quiet").out.split())
    assert "of 3 seeds: " in more
    assert "significant (p" in more


def test_one_method_with_several_settings_has_clear_names(cli):
    given = (*TINY, "--methods", "fedavg", "--methods", "fedprox:mu=0.01,fedprox:mu=1")
    logged = cli(*given)
    assert "fedprox (mu=1.0) seed 0: round" in logged.out + logged.err, "the lines of a log tell settings apart, too"
    told = cli(*given, "--json").json
    assert [method["method"] for method in told["methods"]] == ["fedavg", "fedprox (mu=0.01)", "fedprox (mu=1.0)"]
    folders = [Path(folder).name for method in told["methods"] for folder in method["folders"]]
    assert [re.sub(r"-s0-\w+$", "", name) for name in folders] == [
        f"digits-dirichlet0.5-{method}" for method in ("fedavg", "fedprox", "fedprox_mu1.0")
    ]
    Path("c.yaml").write_text("methods: [fedavg, 'fedprox:mu=0.01', {name: fedprox, mu: 1}]\n")
    again = cli(*TINY, "-c", "c.yaml", "--json").json
    assert again["methods"] == told["methods"], "the same runs"
    shown = cli("compare", "runs").out
    assert "fedprox" in shown
    assert "(mu=0.01)" in shown


@pytest.mark.parametrize(
    ("methods", "line"),
    [
        ("fedprox:mu=0.01,fedprox:mu=0.01", "method 'fedprox' is listed twice with the same settings"),
        ("fedavg,fedprox,fedprox:mu=0.01", "method 'fedprox' is listed twice with the same settings"),
        ("fedprox:mu=0.01,fedprox:mu=0.01", "expected it once, or with different settings, such as fedprox:mu=VALUE"),
        ("fedavg,fedavg", r"listed twice with the same settings; expected it once$"),  # it has no settings
        ("fedprox:mu", "unknown method|cannot import|no module"),
        ("fedprox:mu=1:2", "setting '2' lacks a key or '='"),
        ("fedprox:nu=1", "method 'fedprox' has no parameter 'nu'; did you mean 'mu'"),
    ],
)
def test_a_wrong_setting_of_a_method_is_one_line(cli, methods, line):
    outcome = cli(*TINY, "--methods", methods)
    assert outcome.status == 2
    assert re.search(line, outcome.err, re.IGNORECASE), outcome.err
    assert outcome.err.count("\n") == 1


def test_a_parameter_that_no_method_has_is_refused(cli):
    command = (*TINY, "--set", "method.nu=1", "--methods")
    assert "none of fedavg has a parameter 'nu'; they have no parameters" in cli(*command, "fedavg").err
    assert "none of fedavg, fedprox has a parameter 'nu'; they have: mu" in cli(*command, "fedavg,fedprox").err


def test_the_table_for_a_paper(cli):
    outcome = cli(*TINY, "--methods", "fedavg,fedvls", "--seeds", "2", "--format", "latex", "--quiet")
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("% digits, dirichlet")
    assert outcome.out.endswith("\\end{tabular}\n")
    assert outcome.out.count("\\textbf{") >= 4
    reported = cli("report", "runs", "--format", "latex")
    assert reported.out == outcome.out, "the same table from the report"
    assert not Path("report.html").exists()
    assert "did you mean 'markdown'" in cli(*TINY, "--format", "markdwn").err
    assert "expected one of them" in cli(*TINY, "--format", "csv", "--json").err


def test_a_notice_of_several_runs_is_printed_once(cli, monkeypatch):
    monkeypatch.setattr("fedskew.experiment.preparation.choose_precision", lambda *_: "bf16")  # as on a GPU
    outcome = cli("compare", "--methods", "fedavg,fedprox", "--rounds", "1", "--clients", "4", "--local-epochs", "1")
    assert outcome.status == 0
    assert outcome.err.count("number format: bf16, the default on this GPU") == 1


def test_the_method_of_a_file_is_not_dropped_in_silence(cli):
    Path("one.yaml").write_text("method: {name: fedprox, mu: 0.5}\nrounds: 1\npartition: {clients: 4}\n")
    line = "one.yaml sets method fedprox, but compare uses --methods (default: fedavg,fedlmd,fedvls)"
    assert line in cli("compare", "-c", "one.yaml", "-q").err
    assert line not in cli("compare", "-c", "one.yaml", "--methods", "fedavg", "-q").err
