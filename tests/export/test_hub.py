"""Uploads to the Hugging Face Hub: the real client against a Hub on this machine."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from exported_runs import finished, form
from fake_hub import FakeHub, Repository, running_hub

import fedskew as fs
from fedskew.cli.app import EXAMPLES
from fedskew.errors import UserError
from fedskew.experiment.config import PartitionConfig
from fedskew.experiment.result import Result
from fedskew.export import Exported, export_run, upload
from fedskew.export.card import model_card

huggingface_hub = pytest.importorskip("huggingface_hub")

NAME = "jane/skewed-digits"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    federation = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.2), seed=0)
    return fs.run(federation, "fedlmd", "dnn", rounds=2, local_epochs=1, out=tmp_path_factory.mktemp("a") / "run")


@pytest.fixture(scope="module")
def exported(run: Result, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    assert run.folder is not None
    return export_run(run.folder, tmp_path_factory.mktemp("b") / "model", licence="cc-by-4.0")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub on which Jane has a token. huggingface_hub sends large files by LFS, without Xet."""
    with running_hub({"of-jane": {"jane"}}) as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "of-jane")
        yield served
        huggingface_hub.close_session()


def test_all_files_are_uploaded_in_one_commit_and_weights_as_a_large_file(hub: FakeHub, exported: Exported) -> None:
    assert upload(exported, NAME) == f"{hub.url}/{NAME}"
    repository = hub.repositories[NAME]
    assert repository.files == {name: (exported.folder / name).read_bytes() for name in exported.files}
    assert repository.large == {"model.safetensors"}
    assert repository.commits == 1
    assert not repository.private


def test_the_command_uploads_with_xet_and_says_where(hub: FakeHub, run: Result, tmp_path: Path) -> None:
    """The client as users have it, in its own process, because it reads its settings from the environment."""
    for package in ("hf_xet", "pyarrow"):
        pytest.importorskip(package)
    (example,) = [example for example in EXAMPLES["export"] if "--hub" in example]
    command = [sys.executable, "-m", *shlex.split(example.replace("runs/first", str(run.folder)))]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "0"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{hub.url}/{NAME}: README.md, model.json, model.py, model.safetensors")
    repository = hub.repositories[NAME]
    assert repository.private
    assert safetensors.torch.load(repository.files["model.safetensors"]).keys() == run.model.state_dict().keys()
    assert "PUT" not in {request.partition(" ")[0] for request in hub.requests}, "LFS was used"
    assert b"license: cc-by-4.0\n" in repository.files["README.md"]


LOADING = """
import sys
sys.modules["fedskew"] = None
import json, numpy, torch
from huggingface_hub import snapshot_download
sys.path.insert(0, snapshot_download("jane/skewed-digits"))
from model import classes, load
data = numpy.load("test.npz")
found = load()(torch.from_numpy(data["x"])).argmax(1).numpy()
print(json.dumps([(found == data["y"]).mean(), classes(), sorted(n for n in sys.modules if n.startswith("fedskew."))]))
"""


def test_a_downloaded_model_works_without_fedskew(
    hub: FakeHub, run: Result, exported: Exported, tmp_path: Path
) -> None:
    upload(exported, NAME)
    test = fs.load("digits").test
    np.savez(tmp_path / "test.npz", x=test.x, y=test.y)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOADING], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracy, classes, imported = json.loads(done.stdout)
    assert accuracy == pytest.approx(run.accuracy, abs=1e-12)
    assert classes == [str(digit) for digit in range(10)]
    assert imported == []


def test_a_second_upload_adds_a_commit_to_the_repository(hub: FakeHub, exported: Exported) -> None:
    upload(exported, NAME)
    upload(exported, NAME)
    assert hub.repositories[NAME].commits == 2


