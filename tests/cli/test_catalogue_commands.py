"""`methods`, `models`, `datasets`, `partitions`, `--help` and `--version`."""

from __future__ import annotations

import gzip
import io
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fedskew
from fedskew.data import PARTITIONS
from fedskew.data.catalogue import DATASETS
from fedskew.methods import METHODS
from fedskew.models.catalogue import MODELS

COMMANDS = ("demo", "run", "compare", "partition", "methods", "models", "datasets", "partitions")
CATALOGUES = {"methods": METHODS, "models": MODELS, "datasets": DATASETS, "partitions": PARTITIONS}


@pytest.mark.parametrize("command", CATALOGUES)
def test_a_listing_names_every_entry(command, cli):
    outcome = cli(command)
    assert outcome.status == 0
    assert all(name in outcome.out for name in CATALOGUES[command])
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize("command", CATALOGUES)
def test_a_listing_as_json_has_every_entry(command, cli):
    outcome = cli(command, "--json")
    assert {entry["name"] for entry in outcome.json[command]} == set(CATALOGUES[command])
    assert outcome.err == ""


def test_only_partition_parameters_without_a_default_are_required(cli):
    listed = cli("partitions").out
    assert "path (required)" in listed
    assert "per_domain (optional)" in listed
    assert "column (optional)" in listed
    required = {rule["name"]: rule["required"] for rule in cli("partitions", "--json").json["partitions"]}
    assert (required["counts"], required["column"], required["domain-dirichlet"]) == (["path"], [], [])


def test_methods_say_what_they_send_reveal_and_cost(cli):
    (entry,) = cli("methods", "fedgr", "--json").json["methods"]
    assert entry["sends"] == "model, sample count, label presence"
    assert entry["reveals"] == "label presence"
    assert entry["kinds"] == ["objective", "server rule"]
    assert "gravity" in entry["parameters"]


def test_the_listing_of_methods_breaks_no_word(cli):
    shown = set(cli("methods").out.replace("│", " ").split())
    for entry in METHODS.values():
        assert shown >= set(f"{entry.sends} {entry.revealed} {entry.extra_compute}".split())


def test_one_method_is_shown_in_detail_under_any_of_its_names(cli):
    assert cli("methods", "feded").out == cli("methods", "fedvls").out
    assert "AAAI 2025" in cli("methods", "fedvls").out
    assert "distill_weight = 0.1" in cli("methods", "fedvls").out


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page(name, cli):
    outcome = cli("methods", name)
    assert METHODS[name].paper in outcome.out
    assert METHODS[name].document.splitlines()[0] in outcome.out


def test_a_combination_is_shown_as_one_method(cli):
    (entry,) = cli("methods", "fedgr+fpl+fedcurv", "--json").json["methods"]
    assert entry["kinds"] == ["objective", "server rule", "regulariser", "solver"]
    assert entry["reveals"] == "label presence, prototypes"
    assert entry["sends"].startswith(
        "model, sample count, label presence, mean feature of each class, change of Fisher"
    )
    assert entry["extra_compute"].startswith("1 forward of each sample per round, 1 forward and backward")
    assert {"gravity", "temperature", "curvature_weight"} <= set(entry["parameters"])
    shown = cli("methods", "fedlmd+mofedsam").out
    for told in ("ACM Multimedia 2023", "ICML 2022", "objective.beta = 1.0", "solver.beta = 0.1"):
        assert told in shown


def test_a_combination_that_is_refused_is_not_shown(cli):
    outcome = cli("methods", "fedvls+fedlmd")
    assert outcome.status == 2
    assert "both set the objective" in outcome.err


def test_the_table_of_combinations_is_not_json(cli):
    outcome = cli("methods", "--combinations", "--json")
    assert outcome.status == 2
    assert "--combinations prints Markdown and cannot be used with --json" in outcome.err


def test_a_pattern_picks_methods(cli):
    found = {entry["name"] for entry in cli("methods", "fedlmd*", "--json").json["methods"]}
    assert found == {name for name in METHODS if name.startswith("fedlmd")}


