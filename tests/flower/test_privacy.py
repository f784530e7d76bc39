"""Noise and its price: what is clipped, how much is added, and the ε that is told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from in_process import case, small_data
from scipy import integrate, stats

from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.contract import Contract
from fedskew.flower.disclosure import noise_warning
from fedskew.flower.privacy import SENSITIVITY, private_change
from fedskew.flower.server_app import run_federation
from fedskew.flower.settings import FederationSettings
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.flower.wire import Facts
from fedskew.gaussian_privacy import epsilon
from fedskew.models import DataShape, make_model, parameter_count

SECRET = {"share_loss": False, "attempts": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0)


def settings(method: str = "fedvls", **changed: object) -> Config:
    values = {"method": method, "rounds": 2, "local_epochs": 1, "device": "cpu", "batch_size": 20, "average": "uniform"}
    return with_values(Config(), {"partition.clients": 3, **values, **changed})


@pytest.mark.parametrize(("releases", "noise"), [(1, 1.0), (10, 2.0), (100, 5.0), (50, 0.7), (1, 40.0)])
def test_epsilon_is_that_of_the_privacy_loss_itself(releases: int, noise: float) -> None:
    """δ = E[(1 − e^{ε−L})⁺] over the privacy loss L ~ N(μ²/2, μ²), integrated numerically."""
    delta = 1e-5
    found = epsilon(releases, noise, delta)
    mu = math.sqrt(releases) / noise
    loss = stats.norm(mu**2 / 2, mu)
    beyond = integrate.quad(lambda x: -math.expm1(found - x) * loss.pdf(x), found, found + 40 * mu, epsabs=1e-12)[0]
    assert beyond == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize(
    ("releases", "noise", "expected"),
    [(3, 1.0, 20.1250), (10, 2.0, 17.8566), (100, 8.0, 13.2067), (50, 4.0, 20.6755), (20, 30.0, 1.1241)],
)
def test_epsilon_is_that_of_google_s_accountant(releases: int, noise: float, expected: float) -> None:
    """From dp-accounting 0.6.0: `from_gaussian_mechanism(noise, sensitivity=2).self_compose(releases)` at δ = 1e-5."""
    for kind in ("central", "local"):
        assert epsilon(releases, noise, 1e-5, SENSITIVITY[kind]) == pytest.approx(expected, abs=1e-3)


def test_the_mean_moves_by_at_most_the_sensitivity_when_one_site_s_data_are_replaced() -> None:
    """The worst case: one site sends the opposite change. In units of clip / K, the mean moves by the sensitivity."""
    sent, clip, sites = {"a": torch.zeros(5)}, 0.5, 4
    towards, away = {"a": torch.full((5,), 9.0)}, {"a": torch.full((5,), -9.0)}

    def mean(changes: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([private_change(c, sent, clip, 0.0)["a"] for c in changes]).mean(0)

    moved = float((mean([towards] * sites) - mean([towards] * (sites - 1) + [away])).norm())
    assert moved == pytest.approx(SENSITIVITY["central"] * clip / sites)


def test_noise_larger_than_any_change_is_warned_of() -> None:
    contract = Contract("image", ("a", "b"), (1, 8, 8), (0.5,), (0.5,))
    config = with_values(Config(), {"model": "dnn"})
    many, few = (tuple(f"site-{i}" for i in range(number)) for number in (1000, 3))
    loud = FederationSettings(sites=few, privacy="central")
    parameters = parameter_count(make_model("dnn", DataShape((1, 8, 8), 2, 0)))
    expected = f"the noise on a round's mean is {math.sqrt(parameters) / 3:.0f} times as large"
    assert expected in str(noise_warning(loud, contract, config))
    little = FederationSettings(sites=few, privacy="central", noise=4.04 / math.sqrt(parameters))
    assert "mean is 1.3 times as large" in str(noise_warning(little, contract, config))
    assert noise_warning(FederationSettings(sites=many, privacy="central"), contract, config) is None
    assert noise_warning(FederationSettings(sites=few), contract, config) is None
    head = sum(p.numel() for p in make_model("dnn", DataShape((1, 8, 8), 2, 0)).head.parameters())
    kept = noise_warning(loud, contract, with_values(config, {"method": "fedper"}))
    assert f" and {parameters - head:,} parameters;" in str(kept), "no noise is added to the head, which stays"


def test_more_releases_and_less_noise_cost_more() -> None:
    assert epsilon(0, 1.0, 1e-5) == 0
    assert epsilon(1, 1.0, 1e-5) < epsilon(2, 1.0, 1e-5) < epsilon(2, 0.5, 1e-5) < math.inf
    assert epsilon(1, 1.0, 1e-5, sensitivity=2.0) == pytest.approx(epsilon(4, 1.0, 1e-5))
    assert epsilon(10_000, 0.3, 1e-5) < math.inf


def test_a_change_is_clipped_as_a_whole_and_short_ones_stay() -> None:
    sent = {"a": torch.zeros(3), "b": torch.ones(4)}
    far = {"a": torch.full((3,), 10.0), "b": torch.full((4,), 11.0)}
    clipped = private_change(far, sent, 2.0, 0.0)
    change = torch.cat([clipped[name] - sent[name] for name in sent])
    assert float(change.norm()) == pytest.approx(2.0)
    assert torch.allclose(change, torch.full((7,), 2 / 7**0.5))
    near = {"a": torch.full((3,), 0.1), "b": torch.ones(4)}
    assert torch.equal(private_change(near, sent, 2.0, 0.0)["a"], near["a"])


def test_noise_has_the_deviation_that_is_accounted_for() -> None:
    sent = {"a": torch.zeros(200_000)}
    noisy = private_change(sent, sent, 2.0, 0.5)["a"]
    assert float(noisy.std()) == pytest.approx(0.5, rel=0.01)
    assert float(noisy.mean()) == pytest.approx(0.0, abs=0.01)


def test_central_noise_is_on_the_mean_and_epsilon_is_recorded(data: Path, split: Federation, tmp_path: Path) -> None:
    """With a tiny clip the model moves by the noise alone: deviation z·C/K."""
    here = case(tmp_path, split, data, settings(rounds=1), privacy="central", clip=1e-4, noise=30.0)
    from fedskew.experiment.preparation import prepare

    before = prepare(here.config, split).model.state_dict()
    result = run_federation(here.grid, here.context)
    moved = torch.cat([(t - before[name]).flatten() for name, t in result.model.state_dict().items()])
    assert float(moved.std()) == pytest.approx(30.0 * 1e-4 / 3, rel=0.05)
    assert result.history[1].privacy == {
        "kind": "central",
        "epsilon": epsilon(1, 30.0, 1e-5, sensitivity=2.0),
        "delta": 1e-5,
    }


def test_a_site_whose_numbers_are_not_finite_takes_no_share_of_the_noise(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """Noise for three on the mean of two would be less than is accounted for."""

    def spoil(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if site != "site-1" or asked["kind"] != "train":
            return facts, answer
        tensors = from_bytes(answer)
        tensors["trained:params/head.bias"][0] = torch.nan
        return facts, to_bytes(tensors)

    here = case(tmp_path, split, data, settings(rounds=1), spoil, minimum=2, privacy="central", clip=1e-4, noise=30.0)
    from fedskew.experiment.preparation import prepare

    before = prepare(here.config, split).model.state_dict()
    result = run_federation(here.grid, here.context)
    moved = torch.cat([(t - before[name]).flatten() for name, t in result.model.state_dict().items()])
    assert float(moved.std()) == pytest.approx(30.0 * 1e-4 / 2, rel=0.05)


def test_local_noise_is_there_before_anything_leaves(data: Path, split: Federation, tmp_path: Path) -> None:
    own = {"privacy": "local", "clip": 1e-4, "noise": 10.0, **SECRET}
    here = case(tmp_path, split, data, settings(rounds=1), **own)
    from fedskew.experiment.preparation import prepare

    before = prepare(here.config, split).model.state_dict()
    result = run_federation(here.grid, here.context)
    for message in (m for m in here.grid.sent if m.kind == "train"):
        tensors = from_bytes(message.payload)
        moved = torch.cat([(t - before[n.partition("/")[2]]).flatten() for n, t in tensors.items()])
        assert float(moved.std()) == pytest.approx(1e-3, rel=0.05)
        assert set(message.facts) == {"round", "start", "visits", "finite"}
    assert result.history[1].privacy["epsilon"] == epsilon(1, 10.0, 1e-5, sensitivity=2.0)


def test_a_model_with_an_infinity_does_not_make_a_site_skip_the_clip(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """-inf as the bias of one class makes the norm of the change NaN, while all other gradients are finite."""
    asked: list[Facts] = []

    def keep(site: str, request: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        asked.extend([request] if (site, request["kind"]) == ("site-0", "train") else [])
        return facts, answer

    own = {"privacy": "local", "clip": 1e-4, "noise": 10.0, **SECRET}
    here = case(tmp_path, split, data, settings("fedavg", rounds=1), keep, **own)
    model = run_federation(here.grid, here.context).model.state_dict()
    bias = list(model)[-1]
    model[bias][0] = -math.inf
    payload = to_bytes({f"sent:params/{name}": t for name, t in model.items()})
    reply, answer = here.grid._sites[1000][1].answer(asked[0], payload)
    trained = {name.partition("/")[2]: t for name, t in from_bytes(answer).items()}
    moved = torch.cat([(trained[name] - t).flatten() for name, t in model.items() if name != bias])
    assert float(moved.std()) == pytest.approx(1e-3, rel=0.05)
    assert float(moved.abs().max()) < 1e-2
    assert reply["finite"], "whether the loss is finite would reveal without noise whether the site has that class"


@pytest.mark.parametrize(
    ("method", "changed", "line"),
    [
        ("scaffold", {}, "sends control variate"),
        ("fedgr", {}, "sends label presence"),
        ("median", {}, "does more than average"),
        ("feddisco", {"average": "samples"}, "sets the sites' weights"),
        ("fedavg", {"average": "samples"}, "needs 'uniform'"),
        ("fedavg", {"model": "resnet8"}, "running_mean' is averaged without a bound"),
    ],
)
def test_what_the_accounting_does_not_cover_is_refused(
    method: str, changed: dict[str, object], line: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    here = case(tmp_path, split, data, settings(method, **changed), privacy="central")
    with pytest.raises(UserError, match=line):
        run_federation(here.grid, here.context)


COUNTING = """import torch
from torch import Tensor, nn