def test_private_creates_a_private_repository_and_refuses_a_public_one(hub: FakeHub, exported: Exported) -> None:
    upload(exported, NAME, private=True)
    assert hub.repositories[NAME].private
    upload(exported, NAME, private=True)
    hub.repositories["jane/open"] = Repository(private=False)
    with pytest.raises(UserError, match="jane/open exists on the Hub and is public"):
        upload(exported, "jane/open", private=True)
    assert hub.repositories["jane/open"].files == {}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("skewed digits", "--hub is 'skewed digits'; expected OWNER/NAME"),
        ("jane/a/b", "--hub is 'jane/a/b'; expected OWNER/NAME"),
        ("digits", "--hub is 'digits'; expected OWNER/NAME, with your user name"),
        ("joe/digits", 'the token has no right to write to joe/digits .*namespace "joe".*another name'),
    ],
)
def test_a_name_that_does_not_work_is_refused(hub: FakeHub, exported: Exported, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        upload(exported, name)
    assert hub.repositories == {}


def test_somebody_else_s_repository_is_refused(hub: FakeHub, exported: Exported) -> None:
    hub.repositories["joe/digits"] = Repository(private=False)
    with pytest.raises(UserError, match="the token has no right to write to joe/digits"):
        upload(exported, "joe/digits")
    assert hub.repositories["joe/digits"].files == {}


def test_a_missing_or_wrong_token_is_named(hub: FakeHub, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "stolen")
    with pytest.raises(UserError, match=r"does not accept the token \(Invalid username or password\.\); set HF_TOKEN"):
        upload(exported, NAME)
    monkeypatch.delenv("HF_TOKEN")
    hub.requests.clear()
    with pytest.raises(UserError, match="needs a token with the right to write; set HF_TOKEN, or run `hf auth login`"):
        upload(exported, NAME)
    assert hub.requests == []


def test_a_missing_package_is_named(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"^--hub needs huggingface_hub: pip install 'fedskew\[hub\]'$"):
        upload(exported, NAME)


def test_a_hub_that_cannot_be_reached_is_named(
    hub: FakeHub, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:  # it does not listen
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nowhere)
        with pytest.raises(UserError, match=f"^cannot upload {NAME} to {nowhere}: .*refused$"):
            upload(exported, NAME)


def test_a_card_that_the_hub_refuses_is_an_error_in_one_line(hub: FakeHub, run: Result, tmp_path: Path) -> None:
    assert run.folder is not None
    wrong = export_run(run.folder, tmp_path / "model", licence="free")
    with pytest.raises(UserError, match=r'Invalid metadata in README\.md\. - "license" must be one of'):
        upload(wrong, NAME)
    assert hub.repositories[NAME].files == {}


# -- the header of the card -------------------------------------------------------------------------------


def metadata(card: str) -> huggingface_hub.ModelCardData:
    """What the Hub's own reader finds."""
    data = huggingface_hub.ModelCard(card).data
    assert isinstance(data, huggingface_hub.ModelCardData)
    return data


def test_the_hub_reads_the_run_s_results_from_the_card(run: Result, exported: Exported) -> None:
    data = metadata((exported.folder / "README.md").read_text(encoding="utf-8"))
    assert (data.license, data.library_name, data.pipeline_tag) == ("cc-by-4.0", "pytorch", "image-classification")
    assert data.tags == ["federated-learning", "label-skew", "fedskew", "fedlmd"]
    assert data.model_name == "dnn trained by fedlmd"
    results = {result.metric_type: result for result in data.eval_results}
    assert data.metrics == list(results)
    assert run.scores is not None
    expected = {
        "accuracy": run.accuracy,
        "balanced_accuracy": run.evaluation.mean_class,
        "worst_class_accuracy": run.evaluation.worst_class,
        "f1": run.evaluation.macro_f1,
        "roc_auc": run.scores.auroc,
        "brier_score": run.scores.brier,
    }
    assert {kind: result.metric_value for kind, result in results.items()} == pytest.approx(expected, abs=1e-6)
    assert {(r.task_type, r.dataset_type, r.dataset_name, r.dataset_split) for r in data.eval_results} == {
        ("image-classification", "digits", "digits", "test")
    }


def test_data_on_the_hub_are_linked() -> None:
    made_up = finished("dnn", form("dnn"))
    known = {"fashion-mnist": ["zalando-datasets/fashion_mnist"], "hf:joe/scans": ["joe/scans"], "mine/x.csv": None}
    for data, linked in known.items():
        found = metadata(model_card(replace(made_up, config=replace(made_up.config, data=data)), None, False))
        assert found.datasets == linked
        assert found.eval_results[0].dataset_type == (linked[0] if linked else "private")
        assert found.license is None


def test_data_in_memory_with_the_name_of_a_published_dataset_are_not_that_dataset() -> None:
    made_up = finished("dnn", form("dnn"))
    config = replace(made_up.config, data="mnist", data_params={"in_memory": "ndarray"})
    card = model_card(replace(made_up, config=config), None, False)
    assert metadata(card).datasets is None
    assert metadata(card).eval_results[0].dataset_type == "private"
    assert "LeCun" not in card
    assert "LeCun" in model_card(replace(made_up, config=replace(made_up.config, data="mnist")), None, False)


def test_a_folder_of_the_user_is_not_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "scans").mkdir(parents=True)
    made_up = finished("dnn", form("dnn"))
    for place in (tmp_path / "own", "./own", "../scans", "own/scans", "own/scans/2024", "~/scans", r"C:\scans"):
        config = replace(made_up.config, data=f"hf:{place}")
        found = metadata(model_card(replace(made_up, config=config), None, False))
        assert found.datasets is None
        assert found.eval_results[0].dataset_type == "private"


def test_metrics_that_the_sites_kept_are_left_out() -> None:
    sites = PartitionConfig("sites", 2, None, {"names": ["north", "south"]})
    data = metadata(model_card(finished("dnn", form("dnn"), partition=sites), None, False))
    assert data.datasets is None
    assert data.eval_results[0].dataset_name == "test samples of the federation"
    assert "roc_auc" not in data.metrics
