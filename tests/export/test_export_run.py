"""A run's folder in, a model's folder out."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from exported_runs import finished, form
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedskew as fs
from fedskew.data.published.text import Vocabulary
from fedskew.errors import UserError
from fedskew.experiment.config import PartitionConfig
from fedskew.experiment.result import Result
from fedskew.experiment.storage.files import read_tensors
from fedskew.export import export_run
from fedskew.export.card import model_card
from fedskew.export.raw_inputs import RawInputs
from fedskew.export.words import Words
from fedskew.markdown import escape

WITHOUT_FEDSKEW = "import sys\nsys.modules['fedskew'] = None\nimport json, numpy as np, torch\n"
FORMATS = ["onnx"] if all(map(importlib.util.find_spec, ("onnx", "onnxruntime", "onnxscript"))) else []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    federation = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.2), seed=0)
    return fs.run(
        federation, "fedlmd+fedprox", "dnn", rounds=2, local_epochs=1, out=tmp_path_factory.mktemp("a") / "run"
    )


@pytest.fixture(scope="module")
def exported(run: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert run.folder is not None
    return export_run(run.folder, tmp_path_factory.mktemp("b") / "model", FORMATS).folder


def python(code: str, folder: Path) -> str:
    """What a Python that cannot import fedskew prints."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FEDSKEW + code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_pytorch_has_the_run_s_accuracy_on_raw_test_images(run: Result, exported: Path, tmp_path: Path) -> None:
    test = fs.load("digits").test
    np.savez(tmp_path / "test.npz", x=test.x, y=test.y)
    code = (
        "from model import classes, load\n"
        f"data = np.load({str(tmp_path / 'test.npz')!r})\n"
        "found = load()(torch.from_numpy(data['x'])).argmax(1).numpy()\n"
        "print(json.dumps([(found == data['y']).mean(), classes()]))"
    )
    accuracy, classes = json.loads(python(code, exported))
    assert accuracy == pytest.approx(run.accuracy, abs=1e-12)
    assert classes == [str(digit) for digit in range(10)]


@pytest.mark.skipif(not FORMATS, reason="the extra [onnx] is not installed")
def test_onnx_runtime_has_the_run_s_accuracy_on_raw_test_images(run: Result, exported: Path) -> None:
    import onnxruntime

    test = fs.load("digits").test
    session = onnxruntime.InferenceSession(str(exported / "model.onnx"))
    (logits,) = session.run(None, {"images": test.x})
    assert (logits.argmax(1) == test.y).mean() == pytest.approx(run.accuracy, abs=1e-12)


def test_the_weights_are_the_run_s_under_the_model_s_names(run: Result, exported: Path) -> None:
    tensors, _ = read_tensors(exported / "model.safetensors")
    expected = run.model.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_card_tells_what_the_run_s_folder_knows(run: Result, exported: Path) -> None:
    card = (exported / "README.md").read_text(encoding="utf-8")
    counts = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.2), seed=0).label_counts
    tested = np.bincount(fs.load("digits").test.y)
    for label, accuracy in enumerate(run.class_accuracy):
        assert accuracy is not None
        held = f"{(counts[:, label] > 0).sum()} of 5 | {counts[:, label].sum()}"
        assert f"| {label} | {label} | {100 * accuracy:.1f} % | {tested[label]} | {held} |" in card
    assert "fedlmd, Lu et al., ACM MM 2023" in card
    assert "fedprox, Li et al., MLSys 2020" in card
    assert "Besides what updates can reveal, the server learns about the client's labels: nothing" in card
    assert "The run was simulated" in card


def test_the_description_is_complete_for_programs(run: Result, exported: Path) -> None:
    told = json.loads((exported / "model.json").read_text(encoding="utf-8"))
    assert told["config"] == run.config.to_mapping()
    assert told["evaluation"] == run.evaluation.to_json()
    assert np.array(told["label_counts"]).sum() == 1438