class Counting(nn.Module):
    \"\"\"Counts the training samples that have ink, by pixel.\"\"\"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("places", torch.arange(64))
        self.register_buffer("inked", torch.zeros(64, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.inked += (x.flatten(1) > 0).sum(0)
        return self.layer(x.flatten(1))
"""


@pytest.mark.parametrize("privacy", ["local", "central"])
def test_counts_in_a_buffer_which_have_no_noise_do_not_leave(
    privacy: str, data: Path, split: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counting_ink.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = settings("fedavg", model="counting_ink:Counting")
    here = case(tmp_path, split, data, config, site={"packages": ("counting_ink",)}, privacy=privacy, **SECRET)
    with pytest.raises(UserError, match="round 1 had too few good updates"):
        run_federation(here.grid, here.context)
    answers = [message for message in here.grid.sent if message.kind == "train"]
    assert len(answers) == 3
    expected = f"training changed the model's buffer 'inked', which {privacy} privacy does not cover"
    assert all(message.payload == b"" and expected in message.facts["refused"] for message in answers)


def test_local_privacy_beside_metrics_without_noise_is_refused_with_all_that_it_needs() -> None:
    everything = {"share_loss": False, "site_metrics": "none", "evaluation": "server", "attempts": 1, "test_data": "x"}
    with pytest.raises(UserError) as raised:
        FederationSettings(sites=("a", "b"), privacy="local")
    assert str(raised.value).endswith(
        'expected share_loss = false, site_metrics = "none", evaluation = "server", attempts = 1, '
        "test_data = a path or a name"
    )
    for key in everything:
        rest = {name: value for name, value in everything.items() if name != key}
        with pytest.raises(UserError, match=f"expected {key} = [^,]*$"):
            FederationSettings(sites=("a", "b"), privacy="local", **rest)
    with pytest.raises(UserError, match=r"expected local_tests = false$"):
        FederationSettings(sites=("a", "b"), privacy="local", local_tests=True, **everything)
    FederationSettings(sites=("a", "b"), privacy="local", **everything)
