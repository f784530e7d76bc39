"""A user's mistake is one line on stderr that names it, exit status 2, and nothing on stdout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedskew.cli import main

MISTAKES = {
    "rn": "did you mean 'run'?",
    "run --methd fedavg": "did you mean '--method'?",
    "compare --method fedavg": "did you mean '--methods'?",
    "--bogus": "unknown option '--bogus'",
    "run --rounds": "--rounds",
    "run extra": "extra",
    "run --method fedvlss": "did you mean 'fedvls'?",
    "run --method fedvls+fedlmd": "cannot be combined",
    "run --method fedprox:mu=1+fedvls": "settings go after the whole combination, such as fedprox+fedvls:mu=1",
    "run --method fedprox:nu=1": "method 'fedprox' has no parameter 'nu'; did you mean 'mu'?",
    "run --set method={mu:1}": "expected a mapping such as {name: fedprox, mu: 0.1}",
    "run --method mine": "a method of your own needs its module: my_module:mine",
    "run --model cnnn": "did you mean 'cnn'?",
    "run --model resnet18 --data digits --precision float99": "float99",
    "run --model vgg9 --data digits --set model=lenet5": "does not accept",
    "run --data digitz": "did you mean 'digits'?",
    "run --data nowhere/x.csv": "does not exist",
    "run --data my.module:factory": "is code, but data are a name or a path; pass data that your own code makes",
    "run --data-dir /nowhere --data mnist": "/nowhere",
    "run --partition dirichle": "did you mean 'dirichlet'?",
    "run --partition shards --beta 0.1": "its parameters: clients, shards",
    "run --partition counts": "needs 'path'",
    "run --lr abc": "lr is 'abc'",
    "run --lr nan": "lr is 'nan'",
    "run --rounds 0": "at least 1",
    "run --rounds 1.5": "whole number",
    "run --momentum 1": "below 1",
    "run --beta x": "beta is 'x'; expected a finite number above 0",
    "run --seeds 0": "seeds is '0'",
    "run --clients 2000": "use at most 143 clients",
    "run --clients-per-round 50": "at most 20",
    "run --device gpu": "did you mean 'cuda'?",
    "run --augment cropp": "did you mean 'crop'?",
    "run --augment cutout": "at least 17×17",
    "run --set lr": "lacks a key or '='",
    "run --set lrr=1": "did you mean 'lr'?",
    "run --set beta=1": "did you mean 'partition.beta'?",
    "run --set mu=1": "did you mean 'method.mu'?",
    "run --set methods=fedavg": "unknown key 'methods'; did you mean 'method'?",
    "run --set lr=[": "expected YAML",
    "run --labels-per-client [": "--labels-per-client",
    "run --set method.nope=1": "has no parameter 'nope'",
    "run --set data.nope=1": "nope",
    "run -c nofile.yaml": "cannot read nofile.yaml",
    "run --config= --rounds 1": "--config is ''; expected a YAML file",
    "run -c corrupt.yaml": "corrupt.yaml: line",
    "run -c unknown.yaml": "did you mean 'rounds'?",
    "run -c list.yaml": "list.yaml",
    "run -c several.yaml": "expected `fedskew compare` for this file",
    "run -c beta.yaml": "unknown key 'beta'; did you mean partition: {rule: …, beta: 0.3}?",
    "run -c dotted.yaml": "unknown key 'method.mu'; did you mean method: {name: …, mu: 0.5}?",
    "compare -c list.yaml": "list.yaml",
    "compare -c unknown.yaml": "did you mean 'rounds'?",
    "compare --methods fedavg,fedavgg": "did you mean 'fedavg'?",
    "compare --methods feded,fedvls": "listed twice",
    "compare --methods ,": "expected names",
    "compare --set method.zzz=1": "none of fedavg, fedlmd, fedvls",
    "compare --set method=fedavg": "--methods",
    "compare here there --live": "expected no --live, --log or --out",
    "diagnose counts.csv --beta 3": "expected no setting of partition.beta",
    "diagnose --clients 4 --save corrupt.yaml/start.yaml": "cannot write corrupt.yaml/start.yaml",
    "diagnose --save start.txt": "cannot write a configuration to 'start.txt'; expected a file that ends in .yaml",
    "methods fedavg --combinations": "expected it without 'fedavg'",
    "pretrain --set rounds=7": "pretrain sets rounds itself; expected --epochs",
    "report here --format latex --figures there": "expected no --out and no --figures",
    "sweep grid.yaml --trials 5": "--trials is for --search",
    "run --out corrupt.yaml --rounds 1": "is a file",
    "run --out . --rounds 1": "is not empty and not a run folder",
    "partition --save x.gif": ".json",
    "partition --partition saved --set partition.path=nofile.json": "cannot read nofile.json",
    "partition --rounds 3": "unknown option '--rounds'",
    "methods nothing-like-it": "choose from",
    "datasets --data-dir /nowhere": "/nowhere",
    "demo --seeds x": "seeds is 'x'",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, cli):
    Path("corrupt.yaml").write_text("rounds: [1, 2\nlr: }")
    Path("unknown.yaml").write_text("round: 3\n")
    Path("list.yaml").write_text("- 1\n")
    Path("several.yaml").write_text("methods: [fedavg, fedvls]\n")
    Path("beta.yaml").write_text("beta: 0.3\n")
    Path("dotted.yaml").write_text("method.mu: 0.5\n")
    outcome = cli(*line.split())
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert MISTAKES[line] in outcome.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(cli):
    outcome = cli("run", "--device", "cuda")
    assert outcome.status == 2
    assert outcome.err == "error: device is 'cuda', but no CUDA device is available; expected cpu or auto\n"


def test_a_refused_run_leaves_no_folder(cli):
    assert cli("run", "--augment", "cropp", "--out", "here").status == 2
    assert not Path("here").exists()


def test_a_mistake_with_json_leaves_stdout_empty(cli):
    outcome = cli("run", "--json", "--lr", "-1")
    assert (outcome.status, outcome.out) == (2, "")


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fedskew.experiment.preparation.prepare", broken)
    with pytest.raises(ZeroDivisionError):
        main(["run", "--rounds", "1"])
