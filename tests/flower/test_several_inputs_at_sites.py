"""Samples with several inputs, such as token ids and an attention mask: sites come to the simulated model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict
from in_process import DirectGrid, run_config_of

import fedskew as fs
from fedskew.cli import main
from fedskew.data.dataset import Dataset, Samples
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run_prepared
from fedskew.flower.contract import Contract
from fedskew.flower.planning import make_settings, read_app, resolve_config
from fedskew.flower.server_app import run_federation
from fedskew.flower.site import Site
from fedskew.flower.site_config import SiteConfig

pytest.importorskip("pyarrow")

NAMES = ["east", "north"]
VOCABULARY, LENGTH = 64, 10

MODEL = """
import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self, vocabulary, classes):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, 16), nn.Linear(16, classes)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).float()
        mean = (self.embed(input_ids) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return {"logits": self.head(torch.relu(self.hidden(mean)))}


def masked(inputs):
    return Masked(inputs.vocabulary, inputs.classes)


def distilbert(inputs):
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=inputs.vocabulary, max_position_embeddings=16, dim=8, hidden_dim=16, n_layers=1, n_heads=2,
        num_labels=inputs.classes, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )
    return DistilBertForSequenceClassification(config)
"""


def tokens(rows: int, seed: int, largest: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    mask = (np.arange(LENGTH) < random.integers(3, LENGTH + 1, (rows, 1))).astype(np.int64)
    ids = random.integers(2, largest + 1, (rows, LENGTH)) * mask
    label = np.array(["negative", "positive"])[(ids[:, 0] > largest // 2).astype(int)]
    return pd.DataFrame({"input_ids": list(ids), "attention_mask": list(mask), "label": label})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sites. North has fewer tokens, and its inputs in another order."""
    (tmp_path / "own_texts.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, name in enumerate(NAMES):
        (tmp_path / name).mkdir()
        for part, rows in (("train", 60), ("test", 24)):
            table = tokens(rows, seed=2 * number + rows, largest=(VOCABULARY - 1, 30)[number])
            if name == "north":
                table = table[["label", "attention_mask", "input_ids"]]
            table.to_parquet(tmp_path / name / f"{part}.parquet")
    return tmp_path


def pooled(folder: Path) -> fs.Federation:
    """The sites' rows as the clients of a simulation."""
    loaded = [fs.load(folder / name, vocabulary=VOCABULARY) for name in NAMES]
    own = Contract.from_dataset(loaded[0])
    parts = [[getattr(own.admit(one), part) for one in loaded] for part in ("train", "test")]
    train, test = (Samples(np.concatenate([p.x for p in part]), np.concatenate([p.y for p in part])) for part in parts)
    whole = Dataset("texts", "text", loaded[0].classes, train, test, vocabulary=VOCABULARY, fields=loaded[0].fields)
    rows = np.split(np.arange(len(train)), [len(loaded[0].train)])
    return fs.Federation(whole, tuple(rows), {"name": "sites"}, 0)


def config(model: str, method: str) -> Config:
    values = {"method": method, "rounds": 2, "local_epochs": 2, "engine": "plain", "device": "cpu", "batch_size": 15}
    return with_values(Config(), values | {"model": f"own_texts:{model}", "optimizer": "sgd", "lr": 0.1})


def sites(folder: Path) -> dict[str, Site]:
    own: dict[str, Any] = {"device": "cpu", "metrics": "class", "packages": ("own_texts",)}
    return {name: Site(SiteConfig(folder / name, name, str(folder / name), **own)) for name in NAMES}


@pytest.mark.parametrize(("model", "method"), [("masked", "fedavg"), ("masked", "scaffold"), ("distilbert", "fedprox")])
def test_sites_come_to_the_simulated_model(model: str, method: str, folder: Path, tmp_path: Path) -> None:
    if model == "distilbert":
        pytest.importorskip("transformers")
    contract = Contract.from_dataset(fs.load(folder / "east", vocabulary=VOCABULARY))
    settings = make_settings(NAMES, {"folder": str(tmp_path / "run"), "minimum": 2, "site_metrics": "class"})
    values = run_config_of(settings, contract, resolve_config(config(model, method), contract, NAMES))
    apart = run_federation(DirectGrid(sites(folder)), Context(1, 0, {}, RecordDict(), values))
    together = run_prepared(prepare(config(model, method), pooled(folder)))
    for name, tensor in together.model.state_dict().items():
        torch.testing.assert_close(apart.model.state_dict()[name], tensor, rtol=0, atol=1e-6)
    assert (apart.evaluation.confusion == together.evaluation.confusion).all()
    assert [row.loss for row in apart.history] == pytest.approx([row.loss for row in together.history], abs=1e-6)


def test_a_site_with_unknown_tokens_is_refused_by_the_contract(folder: Path) -> None:
    contract = Contract.from_dataset(fs.load(folder / "north"))
    with pytest.raises(fs.UserError, match=r"the largest token id is 63, expected less than 31"):
        contract.admit(fs.load(folder / "east"))
    assert contract.admit(fs.load(folder / "north")).vocabulary == 31


def test_other_inputs_are_named(folder: Path) -> None:
    contract = Contract.from_dataset(fs.load(folder / "east"))
    table = pd.read_parquet(folder / "north" / "train.parquet")
    table.assign(token_type_ids=list(np.zeros((len(table), LENGTH), int))).to_parquet(folder / "more.parquet")
    with pytest.raises(fs.UserError, match=r"inputs are .*token_type_ids \[10\], expected input_ids \[10\], attention"):
        contract.admit(fs.load(folder / "more.parquet"))
    assert contract.admit(fs.load(folder / "more.parquet", drop="token_type_ids")).fields == contract.fields


def test_inputs_in_another_order_are_matched_by_name(folder: Path) -> None:
    contract = Contract.from_dataset(fs.load(folder / "east"))
    raw = pd.read_parquet(folder / "north" / "test.parquet")
    admitted = contract.admit(fs.load(folder / "north")).test.x
    np.testing.assert_array_equal(admitted[:, :LENGTH], np.stack(raw["input_ids"]))
    np.testing.assert_array_equal(admitted[:, LENGTH:], np.stack(raw["attention_mask"]))


def test_an_app_for_such_data_is_checked_at_the_site(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = ["federate", "init", str(folder / "app"), "--sites", "east,north", "--data", str(folder / "east")]
    chosen = ["--set", f"data.vocabulary={VOCABULARY}", "--model", "own_texts:masked", "--method", "fedavg"]
    assert main([*init, *chosen]) == 0
    assert read_app(folder / "app")[1].vocabulary == VOCABULARY
    (folder / "site.yaml").write_text(f"name: north\ndata: {folder / 'north'}\npackages: [own_texts]\n")
    assert main(["federate", "site", str(folder / "site.yaml"), "--check", str(folder / "app")]) == 0
    assert "north: 60 training samples" in capsys.readouterr().out