def test_datasets_that_are_here_say_where(cli, tmp_path):
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        folder = tmp_path / "data" / "mnist"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{part}-ubyte.gz").write_bytes(gzip.compress(b"x" * 100))
    told = {entry["name"]: entry for entry in cli("datasets", "--data-dir", "data", "--json").json["datasets"]}
    assert told["mnist"]["where"] == str(Path("data/mnist"))
    assert told["mnist"]["bytes"] > 0
    assert told["cifar10"]["where"] is None
    assert told["digits"]["where"] == "part of scikit-learn"
    assert told["digits-domains"]["bytes"] is None, "only one of its parts is here"
    assert [told[name]["downloaded"] for name in ("cifar10", "digits-domains", "digits", "femnist")] == [1, 1, 0, 0]


def test_datasets_without_a_download_say_so(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = cli("datasets").out.splitlines()
    made = [line.split()[1] for line in lines if "not on this machine; make it with its publisher's scripts" in line]
    assert made == ["femnist", "fed-isic2019"]
    assert any("805263 samples" in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, cli):
    outcome = cli(command, "--help")
    assert outcome.status == 0
    assert "Example" in outcome.out


def test_without_arguments_the_commands_are_listed(cli):
    outcome = cli()
    assert outcome.status == 0
    assert all(command in outcome.out for command in COMMANDS)


def test_help_shows_defaults_from_the_configuration(cli):
    text = " ".join(cli("run", "--help").out.replace("│", " ").split())
    assert "communication rounds (default: 60)" in text
    assert "weight decay of the local optimiser (default: 0.0)" in text


def test_help_says_what_an_argument_is(cli):
    text = " ".join(cli("diagnose", "--help").out.replace("│", " ").split())
    assert "CSV file with a row per client and a column per class" in text


def test_version(cli):
    assert cli("--version").out == f"fedskew {fedskew.__version__}\n"


def test_help_and_version_do_not_wait_for_torch():
    program = (
        "import sys\nfrom fedskew.cli import main\n"
        "for arguments in (['--help'], ['--version'], ['run', '--help'], ['compare', '--help']):\n"
        "    assert main(arguments) == 0\n"
        "assert 'torch' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_in_any_encoding(encoding, cli, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert cli("models").status == 0
    text = written.getvalue().decode(encoding)
    assert "mobilenetv2" in text
    assert ("5x5" if encoding == "ascii" else "5×5") in text
    assert len({len(line) for line in text.splitlines() if line[:1] in "|│"}) == 1


def test_a_reader_that_leaves_early_is_no_error():
    program = f"{shlex.quote(sys.executable)} -m fedskew methods | head -n 1"
    found = subprocess.run(["bash", "-c", program], capture_output=True, check=True)
    assert found.stderr == b""


def test_methods_do_not_claim_that_updates_reveal_nothing(cli):
    for arguments in (("methods", "fedavg"), ("methods", "fed*")):
        shown = " ".join(cli(*arguments).out.split())
        assert "Updates and models can reveal something about the training data" in shown
    rows = [" ".join(line.split()) for line in cli("methods", "fedavg").out.splitlines()]
    assert "revealed about the data nothing besides updates" in rows


@pytest.mark.parametrize(("bound", "sent", "revealed"), [
    ("local-only", "nothing", "nothing"), ("centralised", "all its samples", "all labels"),
])  # fmt: skip
def test_a_reference_bound_has_no_updates_that_could_reveal_something(cli, bound, sent, revealed):
    [entry] = cli("methods", bound, "--json").json["methods"]
    assert (entry["sends"], entry["reveals"]) == (sent, revealed)
    shown = cli("methods", bound).out
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert {f"sent by clients {sent}", f"revealed about the data {revealed}"} <= set(rows)
    for text in (shown, cli("methods", f"{bound}*").out):
        assert "pdates and models" not in text
        assert "besides updates" not in text
