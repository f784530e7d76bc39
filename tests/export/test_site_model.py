"""The model of one client or site, exported: the shared tensors, and those that the site keeps to itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from in_process import case, small_data

import fedskew as fs
from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.result import Result
from fedskew.experiment.storage.files import read_tensors
from fedskew.export import export_run
from fedskew.export.card import model_card
from fedskew.flower.server_app import run_federation
from fedskew.flower.site_state import read_final_state
from fedskew.markdown import percent
from fedskew.methods import Tensors

SHORT = {"rounds": 3, "local_epochs": 1, "clients_per_round": 3, "client_test": 0.2}


def finished(method: str, folder: Path) -> Result:
    federation = fs.federation("digits", fs.Dirichlet(clients=5, beta=0.3), seed=0)
    return fs.run(federation, method, "dnn", out=folder, **SHORT)


def weights(folder: Path) -> Tensors:
    return read_tensors(folder / "model.safetensors")[0]


def kept(run: Result, client: int) -> Tensors:
    assert run.folder is not None
    files = sorted((run.folder / "clients").glob(f"global.client-{client}.round-*.safetensors"))
    return read_tensors(max(files, key=lambda path: int(path.name.split("-")[-1].split(".")[0])))[0]


@pytest.fixture(scope="module")
def fedper(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return finished("fedper", tmp_path_factory.mktemp("fedper") / "run")


def test_a_clients_model_has_its_head_and_the_shared_body(fedper: Result, tmp_path: Path) -> None:
    assert fedper.folder is not None
    took_part = sorted({client for row in fedper.history for client in row.clients})
    for client in took_part[:2]:
        out = tmp_path / str(client)
        export_run(fedper.folder, out, site=str(client))
        found, shared, own = weights(out), weights(fedper.folder), kept(fedper, client)
        assert torch.equal(found["head.weight"], own["personal/head.weight"])
        assert not torch.equal(found["head.weight"], shared["head.weight"])
        assert all(torch.equal(t, shared[name]) for name, t in found.items() if not name.startswith("head."))
        described = json.loads((out / "model.json").read_text(encoding="utf-8"))
        assert described["site"] == str(client)
        assert described["site_score"]["accuracy"] == fedper.site_scores[str(client)].accuracy
        card = (out / "README.md").read_text(encoding="utf-8")
        assert f"dnn of site {client} trained by fedper" in card
        assert "sends the server: model without personal layers, sample count." in card
        assert f"`model.safetensors` holds the last model of site {client}, in float32." in card
        assert "global model" not in card
        assert "never left" not in card, "the client was simulated"


def test_a_site_s_name_is_escaped_in_the_text_of_the_card_but_not_in_its_header(fedper: Result) -> None:
    named = replace(fedper, site_scores={"north_": next(iter(fedper.site_scores.values()))})
    _, header, text = model_card(named, None, with_words=False, site="north_").split("---\n", 2)
    assert yaml.safe_load(header)["model-index"][0]["name"] == "dnn of north_ trained by fedper"
    assert "# dnn of north\\_ trained by fedper\n" in text


def test_dittos_client_has_a_whole_model_of_its_own(tmp_path: Path) -> None:
    run = finished("ditto", tmp_path / "run")
    assert run.folder is not None
    client = run.history[-1].clients[0]
    export_run(run.folder, tmp_path / "own", site=str(client))
    export_run(run.folder, tmp_path / "global")
    own = kept(run, client)
    assert all(torch.equal(t, own[f"personal/{name}"]) for name, t in weights(tmp_path / "own").items())
    assert all(torch.equal(t, weights(run.folder)[name]) for name, t in weights(tmp_path / "global").items())


def test_fedrods_client_has_its_personal_head_and_the_global_model_has_none(tmp_path: Path) -> None:
    run = finished("fedrod", tmp_path / "run")
    assert run.folder is not None
    client = run.history[-1].clients[0]
    export_run(run.folder, tmp_path / "own", site=str(client))
    export_run(run.folder, tmp_path / "global")
    assert torch.equal(
        weights(tmp_path / "own")["head.personal.weight"], kept(run, client)["personal/head.personal.weight"]
    )
    assert not weights(tmp_path / "global")["head.personal.weight"].any()


def test_what_is_refused(fedper: Result, tmp_path: Path) -> None:
    folder = str(fedper.folder)
    with pytest.raises(UserError, match=r"every site has its own model.*expected --site NAME"):
        export_run(folder, tmp_path / "a")
    with pytest.raises(UserError, match="unknown site '9'"):
        export_run(folder, tmp_path / "a", site="9")
    shared = finished("fedavg", tmp_path / "fedavg")
    with pytest.raises(UserError, match="one model for all sites; expected no --site"):
        export_run(str(shared.folder), tmp_path / "a", site="1")
    swept = tmp_path / "swept"
    shutil.copytree(folder, swept, ignore=shutil.ignore_patterns("clients"))
    with pytest.raises(UserError, match="has no states of clients: fedskew sweep and fedskew choose delete them"):
        export_run(swept, tmp_path / "a", site="1")
    tuned = finished("fedbabu", tmp_path / "fedbabu")
    with pytest.raises(UserError, match="fine-tunes the global model on its own data"):
        export_run(str(tuned.folder), tmp_path / "a", site="1")
    assert not (tmp_path / "a").exists()


def federated(method: str, rounds: int, site_metrics: str, folder: Path) -> tuple[Result, Path]:
    """Train a federation of three sites. Return the run, and the sites' data."""
    data = small_data(folder)
    split = fs.federation(str(data), fs.Dirichlet(beta=0.3, clients=3), seed=0)
    values = {"method": method, "rounds": rounds, "local_epochs": 1, "engine": "plain", "device": "cpu"}
    config = with_values(Config(), {"partition.clients": 3, "batch_size": 20, **values})
    here = case(folder, split, data, config, evaluation="sites", site_metrics=site_metrics, test_data=None)
    return run_federation(here.grid, here.context), data


