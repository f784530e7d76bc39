"""The messages that leave a site hold what the method declares, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Case, Sent, case, small_data

from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.contract import Contract
from fedskew.flower.disclosure import disclosures, learned_labels
from fedskew.flower.server_app import run_federation
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site import Site
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.methods import METHODS, make_method
from fedskew.methods.catalogue import Entry

SECRETIVE = [e.name for e in METHODS.values() if e.sends == "model, sample count" and e.reveals == "nothing"]
TRAINING_FACTS = {"round", "start", "visits", "finite", "loss"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.2, clients=3), seed=1)


def sent_by(
    method: str,
    folder: Path,
    data: Path,
    split: Federation,
    rounds: int = 1,
    changed: dict[str, object] | None = None,
    **own: object,
) -> list[Sent]:
    config = with_values(
        Config(),
        {
            "method": method,
            "rounds": rounds,
            "local_epochs": 1,
            "device": "cpu",
            "batch_size": 20,
            "partition.clients": 3,
            **(changed or {}),
        },
    )
    here = case(folder, split, data, config, **own)
    run_federation(here.grid, here.context)
    return here.grid.sent


def test_the_methods_that_keep_labels_home_are_those_one_expects() -> None:
    assert {"fedavg", "fedvls", "fedlmd", "fedlmd-tf", "fedntd", "fedprox", "fedrs", "fedlc", "moon"} <= set(SECRETIVE)
    assert not {"fedgr", "pkd", "fedconcat", "scaffold"} & set(SECRETIVE)


def assert_only_the_model_leaves(messages: list[Sent], split: Federation) -> None:
    model = next(from_bytes(m.payload) for m in messages if m.kind == "train")
    assert {name.partition("/")[0] for name in model} <= {"trained:params", "trained:buffers"}
    for message in messages:
        client = int(message.site.removeprefix("site-"))
        assert set(message.facts) <= (TRAINING_FACTS if message.kind == "train" else {"site", "samples", "versions"})
        assert not _holds(message, split.label_counts[client])


def test_fedgr_sends_which_labels_there_are_but_not_how_many(data: Path, split: Federation, tmp_path: Path) -> None:
    for message in sent_by("fedgr", tmp_path, data, split):
        client = int(message.site.removeprefix("site-"))
        assert not _holds(message, split.label_counts[client])
        if message.kind == "train":
            beside = {n: t for n, t in from_bytes(message.payload).items() if n.startswith("uplink/")}
            assert list(beside) == ["uplink/label_presence"]
            presence = beside["uplink/label_presence"]
            assert presence.dtype == torch.bool
            assert presence.tolist() == (split.label_counts[client] > 0).tolist()


def test_feddisco_sends_one_number_about_the_labels(data: Path, split: Federation, tmp_path: Path) -> None:
    for message in sent_by("feddisco", tmp_path, data, split):
        client = int(message.site.removeprefix("site-"))
        assert not _holds(message, split.label_counts[client])
        if message.kind == "train":
            beside = {n: t for n, t in from_bytes(message.payload).items() if n.startswith("uplink/")}
            shares = split.label_counts[client] / split.label_counts[client].sum()
            apart = sum(p * np.log(p * len(shares)) for p in shares if p > 0)
            assert {name: float(t) for name, t in beside.items()} == {"uplink/label_distance": pytest.approx(1 + apart)}


@pytest.mark.parametrize(
    "changed",
    [{"class_weights": "balanced"}, {"class_weights": {str(c): 2.0 for c in range(10)}, "batches": "balanced"}],
)
def test_weights_of_a_site_stay_there(
    changed: dict[str, object], data: Path, split: Federation, tmp_path: Path
) -> None:
    for message in sent_by("fedavg", tmp_path, data, split, changed=changed):
        assert not _holds(message, split.label_counts[int(message.site.removeprefix("site-"))])
        if message.kind == "train":
            assert {name.partition("/")[0] for name in from_bytes(message.payload)} <= _MODEL


def test_weights_from_the_federations_counts_send_them_in_every_round_and_the_app_says_so(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    config = {"class_weights": "counts"}
    messages = [m for m in sent_by("fedavg", tmp_path, data, split, rounds=2, changed=config) if m.kind == "train"]
    assert len(messages) == 6
    for message in messages:
        sent = from_bytes(message.payload)["uplink/weight_counts"].tolist()
        assert sent == split.label_counts[int(message.site.removeprefix("site-"))].tolist()
    contract = Contract.from_dataset(split.dataset)
    settings = FederationSettings(sites=("a", "b", "c"))
    lines = {
        value: disclosures(settings, contract, with_values(Config(), {"method": "fedavg", "class_weights": value}))
        for value in (None, "balanced", "counts")
    }
    assert lines[None] == lines["balanced"]
    assert "fedavg+class_weights=counts sends: model, sample count, label counts and the mean" in lines["counts"][0]
    assert any(line.endswith("the server learns about the site's labels: label counts") for line in lines["counts"])


def test_the_tests_of_a_site_s_own_model_are_reported_and_the_app_says_so(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """Ditto's sites train a second model, and FedRoD's keep a head. FedBABU's only fine-tune the final model."""
    contract, phrase = Contract.from_dataset(split.dataset), "; also how many predictions of its own model are correct"
    for method in ("fedavg", "ditto", "fedrod", "fedbabu", "fedper"):
        own = {"evaluation": "sites", "site_metrics": "total", "test_data": None}
        tests = [m.facts for m in sent_by(method, tmp_path / method, data, split, **own) if m.kind == "evaluate"]
        config = with_values(Config(), {"method": method})
        settings = FederationSettings(sites=("a", "b", "c"))
        untested = replace(settings, site_metrics="none", evaluation="server", test_data=str(data))
        lines = disclosures(settings, contract, config)
        tests_both = method in ("ditto", "fedrod")
        assert all("personal" in facts for facts in tests) == any(phrase in line for line in lines) == tests_both
        assert phrase not in str(disclosures(untested, contract, config))


