"""Which engine `auto` is: by a rule before the run, or the engine that a run began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from toy_runs import linear, norm_and_dropout

from fedskew.data import IID, federation
from fedskew.engine import ENGINES, choice, choose_engine, cpu_engine, estimated_seconds
from fedskew.engine.choice import SHORT_RUN, count_multiplications
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.run import run

CPU, GPU = torch.device("cpu"), torch.device("cuda")
IMAGE = torch.zeros(1, 1, 8, 8)


def test_only_a_long_run_on_a_cpu_stays_auto_in_its_configuration() -> None:
    assert choose_engine("auto", linear(), IMAGE, GPU, 1e6) == "stacked"
    assert choose_engine("auto", linear(), IMAGE, CPU, SHORT_RUN / 2) == "stacked"
    assert choose_engine("auto", norm_and_dropout(), IMAGE, CPU, SHORT_RUN / 2) == "plain"
    assert choose_engine("auto", linear(), IMAGE, CPU, SHORT_RUN * 2) == "auto"
    for name in ENGINES:
        assert choose_engine(name, linear(), IMAGE, CPU, 1e6) == name
    with pytest.raises(UserError, match="engine 'pool' needs device cpu, not cuda"):
        choose_engine("pool", linear(), IMAGE, GPU)


@pytest.mark.parametrize(
    ("cores", "clients", "dense", "convolutional"),
    [
        (1, 10, "stacked", "plain"),
        (2, 1, "stacked", "plain"),
        (2, 7, "pool", "pool"),
        (2, 10, "pool-stacked", "pool"),
        (16, 10, "pool", "pool"),
        (16, 64, "pool-stacked", "pool"),
    ],
)
def test_a_long_run_uses_the_cores(
    cores: int, clients: int, dense: str, convolutional: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_engine(linear(), IMAGE, clients) == dense
    assert cpu_engine(norm_and_dropout(), IMAGE, clients) == convolutional
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_engine(linear(), IMAGE, clients) == "stacked"


def test_samples_in_float64_do_not_change_the_choice() -> None:
    assert count_multiplications(linear(), IMAGE.double()) == 256
    assert cpu_engine(linear(), IMAGE.double(), 100) == cpu_engine(linear(), IMAGE, 100)


def test_the_cost_of_a_run_grows_with_its_steps_and_its_model() -> None:
    image = torch.zeros(1, 1, 8, 8)
    assert count_multiplications(linear(), image) == 256
    assert (
        count_multiplications(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3)), image)
        == 36 * 27 + 16 * 54
    )
    seconds = [estimated_seconds(linear(), image, steps, visits) for steps, visits in ((10, 100), (20, 100), (20, 1e9))]
    assert seconds == sorted(seconds)
    assert seconds[0] < SHORT_RUN < seconds[2]


def test_a_batch_norm_without_running_statistics_is_no_obstacle() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 8), nn.BatchNorm2d(2, track_running_stats=False))
    assert count_multiplications(model, torch.zeros(1, 1, 8, 8)) == 2 * 64


class Attention(nn.Module):
    """Attention as a user writes it, without a class that a library would recognise."""

    def __init__(self, width: int, by_hand: bool = False) -> None:
        super().__init__()
        self.embedding, self.mixed = nn.Embedding(50, width), nn.Linear(width, 3 * width)
        self.head, self.by_hand = nn.Linear(width, 3), by_hand

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.embedding(tokens)).chunk(3, dim=-1)
        if self.by_hand:
            mixed = (query @ key.mT).softmax(dim=-1) @ value
        else:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(mixed.mean(dim=1))


def test_a_large_transformer_trains_client_by_client_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    library = nn.Sequential(nn.Embedding(50, 128), layer, nn.Flatten(), nn.Linear(128 * 32, 3))
    for large in (Attention(128), Attention(128, by_hand=True), library):
        assert choose_engine("auto", large, tokens, CPU) == "plain"
    assert choose_engine("auto", Attention(16), tokens, CPU) == "stacked"
    wide = nn.Sequential(nn.Embedding(50, 512), nn.Flatten(), nn.Linear(512 * 32, 256), nn.Linear(256, 3))
    assert count_multiplications(wide, tokens) > count_multiplications(Attention(128), tokens)
    assert choose_engine("auto", wide, tokens, CPU) == "stacked"
    monkeypatch.setattr(choice, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [cpu_engine(model, tokens, 10) for model in (Attention(128), wide)] == ["pool", "pool-stacked"]


def test_a_resumed_run_continues_with_the_engine_that_it_began_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interruption(Callback):
        def on_round(self, row: object, rounds_ahead: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(choice, "SHORT_RUN", 0.0)
    fed = federation("digits", IID(clients=4))
    settings = {"rounds": 2, "local_epochs": 1, "out": tmp_path / "run"}
    monkeypatch.setattr("fedskew.experiment.round.server.cpu_engine", lambda model, sample, clients: "plain")
    with pytest.raises(KeyboardInterrupt):
        run(fed, "fedavg", callbacks=[Interruption()], **settings)
    monkeypatch.setattr("fedskew.experiment.round.server.cpu_engine", lambda model, sample, clients: "stacked")
    result = run(fed, "fedavg", **settings)
    assert (result.engine, result.config.engine) == ("plain", "auto")
    assert run(fed, "fedavg", **settings).engine == "plain"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engine"] == "plain"
