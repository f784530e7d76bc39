"""`fedskew pretrain`: the weights, their card, and a federated run that starts from them."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import yaml

PRETRAIN = ("pretrain", "--data", "digits", "--set", "data.keep=[0,1,2,3,4,5]", "--model", "dnn", "--device", "cpu")


def test_the_weights_and_their_card(cli):
    card = cli(*PRETRAIN, "--epochs", "3", "--out", "first", "--json").json
    file = Path("first/weights.safetensors")
    assert card["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert card == json.loads(Path("first/weights.json").read_text(encoding="utf-8")) | {"folder": "first"}
    assert card["classes"] == ["0", "1", "2", "3", "4", "5"]
    assert card["epochs"] == 3
    assert card["accuracy"] > 0.5, "six classes after three epochs"
    assert f"accuracy on the test part is {100 * card['accuracy']:.1f} %" in Path("first/README.md").read_text("utf-8")
    config = yaml.safe_load(Path("first/config.yaml").read_text(encoding="utf-8"))
    assert (config["partition"]["clients"], config["rounds"], config["local_epochs"]) == (1, 3, 1)
    assert abs(config["lr_decay"] ** 3 - 0.01) < 1e-9
    again = cli(*PRETRAIN, "--epochs", "3", "--out", "first")
    assert "already finished" in again.err
    assert "use it with --model dnn --init first/weights.safetensors" in again.out


def test_the_advised_option_can_be_pasted(cli):
    advice = cli(*PRETRAIN, "--epochs", "1", "--out", "with space", "-q").out.splitlines()[-1]
    words = shlex.split(advice.removeprefix("use it with "))
    started = cli("run", *PRETRAIN[1:], *words, "--method", "fedavg", "--rounds", "1", "--out", "started")
    assert started.status == 0
    assert "6 of 6 tensors taken" in started.err


def test_other_classes_are_federated_from_them(cli):
    cli(*PRETRAIN, "--epochs", "5", "--out", "first", "-q")
    federated = ("run", "--data", "digits", "--set", "data.keep=[6,7,8,9]", "--model", "dnn", "--method", "fedavg",
                 "--clients", "4", "--rounds", "2", "--init", "first/weights.safetensors",
                 "--device", "cpu")  # fmt: skip
    for part in ("all", "head"):
        done = cli(*federated, "--train", part, "--out", part)
        assert done.status == 0
        assert "4 of 6 tensors taken" in done.err
        assert "not taken: head.weight, shape (6, 200) in the file, (4, 200) in the model" in done.err


def test_mistakes_are_one_line(cli):
    for words, expected in {
        ("--epochs", "0"): "epochs is '0'; expected a whole number of at least 1",
        ("--model", "dmn"): "did you mean 'dnn'",
        ("--set", "data.keep=[0,12]"): "unknown class of digits: '12'",
        ("--set", "data.keep=[1,1]"): "expected each class once",
        ("--set", "data.keep=[1]"): "expected at least 2 classes",
    }.items():
        done = cli(*PRETRAIN, *words)
        assert done.status == 2
        assert expected in done.err
        assert done.err.count("\n") == 1


def test_a_report_of_such_runs(cli):
    cli(*PRETRAIN, "--epochs", "3", "--out", "first", "-q")
    compared = ("compare", "--data", "digits", "--set", "data.keep=[6,7,8,9]", "--model", "dnn", "--methods",
                "fedavg,fed3r", "--clients", "4", "--rounds", "2", "--init", "first/weights.safetensors",
                "--train", "head", "--device", "cpu", "--out", "runs", "-q")  # fmt: skip
    assert cli(*compared).status == 0
    done = cli("report", "runs", "--out", "report.html")
    assert done.status == 0, done.err
    assert "fed3r" in Path("report.html").read_text(encoding="utf-8")


def test_epochs_without_effect_are_reported(cli):
    assert "had no effect" not in cli(*PRETRAIN, "--epochs", "1", "--out", "good", "-q").err
    shown = cli(*PRETRAIN, "--epochs", "2", "--lr", "1e12", "--out", "diverged", "-q").err
    assert "warning: 2 of 2 epochs had no effect, because training was not finite; try a lower --lr" in shown