def test_it_may_be_repeated_but_leaves_other_folders_alone(run: Result, exported: Path, tmp_path: Path) -> None:
    assert run.folder is not None
    export_run(run.folder, exported)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not empty and is not an exported model"):
        export_run(run.folder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_code_of_an_earlier_export_does_not_stay_beside_a_model_of_the_user_s_own(run: Result, tmp_path: Path) -> None:
    assert run.folder is not None
    assert "model.py" in export_run(run.folder, tmp_path / "model").files
    own = Own()
    fs.run(fs.federation("digits", fs.IID(clients=3)), "fedavg", own, rounds=1, local_epochs=1, out=tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "model", model=own)
    assert not (tmp_path / "model" / "model.py").exists()


def test_a_lost_class_is_named_at_the_top() -> None:
    card = model_card(finished("dnn", form("dnn")), None, with_words=False)
    assert "**It hardly recognises a\\|b.**" in card.partition("## ")[0]


@pytest.mark.parametrize("bound", ["centralised", "local-only"])
def test_the_card_of_a_reference_bound_claims_no_federated_learning(bound: str) -> None:
    card = model_card(finished("dnn", form("dnn"), method=bound), None, with_words=False)
    assert f"trained without federated learning, as the reference bound {bound}, on digits: 7 rounds" in card
    assert "- federated-learning" not in card
    assert "- federated-learning" in model_card(finished("dnn", form("dnn")), None, with_words=False)
    learned = {"centralised": "all labels", "local-only": "nothing"}[bound]
    assert f". The server learns about the client's labels: {learned}. " in card
    assert "not differentially private. Models can reveal something about the training data" in card
    assert "updates can reveal" not in card


def test_what_a_method_reveals_is_told() -> None:
    card = model_card(finished("dnn", form("dnn"), method="fedgr"), None, with_words=False)
    assert "Besides what updates can reveal, the server learns about the client's labels: label presence." in card


def test_label_counts_that_the_server_does_not_know_are_not_made_up() -> None:
    sites = PartitionConfig("sites", 2, None, {"names": ["north", "south"]})
    run = finished("dnn", form("dnn"), partition=sites, label_counts=[[0, 0, 0], [0, 0, 0]])
    card = model_card(run, None, with_words=False)
    assert "In this run, the label counts stayed at the sites." in card
    assert "held by" not in card
    assert "digits" not in card
    assert "The run was simulated" not in card


def test_a_card_claims_nothing_about_a_method_that_cannot_be_imported() -> None:
    sites = PartitionConfig("sites", 2, None, {"names": ["north", "south"]})
    run = finished("dnn", form("dnn"), method="not_here.mine:Mine", partition=sites)
    card = model_card(run, None, with_words=False)
    assert "so what the server learned about the sites' labels is not known here." in card
    assert "so what it sends is not known here." in card
    assert "stayed at the sites" not in card


def test_programs_read_null_for_what_such_a_method_sends_and_reveals(run: Result, tmp_path: Path) -> None:
    assert run.folder is not None
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("name: fedlmd+fedprox", "name: not_here.mine:Mine"))
    export_run(folder, tmp_path / "model")
    described = json.loads((tmp_path / "model" / "model.json").read_text(encoding="utf-8"))
    assert described["method"] == "not_here.mine:Mine"
    assert (described["sends"], described["reveals"]) == (None, None)


def test_paths_and_class_names_do_not_break_the_card_s_tables() -> None:
    run = finished("dnn", form("dnn"), partition=PartitionConfig("column", params={"column": "ward|year"}))
    weights = {"cat": 1.0, "dog": 1.0, "a|b": 2.0}
    run = replace(run, config=replace(run.config, data="my|data/_x_.csv", class_weights=weights))
    card = model_card(run, None, with_words=False)
    assert "trained by federated learning on my\\|data/\\_x\\_.csv: 7 rounds" in card
    assert "| data | my\\|data/\\_x\\_.csv |" in card
    assert "| split | rule column, column ward\\|year |" in card
    assert "| class weights, batches | cat 1, dog 1, a\\|b 2, shuffled |" in card


def test_classes_of_few_clients_are_named() -> None:
    card = model_card(finished("dnn", form("dnn"), label_counts=[[4, 0, 0], [2, 3, 0]]), None, with_words=False)
    assert "Classes held by only one client: dog." in card
    assert "*Classes held by no client: a\\|b.**" in card