def test_a_site_exports_its_own_model_with_its_site_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = federated("fedper", 2, "total", tmp_path)
    site = tmp_path / "site-1" / "site.yaml"
    site.write_text(f"name: site-1\ndata: {data}\n", encoding="utf-8")
    assert main(["export", str(run.folder), "-o", str(tmp_path / "model"), "--site", str(site)]) == 0
    assert run.folder is not None
    found, shared = weights(tmp_path / "model"), weights(run.folder)
    (state,) = (tmp_path / "site-1" / "state").glob("*/global.round-2.safetensors")
    assert torch.equal(found["head.weight"], read_tensors(state)[0]["personal/head.weight"])
    assert not torch.equal(found["head.weight"], shared["head.weight"])
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "Its personal tensors never left that site." in card
    sites = run.history[-1].sites
    assert sites is not None
    described = json.loads((tmp_path / "model" / "model.json").read_text(encoding="utf-8"))
    assert described["site_accuracy"] == sites["site-1"]["accuracy"]
    assert percent(described["site_accuracy"]) in card
    capsys.readouterr()
    assert main(["export", str(run.folder), "-o", str(tmp_path / "other"), "--site", "site-1"]) == 2
    assert "never left that site; run this command there, with the path of its site.yaml" in capsys.readouterr().err


def test_scores_of_the_global_model_are_not_those_of_a_sites_own(tmp_path: Path) -> None:
    run, _ = federated("ditto", 1, "class", tmp_path)
    assert run.folder is not None
    assert run.site_scores
    own = read_final_state(tmp_path / "site-1" / "state", run.folder)
    export_run(run.folder, tmp_path / "model", site="site-1", kept=own)
    described = json.loads((tmp_path / "model" / "model.json").read_text(encoding="utf-8"))
    assert described["site_score"] is None
    tests = run.history[-1].client_tests
    assert tests is not None
    assert described["site_accuracy"] == tests["personal"][1]
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "On the held-out samples of site-1, after the last round:\n\n| measure | value |" in card


def test_a_method_may_keep_nothing_at_the_sites(tmp_path: Path) -> None:
    run = finished("fedavg", tmp_path / "run")
    assert run.folder is not None
    with pytest.raises(UserError, match="expected a run in which this site took part, with a method that keeps"):
        read_final_state(tmp_path / "state", run.folder)
