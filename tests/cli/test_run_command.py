"""`fedskew run`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from fedskew.errors import UserError
from fedskew.results import load_run

TINY = ("run", "--rounds", "3", "--clients", "6", "--clients-per-round", "2", "--local-epochs", "1", "--beta", "0.5")


def test_json_is_one_object_and_nothing_else(cli):
    outcome = cli(*TINY, "--json", "--out", "here")
    assert outcome.status == 0
    assert outcome.err == ""
    told = outcome.json
    assert told["rounds"] == 3
    assert told["folder"] == "here"
    assert told["classes"] == [str(c) for c in range(10)]
    assert len(told["final"]["class_accuracy"]) == 10
    assert told["config"]["partition"]["beta"] == 0.5


def test_the_result_is_shown_with_every_class(cli):
    outcome = cli(*TINY)
    lines = outcome.out.splitlines()
    assert any(line.startswith("accuracy ") for line in lines)
    assert any(line.startswith("worst class") for line in lines)
    assert all(any(line.startswith(f"{c} ") for line in lines) for c in range(10))
    assert max(map(len, lines)) <= 80
    assert "round 3/3" in outcome.err


def test_a_finished_run_whose_rows_are_gone_is_one_line(cli):
    assert cli(*TINY, "--out", "here").status == 0
    for damage in (lambda rows: rows.write_text("not JSON\n"), Path.unlink):
        damage(Path("here/rounds.jsonl"))
        outcome = cli(*TINY, "--out", "here", "--quiet")
        assert outcome.status == 2
        assert "here is finished, but rounds.jsonl is missing or has no evaluated round; restore it" in outcome.err
        assert outcome.err.count("\n") == 1
    with pytest.raises(UserError, match="no round of here has been evaluated yet"):
        load_run("here").summary()


def test_quiet_has_the_result_only(cli):
    outcome = cli(*TINY, "--quiet")
    assert outcome.err == ""
    assert "accuracy" in outcome.out


def test_the_default_folder_tells_what_the_run_was(cli):
    cli(*TINY, "--quiet")
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-dirichlet0.5-fedvls-s0-")
    assert (folder / "model.safetensors").is_file()


def test_a_finished_run_says_so_and_shows_the_same_result(cli):
    first, second = cli(*TINY, "--out", "here"), cli(*TINY, "--out", "here")
    assert second.out == first.out
    assert second.err == "here is already finished; nothing was run\n"


def test_the_folders_configuration_repeats_the_run(cli):
    first = cli(*TINY, "--json", "--out", "here").json
    again = cli("run", "-c", "here/config.yaml", "--json", "--out", "there").json
    assert again["final"] == first["final"]


def test_another_configuration_in_the_folder_is_refused(cli):
    cli(*TINY, "--out", "here", "--quiet")
    outcome = cli(*TINY, "--out", "here", "--lr", "0.2")
    assert outcome.status == 2
    assert "differs in lr" in outcome.err


def test_flags_override_the_file_and_settings_override_flags(cli):
    Path("base.yaml").write_text(
        "rounds: 2\nlr: 0.3\nmomentum: 0.5\nmethod: {name: fedprox, mu: 0.2}\n"
        "partition: {rule: dirichlet, beta: 0.5, clients: 6}\nclients_per_round: 2\nlocal_epochs: 1\n"
    )
    told = cli("run", "-c", "base.yaml", "--lr", "0.2", "--momentum", "0.6", "--set", "momentum=0.7", "--json").json
    config = told["config"]
    assert (config["rounds"], config["lr"], config["momentum"]) == (2, 0.2, 0.7)
    assert config["method"] == {"name": "fedprox", "mu": 0.2}


@pytest.mark.parametrize("assignment", ["partition=iid", "partition.rule=iid"])
def test_set_overrides_the_flag_under_either_spelling(assignment, cli):
    flags = [word for word in TINY if word not in ("--beta", "0.5")]
    told = cli(*flags, "--partition", "shards", "--set", assignment, "--json").json
    assert told["config"]["partition"]["rule"] == "iid"


def test_every_flag_reaches_its_key(cli):
    flags = {
        "method": "fedlc", "model": "dnn", "lr_decay": "0.9", "weight_decay": "0.001", "batch_size": "20",
        "eval_every": "2", "engine": "plain", "device": "cpu", "precision": "float64", "seed": "4",
        "augment": "crop,flip",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    config = cli(*TINY, *words, "--eval-local", "--json").json["config"]
    assert config.pop("method") == {"name": "fedlc", "tau": 0.5}
    assert config["augment"] == ["crop", "flip"]
    assert config["eval_local"] is True
    numbers = {key: float(value) for key, value in flags.items() if value[0].isdigit()}
    assert {key: config[key] for key in numbers} == numbers
    assert (config["model"], config["engine"], config["precision"]) == ("dnn", "plain", "float64")


def test_several_seeds_are_averaged(cli):
    (told,) = cli(*TINY, "--seeds", "2", "--seed", "5", "--json", "--out", "many").json["methods"]
    assert told["seeds"] == [5, 6]
    singles = [cli(*TINY, "--seed", str(seed), "--json", "--out", f"one{seed}").json["accuracy"] for seed in (5, 6)]
    assert told["accuracy"]["mean"] == pytest.approx(sum(singles) / 2, rel=1e-12)
    assert len(list(Path("many").iterdir())) == 2


def test_a_method_with_stages_names_them(cli):
    outcome = cli(*TINY, "--method", "pkd", "--set", "method.groups=[[1, 8]]")
    assert "distil round" in outcome.err


def test_the_saved_configuration_is_complete(cli):
    told = cli(*TINY, "--json", "--out", "here").json
    assert yaml.safe_load(Path("here/config.yaml").read_text()) == told["config"]


def test_a_run_shows_the_metric_requested_first(cli):
    command = ("run", "--method", "fedavg", "--rounds", "2", "--clients", "4", "--local-epochs", "1", "--quiet")
    out = cli(*command, "--rank-by", "balanced-accuracy").out
    assert out.index("balanced accuracy") < out.index("\naccuracy")
    assert re.search(r"AUROC +0\.\d{3}", out)
    summary = cli(*command, "--json").json
    assert f"balanced accuracy  {100 * summary['final']['mean_class']:.1f} %" in out
    assert summary["auroc"] > 0.5