def test_an_app_with_surveys_does_not_say_that_the_server_learns_nothing_about_labels() -> None:
    contract, config = Contract("table", ("a", "b"), (1,)), with_values(Config(), {"method": "fedavg"})
    settings = replace(FederationSettings(sites=("a", "b", "c")), survey=True, evaluate_only=True)
    (line,) = [line for line in disclosures(settings, contract, config) if "about the site's labels" in line]
    assert line.startswith("besides what updates or answers to surveys or tests of finished models can reveal, ")


def test_what_two_methods_reveal_is_listed_once() -> None:
    config = with_values(Config(), {"method": "logit-adjustment+ccvr"})
    settings = FederationSettings(sites=("a", "b", "c"))
    assert learned_labels(settings, config) == "label counts, prototypes, feature covariance"
    by_class = replace(settings, site_metrics="class")
    assert learned_labels(by_class, config).endswith("feature covariance, label counts of its test part")
    assert learned_labels(by_class, replace(config, method="fedavg")) == "label counts of its test part"
    assert learned_labels(settings, replace(config, method="fedavg")) == "nothing"


_MODEL = {"trained:params", "trained:buffers"}


@pytest.mark.parametrize("method", ["pkd", "fedconcat"])
def test_methods_that_declare_label_counts_send_them_once(
    method: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    messages = sent_by(method, tmp_path, data, split)
    told = [m for m in messages if _holds(m, split.label_counts[int(m.site.removeprefix("site-"))])]
    assert [m.kind for m in told] == ["survey"] * 3
    assert METHODS[method].reveals == "label counts"


def test_what_a_site_keeps_never_leaves_it(data: Path, split: Federation, tmp_path: Path) -> None:
    """SCAFFOLD's site keeps a control variate and sends its change."""
    payloads = [from_bytes(m.payload) for m in sent_by("scaffold", tmp_path, data, split) if m.kind == "train"]
    names = {name.partition("/")[2].partition("/")[0] for payload in payloads for name in payload}
    assert "control_change" in names
    assert "control" not in names
    assert list((tmp_path / "site-0" / "state").rglob("global.round-1.safetensors"))


def test_losses_and_tallies_stay_home_if_so_configured(data: Path, split: Federation, tmp_path: Path) -> None:
    messages = [m for m in sent_by("pkd", tmp_path, data, split, share_loss=False) if m.kind == "train"]
    assert all("loss" not in m.facts for m in messages)
    assert not any(name.startswith("tally") for m in messages for name in from_bytes(m.payload))


def test_totals_tell_nothing_by_class(data: Path, split: Federation, tmp_path: Path) -> None:
    messages = sent_by("fedavg", tmp_path, data, split, site_metrics="total", rounds=2)
    alone = [m for m in messages if m.kind == "evaluate"]
    along = [m.facts["tests"] for m in messages if m.kind == "train" and "tests" in m.facts]
    assert all(set(told) == {"right", "tested"} for told in [*(m.facts for m in alone), *along])
    assert (len(alone), len(along)) == (3, 3)  # the last model is tested by itself, those before it with a training
    assert all(m.payload == b"" for m in alone)


def test_by_default_no_label_count_of_training_or_test_data_leaves_a_site(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """The sites' tests are the evaluation, in total: with default settings and a default site.yaml."""
    chosen = FederationSettings(sites=("a", "b", "c"))
    assert SiteConfig(tmp_path, "a", "digits").metrics == chosen.site_metrics == "total"
    own = {"evaluation": chosen.evaluation, "site_metrics": chosen.site_metrics, "test_data": chosen.test_data}
    here = case(tmp_path, split, data, _fedavg(rounds=2), **own)
    result = run_federation(here.grid, here.context)
    tests = np.bincount(split.dataset.test.y, minlength=10)
    for message in here.grid.sent:
        assert not _holds(message, split.label_counts[int(message.site.removeprefix("site-"))])
        assert "confusion" not in {**message.facts, **message.facts.get("tests", {})}
    assert result.evaluation.totals == (round(result.accuracy * 3 * len(split.dataset.test)), 3 * int(tests.sum()))
    assert result.class_accuracy == (None,) * 10


@pytest.mark.parametrize("entry", METHODS.values(), ids=lambda entry: entry.name)
def test_what_is_sent_beside_the_model_is_declared(entry: Entry, data: Path, split: Federation, tmp_path: Path) -> None:
    """Nothing but the model leaves the sites of a method that declares nothing."""
    if entry.name in ("centralised", "local-only", "fedlaw"):
        pytest.skip("runs on one machine only")
    own: dict[str, Any] = {}
    if (personal := make_method(entry.name).personal) is not None:
        tested = {"evaluation": "sites", "site_metrics": "total", "test_data": None}
        own = {"changed": {"model": "resnet8"}, **({} if personal.has_global_model else tested)}
    if entry.name == "creff":
        own = {"changed": {"method.head_epochs": 1}}
    messages = sent_by(entry.name, tmp_path, data, split, **own)
    sent = {n for m in messages if m.kind == "train" for n in from_bytes(m.payload)}
    beside = {name for name in sent if name.startswith(("uplink/", "tally/"))}
    surveyed = any(m.kind == "survey" for m in messages)
    assert bool(beside or surveyed) == any(part.sends for part in entry.parts)
    if entry.name in SECRETIVE:
        assert_only_the_model_leaves(messages, split)


GOSSIP = """
from fedskew.methods import Objective
from fedskew.losses import cross_entropy


class Gossip(Objective):
    def loss(self, out, y, client):
        return cross_entropy(out.logits, y)

    def uplink(self, trained, client):
        return {"anything": client.label_counts}
"""


@pytest.mark.parametrize("method", ["gossiping:Gossip", "gossiping:Gossip+scaffold"])
def test_a_method_that_sends_what_it_does_not_declare_sends_nothing(
    method: str, data: Path, split: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method came with the federation's app. SCAFFOLD's declaration does not cover the objective's tensors."""
    (tmp_path / "gossiping.py").write_text(GOSSIP)
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {"method": method, "rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    here = case(tmp_path, split, data, with_values(Config(), values), site={"packages": ("gossiping",)}, attempts=1)
    with pytest.raises(UserError, match="too few good updates"):
        run_federation(here.grid, here.context)
    answers = [m for m in here.grid.sent if m.kind == "train"]
    assert all(m.payload == b"" for m in answers)
    assert all("'anything'" in m.facts["refused"] for m in answers)
    assert all("its part Gossip does not declare what it sends" in m.facts["refused"] for m in answers)


COUNTING = """
from fedskew.methods import Objective
from fedskew.losses import cross_entropy


class Counting(Objective):
    def loss(self, out, y, client):
        return cross_entropy(out.logits, y)

    def tally(self, out, y):
        return {f"of class {label}": (y == label).sum() for label in range(10)}


class Declared(Counting):
    sends = "samples per class"
    reveals = "label counts"
"""


@pytest.mark.parametrize(
    ("method", "share_loss", "is_sent"),
    [
        ("counting:Counting", True, None),
        ("counting:Counting+scaffold", True, None),
        ("counting:Counting", False, False),
        ("counting:Declared", True, True),
    ],
)
def test_counts_of_a_method_leave_only_if_they_are_declared(
    method: str,
    share_loss: bool,
    is_sent: bool | None,
    data: Path,
    split: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {"method": method, "rounds": 1, "local_epochs": 1, "device": "cpu", "partition.clients": 3}
    own: dict[str, Any] = {"site": {"packages": ("counting",)}, "attempts": 1, "share_loss": share_loss}
    here = case(tmp_path, split, data, with_values(Config(), values), **own)
    if is_sent is None:
        with pytest.raises(UserError, match="too few good updates"):
            run_federation(here.grid, here.context)
    else:
        run_federation(here.grid, here.context)
    answers = [m for m in here.grid.sent if m.kind == "train"]
    assert len(answers) == 3
    for message in answers:
        tensors = from_bytes(message.payload) if message.payload else {}
        assert bool(tensors) == (is_sent is not None)
        if is_sent is None:
            assert "its part Counting does not declare what it sends" in message.facts["refused"]
            assert message.facts["refused"].endswith("federation.share_loss = false, so that counts stay at the site")
        assert any(name.startswith("tally/") for name in tensors) == bool(is_sent)


def test_a_site_does_not_pass_over_what_it_does_not_know(data: Path, split: Federation, tmp_path: Path) -> None:
    """A later version's promise of privacy, say."""
    config = with_values(Config(), {"method": "fedavg", "rounds": 1, "device": "cpu", "partition.clients": 3})
    site, terms = _first_site(case(tmp_path, split, data, config), split)
    assert site.answer({"kind": "hello", "terms": terms}, b"")[0]["site"] == "site-0"
    with pytest.raises(UserError, match="the server sets 'secure', which this site does not know"):
        site.answer({"kind": "hello", "terms": terms, "secure": True}, b"")


def _first_site(here: Case, split: Federation) -> tuple[Site, dict[str, Any]]:
    """The first site, and the terms that its server sends with every question."""
    _, site = next(iter(here.grid._sites.values()))
    return site, {"contract": Contract.from_dataset(split.dataset).to_json(), "config": here.config.to_mapping()}


def _fedavg(**changed: object) -> Config:
    values = {"method": "fedavg", "rounds": 1, "device": "cpu", "partition.clients": 3}
    return with_values(Config(), values | changed)


TEST = {"kind": "evaluate", "labels": None, "detail": "total", "frozen": [], "model": "global", "round": 1, "notes": {}}
"""The request for a test of the model of a run of one round."""


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ({"kind": "survey", "predictions": False}, "sends a survey, which reveals label counts"),
        ({"kind": "census", "labels": [0]}, "sends a census of labels, which reveals label counts"),
        (TEST | {"labels": [0]}, "requests test results of some labels"),
        (TEST | {"detail": "class"}, "this site allows metrics: total"),
        (TEST | {"detail": "none"}, "requests metrics 'none'"),
        (TEST | {"round": 2}, "a test of model 'global' after round 2, which the run's configuration does not plan"),
        (TEST | {"model": "other"}, "a test of model 'other' after round 1"),
        (TEST | {"detail": "class", "scores": True}, "this site allows metrics: total"),
        (
            TEST | {"scores": True},
            "requests score histograms by class, which reveal label counts",
        ),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_site_refuses_questions_that_its_method_does_not_declare(
    question: dict[str, object], line: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    """Questions of a curious server, which fedskew's own server does not ask."""
    here = case(tmp_path, split, data, _fedavg(), site={"metrics": "total"})
    site, terms = _first_site(here, split)
    with pytest.raises(UserError, match=line):
        site.answer({"terms": terms, **question}, to_bytes({}))


@pytest.mark.parametrize("key", ["model", "method"])
def test_code_that_a_site_does_not_know_is_not_imported(
    key: str, data: Path, split: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    site, terms = _first_site(case(tmp_path, split, data, _fedavg()), split)
    value = "foreign:getcwd" if key == "model" else {"name": "fedavg+foreign:getcwd"}
    with pytest.raises(UserError, match=f"this site does not run the {key} .*foreign:getcwd"):
        site.answer({"kind": "hello", "terms": terms | {"config": terms["config"] | {key: value}}}, b"")
    assert not (tmp_path / "ran").exists()


def test_a_site_that_declines_to_report_its_tests_still_trains(data: Path, split: Federation, tmp_path: Path) -> None:
    here = case(tmp_path, split, data, _fedavg(rounds=2), site_metrics="total")
    site, _ = _first_site(here, split)
    site.config = replace(site.config, metrics="none")
    assert len(run_federation(here.grid, here.context).history) == 3
    with_tests = [m for m in here.grid.sent if m.kind == "train" and "tests" in m.facts]
    assert [list(m.facts["tests"]) for m in with_tests] == [["refused"], ["right", "tested"], ["right", "tested"]]


def _holds(message: Sent, counts: np.ndarray) -> bool:
    """Whether the message has these numbers anywhere."""
    lists = [value for value in message.facts.values() if isinstance(value, list)]
    tensors = from_bytes(message.payload).values() if message.payload else ()
    found = [np.asarray(v).ravel() for v in lists] + [t.numpy().ravel() for t in tensors if t.numel() == len(counts)]
    return any(len(v) == len(counts) and np.allclose(v.astype(float), counts) for v in found)
