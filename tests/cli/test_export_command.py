"""`fedskew export`."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedskew.cli.app import EXAMPLES

RUN = ("run", "--rounds", "1", "--clients", "4", "--local-epochs", "1", "--quiet", "--out", "runs/first")
PERSONAL = (*RUN[:-1], "runs/personal", "--method", "fedper", "--client-test", "0.2")


@pytest.mark.parametrize("example", [example for example in EXAMPLES["export"] if "--hub" not in example])
def test_an_example_is_in_the_help_and_works(example, cli):
    if "onnx" in example and find_spec("onnxscript") is None:
        pytest.skip("the extra [onnx] is not installed")
    assert example in cli("export", "--help").out
    assert cli(*(PERSONAL if "runs/personal" in example else RUN)).status == 0
    words = shlex.split(example)[1:]
    outcome = cli(*words)
    assert outcome.status == 0
    assert outcome.err == ""
    for name in ("README.md", "model.json", "model.py", "model.safetensors"):
        assert name in outcome.out
        assert (Path(words[words.index("-o") + 1]) / name).is_file()


def test_json_lists_the_files(cli):
    cli(*RUN)
    told = cli("export", "runs/first", "-o", "model", "--json").json
    assert told["files"] == sorted(path.name for path in Path("model").iterdir())


def test_no_file_of_an_earlier_model_stays_in_the_folder(cli):
    cli(*RUN)
    cli("export", "runs/first", "-o", "model")
    for name in ("model.onnx", "words.txt"):
        (Path("model") / name).write_text("of another model")
    told = cli("export", "runs/first", "-o", "model", "--json").json
    assert told["files"] == sorted(path.name for path in Path("model").iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("runs/first", "-o", "model", "--format", "onx"), "did you mean 'onnx'"),
        (("runs/none", "-o", "model"), "runs/none is not a run folder"),
        (("runs/first",), "an export needs --out DIR, --hub OWNER/NAME or both"),
        (("runs/first", "-o", "model", "--private"), "--private is for --hub; expected --hub OWNER/NAME, too"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, cli):
    outcome = cli("export", *arguments)
    assert outcome.status == 2
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