def test_the_columns_of_a_table_are_named_in_order() -> None:
    inputs = {"kind": "table", "shape": [2], "vocabulary": 0, "columns": ["age", "pressure"]}
    assert "Rows of 2 numbers, float64, [n, 2]: age, pressure." in model_card(finished("dnn", inputs), None, False)


def test_batch_statistics_are_warned_of() -> None:
    assert "depends on the other samples" in model_card(finished("resnet10", form("resnet10")), None, with_words=False)
    assert "depends on the other" not in model_card(finished("resnet18", form("resnet18")), None, with_words=False)


TEXTS = ["Rain in the north, rain!", "The cup final", "shares fell; it's over", "cup cup cup", "fell the rain", ""] * 4


@pytest.fixture
def text_run(tmp_path: Path) -> Result:
    with (tmp_path / "own.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows((text or "...", ["rain", "cup"][n % 2]) for n, text in enumerate(TEXTS))
    federation = fs.federation(str(tmp_path / "own.csv"), fs.IID(clients=2))
    return fs.run(federation, "fedavg", rounds=1, local_epochs=1, out=tmp_path / "run")


def test_a_text_model_brings_its_words_where_the_data_are_found(text_run: Result, tmp_path: Path) -> None:
    # The run notes the data's name; its folder is then given the path, as a run from the command line has it.
    config = tmp_path / "run" / "config.yaml"
    name = fs.load(str(tmp_path / "own.csv")).name
    config.write_text(config.read_text().replace(f"name: {name}", f"name: {tmp_path / 'own.csv'}"))
    exported = export_run(tmp_path / "run", tmp_path / "model", FORMATS)
    assert exported.notices == ()
    code = (
        "from model import load, words\n"
        "numbers = words()(['the RAIN fell, unheard', ''])\n"
        "print(json.dumps([numbers.tolist(), load()(numbers).shape]))"
    )
    numbers, shape = json.loads(python(code, tmp_path / "model"))
    listed = (tmp_path / "model" / "words.txt").read_text(encoding="utf-8").splitlines()
    assert numbers[0][:4] == [2 + listed.index("the"), 2 + listed.index("rain"), 2 + listed.index("fell"), 1]
    assert shape == [2, 2]
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    python("\n".join(re.findall(r"```python\n(.*?)```", card, re.DOTALL)), tmp_path / "model")


def test_a_text_model_without_its_data_says_what_is_missing(text_run: Result, tmp_path: Path) -> None:
    (tmp_path / "own.csv").unlink()
    exported = export_run(tmp_path / "run", tmp_path / "model")
    assert "words.txt" not in exported.files
    assert "words.txt is left out" in exported.notices[0]
    assert "The vocabulary is not included" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")


@given(st.lists(st.text(max_size=40), min_size=1, max_size=5), st.integers(1, 6))
def test_words_are_numbered_as_in_training(texts: list[str], length: int) -> None:
    known = Vocabulary(TEXTS, 9)
    assert np.array_equal(Words(list(known.ids), length)(texts + TEXTS).numpy(), known.encode(texts + TEXTS, length))


class Own(nn.Module):
    """A user's model with a frozen layer and a buffer that is no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 8).requires_grad_(False)
        self.head = nn.Linear(8, 10)
        self.register_buffer("factor", torch.tensor(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.factor * self.frozen(x.flatten(1)))
        return logits


def test_a_model_of_the_user_s_own_is_given_as_an_object(tmp_path: Path) -> None:
    federation = fs.federation("digits", fs.IID(clients=3))
    own = Own()
    result = fs.run(federation, "fedavg", own, rounds=1, local_epochs=1, out=tmp_path / "run")
    with pytest.raises(UserError, match="an object of your program, of class 'Own'"):
        export_run(tmp_path / "run", tmp_path / "model")
    exported = export_run(tmp_path / "run", tmp_path / "model", model=own)
    assert "model.py" not in exported.files
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "Scale them to [0, 1] and normalise them before you call the model." in card
    assert "part of the exported model" not in card
    tensors, _ = read_tensors(tmp_path / "model" / "model.safetensors")
    assert torch.equal(tensors["frozen.weight"], own.frozen.weight)
    assert torch.equal(tensors["head.weight"], result.model.get_parameter("head.weight"))
    (tmp_path / "model" / "model.py").write_text("the user's own code")
    export_run(tmp_path / "run", tmp_path / "model", model=own)
    assert (tmp_path / "model" / "model.py").read_text() == "the user's own code"
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(UserError, match=r"does not fit model Sequential: they differ in '1\.bias'"):
        export_run(tmp_path / "run", tmp_path / "model", model=other)


def test_a_model_of_several_encoders_is_exported_whole(tmp_path: Path) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=6, beta=0.1))
    params = {"clusters": 2, "head_rounds": 1}
    result = fs.run(
        federation, "fedconcat", "dnn", rounds=1, local_epochs=1, method_params=params, out=tmp_path / "run"
    )
    export_run(tmp_path / "run", tmp_path / "model", FORMATS)
    samples = fs.load("digits").test.x[:50]
    np.save(tmp_path / "x.npy", samples)
    code = (
        "from model import load\n"
        f"model, x = load(), torch.from_numpy(np.load({str(tmp_path / 'x.npy')!r}))\n"
        "print(json.dumps([model(x).argmax(1).tolist(), len(model.model.encoder.encoders)]))"
    )
    found, encoders = json.loads(python(code, tmp_path / "model"))
    with torch.no_grad():
        raw = RawInputs(result.model.eval(), json.loads((tmp_path / "model" / "model.json").read_text())["inputs"])
        assert found == raw(torch.from_numpy(samples)).argmax(1).tolist()
    assert encoders == 2
    assert "2 concatenated encoders" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "summary.json").unlink(), "is not finished"),
        (lambda folder: (folder / "about.json").unlink(), "because about.json is missing, damaged or from an earlier"),
        (lambda folder: (folder / "config.yaml").unlink(), "is not a run folder"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "cannot use"),
    ],
)
def test_a_folder_without_a_finished_run_is_refused(run: Result, tmp_path: Path, damage, said: str) -> None:  # type: ignore[no-untyped-def]
    assert run.folder is not None
    folder = shutil.copytree(run.folder, tmp_path / "run")
    damage(folder)
    with pytest.raises(UserError, match=said):
        export_run(folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_run_without_a_common_model_is_refused(tmp_path: Path) -> None:
    federation = fs.federation("digits", fs.IID(clients=2))
    fs.run(federation, "local-only", "dnn", rounds=1, local_epochs=1, out=tmp_path / "run")
    with pytest.raises(UserError, match="'local-only' trains a separate model for every client"):
        export_run(tmp_path / "run", tmp_path / "model")


def test_an_unknown_format_has_its_nearest(run: Result, tmp_path: Path) -> None:
    assert run.folder is not None
    with pytest.raises(UserError, match="did you mean 'onnx'"):
        export_run(run.folder, tmp_path, ["onx"])
    with pytest.raises(UserError, match="unknown format 'onx'; did you mean 'onnx'"):
        export_run(run.folder, tmp_path, "onx")


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("<unknown>", r"\<unknown>"),
        ("a*b*c", r"a\*b\*c"),
        ("_x_", r"\_x\_"),
        ("lab_value", "lab_value"),
        ("a\n|b\\", r"a \|b\\"),
        ("`x` [y](z)", r"\`x\` \[y\](z)"),
    ],
)
def test_a_name_is_no_markup(name: str, escaped: str) -> None:
    assert escape(name) == escaped


def test_the_card_names_the_initial_weights_and_the_trained_part(run: Result, tmp_path: Path) -> None:
    assert run.folder is not None
    export_run(run.folder, tmp_path / "start")
    start = tmp_path / "start" / "model.safetensors"
    federation = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.2), seed=1)
    settings = {"rounds": 1, "local_epochs": 1, "init": str(start), "train": "head"}
    head = fs.run(federation, "fedavg", "dnn", out=tmp_path / "head", **settings)
    card = model_card(head, None, with_words=False)
    assert f"| initial weights | model.safetensors, SHA-256 {hashlib.sha256(start.read_bytes()).hexdigest()} |" in card
    assert "| trained part | head |" in card
    assert "initial weights" not in model_card(run, None, with_words=False)
