"""Federations with secure aggregation: the plain model, from sums alone, whoever vanishes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Case, Meddle, Sent, answer_as_workers, case, small_data
from secure_sites import credentials, roster, secure_case

from fedskew.cli import main
from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.result import Result
from fedskew.experiment.run import run_prepared
from fedskew.export.card_disclosures import describe_disclosures
from fedskew.flower.app_folder import write_app
from fedskew.flower.app_review import make_approval
from fedskew.flower.approved_apps import add_approval
from fedskew.flower.certificates import node_key_pair
from fedskew.flower.contract import Contract
from fedskew.flower.planning import make_settings, read_app
from fedskew.flower.policy import Policy
from fedskew.flower.secure.identity import fingerprint
from fedskew.flower.secure.released_sums import ReleasedSums
from fedskew.flower.secure.requirements import require_sums_suffice
from fedskew.flower.secure.site import request_digest
from fedskew.flower.secure.terms import secure_terms
from fedskew.flower.server_app import _terms, run_federation
from fedskew.flower.settings import FederationSettings, read_settings
from fedskew.flower.site import Site
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.flower.versions import installed_versions
from fedskew.flower.wire import Facts, Garbled
from fedskew.methods import METHODS

SITES = 4
NAMES = [f"site-{client}" for client in range(SITES)]
TOLERANCE = 1e-6
"""As without secure aggregation: the fixed-point error is below 1e-10, so this is the rounding of float32."""
BY_SITES: dict[str, Any] = {"evaluation": "sites", "site_metrics": "total", "test_data": None}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def split(data: Path) -> Federation:
    return federation(str(data), Dirichlet(beta=0.5, clients=SITES), seed=0)


def settings(method: str | dict[str, Any] = "fedavg", **changed: object) -> Config:
    values = {"method": method, "rounds": 1, "local_epochs": 1, "engine": "plain", "device": "cpu", "model": "dnn"}
    return with_values(Config(), {"partition.clients": SITES, "batch_size": 20, **values, **changed})


def assert_same_model(some: Result, other: Result) -> None:
    tensors, others = some.model.state_dict(), other.model.state_dict()
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=TOLERANCE)


def vanishing(name: str, kind: str) -> Meddle:
    """A site that answers nothing from its first request of this kind in a round of training on."""
    gone = False

    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        nonlocal gone
        gone = gone or (site == name and asked["kind"] == kind)
        return ({"refused": "it is gone"}, b"") if gone and site == name else (facts, answer)

    return meddle


def test_the_server_comes_to_the_simulated_model_and_receives_only_masked_numbers(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    config = settings(rounds=2)
    cases = [secure_case(tmp_path / str(n), split, data, config, **BY_SITES) for n in range(2)]
    apart = run_federation(cases[0].grid, cases[0].context)
    together = run_prepared(prepare(config, split))
    assert_same_model(apart, together)
    assert [row.accuracy for row in apart.history] == [row.accuracy for row in together.history]
    for some, other in zip(apart.history[1:], together.history[1:], strict=True):
        assert some.loss == pytest.approx(other.loss, rel=1e-6)
        assert (some.visits, some.compute) == (other.visits, other.compute)
        assert some.sites is None
    card = describe_disclosures(apart)
    learned = "the mean of the sites' updates, their mean training loss and the total of their sample counts"
    assert f"In each round, the server learned {learned}." in card
    assert "The server learned no single site's values. Training was not differentially private." in card
    run_federation(cases[1].grid, cases[1].context)
    assert_only_masked(cases[0], cases[1], split)


@pytest.mark.parametrize(("weight", "loss"), [(0.0, 0.5), (1000.0, -0.5)])
def test_a_loss_beyond_the_largest_number_counts_as_this_number(
    weight: float, loss: float, data: Path, split: Federation, tmp_path: Path
) -> None:
    """With a large weight, the term that suppresses logits makes the loss negative."""
    method = {"name": "fedvls", "suppress_variant": "paper", "suppress_weight": weight}
    here = secure_case(tmp_path, split, data, settings(method=method, lr=1e-6), largest_change=0.5)
    assert run_federation(here.grid, here.context).history[1].loss == pytest.approx(loss)


def assert_only_masked(one: Case, other: Case, split: Federation) -> None:
    """Inspect every message that left a site, in two runs with the same data."""
    allowed = {
        "hello": {"site", "versions"},
        "secure_keys": {"sealing", "masking", "commitment", "signature"},
        "secure_shares": {"shares"},
        "train": {"layout"},
        "evaluate": {"layout"},
        "secure_confirm": {"signature"},
        "secure_unmask": {"seeds", "keys"},
    }
    assert {message.kind for message in one.grid.sent} == allowed.keys()
    layouts: dict[str, set[str]] = {}
    for message, again in zip(one.grid.sent, other.grid.sent, strict=True):
        assert message.facts.keys() == allowed[message.kind]
        if message.kind == "hello":
            assert message.facts == {"site": message.site, "versions": installed_versions()}
        elif message.kind in ("train", "evaluate"):
            layouts.setdefault(message.kind, set()).add(json.dumps(message.facts))
            masked, masked_again = (from_bytes(m.payload)["masked"] for m in (message, again))
            assert list(from_bytes(message.payload)) == ["masked"]
            assert bool((masked != masked_again).all()), "the same input is masked anew"
            assert_looks_random(masked.numpy())
        else:
            assert not message.payload
    assert all(len(found) == 1 for found in layouts.values()), "a layout says nothing about a site"


def assert_looks_random(numbers: np.ndarray) -> None:
    if len(numbers) < 1000:
        return
    bits = np.unpackbits(numbers.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 6 * 0.5 / len(numbers) ** 0.5


STEPS = ["secure_keys", "secure_shares", "train", "secure_confirm", "secure_unmask"]


@pytest.mark.parametrize("step", ["train", *(pytest.param(s, marks=pytest.mark.slow) for s in STEPS if s != "train")])
def test_a_site_that_vanishes_in_any_step_is_left_out_or_counted(
    step: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    here = secure_case(tmp_path, split, data, settings(), minimum=3, meddle=vanishing("site-1", step))
    apart = run_federation(here.grid, here.context)
    counts = step in ("secure_confirm", "secure_unmask")  # its update had arrived
    plain = case(tmp_path / "plain", split, data, settings(), minimum=3, meddle=None if counts else refusing_to_train)
    assert_same_model(apart, run_federation(plain.grid, plain.context))
    assert apart.history[-1].failed == ({} if counts else {"site-1": "it is gone"})


def refusing_to_train(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
    return ({"refused": "it is gone"}, b"") if site == "site-1" and asked["kind"] == "train" else (facts, answer)


@pytest.mark.parametrize("step", ["secure_unmask", *(pytest.param(s, marks=pytest.mark.slow) for s in STEPS[:-1])])
def test_below_the_threshold_the_run_ends_with_the_reason(
    step: str, data: Path, split: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        return ({"refused": "gone"}, b"") if site in NAMES[:2] and asked["kind"] == step else (facts, answer)

    here = secure_case(tmp_path, split, data, settings(), minimum=2, attempts=2, meddle=meddle)
    with caplog.at_level("INFO", "flwr"), pytest.raises(UserError, match="too few good updates in 2 attempts"):
        run_federation(here.grid, here.context)
    name = step.removeprefix("secure_").replace("train", "input")
    assert f"round 1: secure aggregation needs 3 sites in step '{name}', but 2 completed it" in caplog.text


def test_a_round_that_failed_once_is_repeated(data: Path, split: Federation, tmp_path: Path) -> None:
    refusals = iter(NAMES[:2])
    failing = set(refusals)

    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if asked["kind"] == "secure_confirm" and site in failing:
            failing.discard(site)
            return {"refused": "not now"}, b""
        return facts, answer

    here = secure_case(tmp_path, split, data, settings(), meddle=meddle)
    assert_same_model(run_federation(here.grid, here.context), run_prepared(prepare(settings(), split)))


def test_an_update_beyond_the_range_is_refused_by_its_site(data: Path, split: Federation, tmp_path: Path) -> None:
    here = secure_case(tmp_path, split, data, settings(lr=1.0), largest_change=1e-4, attempts=1)
    with pytest.raises(UserError, match="too few good updates"):
        run_federation(here.grid, here.context)
    (reason,) = {m.facts["refused"] for m in here.grid.sent if m.kind == "train"}
    assert reason == (
        "its update cannot be masked: it is not finite, or has a number that is too large (federation.largest_change, "
        "federation.most_samples)"
    ), "the server does not learn which tensor, nor how it came about"


def test_sites_that_report_no_tests_do_not_make_the_sum_that_of_one_site(
    data: Path, split: Federation, tmp_path: Path
) -> None:
    """If they added zeros, the total over four sites could be the exact result of the only one that reports."""
    cases = [secure_case(tmp_path / str(n), split, data, settings(), attempts=1, minimum=3, **BY_SITES) for n in (1, 2)]
    for without_tests, here in enumerate(cases, start=1):
        for _, site in list(here.grid._sites.values())[:without_tests]:
            site.config = replace(site.config, metrics="none")
    history = run_federation(cases[0].grid, cases[0].context).history
    assert [row.evaluation.samples for row in history if row.evaluation] == [3 * len(split.dataset.test)] * 2
    with pytest.raises(UserError, match=r"up in 1 attempt: .* needs 3 sites in step 'input', but 2 completed it"):
        run_federation(cases[1].grid, cases[1].context)
    assert not any(message.kind in ("secure_confirm", "secure_unmask") for message in cases[1].grid.sent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changed", "own"),
    [
        ("fedavg", {"average": "uniform"}, {}),
        ("fedavg", {"model": "resnet8"}, {}),
        ("fedvls+fedavgm", {"clients_per_round": 3, "rounds": 3}, BY_SITES),
        ("moon+fedadam", {"rounds": 2}, {"share_loss": False}),
        ("fedacg", {"rounds": 2}, {}),
        ("fedper", {"rounds": 2}, BY_SITES),
        ("ditto", {"rounds": 2}, BY_SITES),
        ("fedlmd-switch", {"rounds": 2}, {}),
    ],
)
def test_other_methods_and_settings_come_to_the_same_model(
    method: str, changed: dict[str, object], own: dict[str, Any], data: Path, split: Federation, tmp_path: Path
) -> None:
    config = settings(method, **changed)
    here = secure_case(tmp_path, split, data, config, **own)
    assert_same_model(run_federation(here.grid, here.context), run_prepared(prepare(config, split)))


def ask(here: Case, kind: str, changed: Facts | None = None, **facts: Any) -> Facts:
    """Ask the first site. `changed` are terms of secure aggregation that the server changes."""
    contract = read_settings(dict(here.context.run_config))[1]
    config = with_values(here.config, {"data": "federation"})
    terms = _terms(contract, config) | secure_terms(here.settings, here.config)
    if changed:
        terms["secure_aggregation"] = {**terms["secure_aggregation"], **changed}
    return here.grid._sites[1000][1].answer({"kind": kind, "terms": terms, **facts}, b"")[0]


def allow(here: Case, policy: Policy) -> None:
    for _, site in here.grid._sites.values():
        site.config = replace(site.config, policy=policy)


@pytest.fixture
def here(data: Path, split: Federation, tmp_path: Path) -> Case:
    return secure_case(tmp_path, split, data, settings())


def test_a_site_answers_nothing_in_the_plain_form(here: Case) -> None:
    assert ask(here, "hello")["site"] == "site-0"
    numbers = {"client": 0, "stage": 0, "kept": None, "oldest": 0, "key": {"seed": 0, "model": 0, "round": 0}}
    work = {**numbers, "run": "a", "notes": {}, "companions": [], "local": {}, "share_loss": False, "noise": None}
    survey = {"predictions": False}
    for kind, facts in (("train", work), ("evaluate", {}), ("census", {}), ("survey", survey), ("column_sums", {})):
        with pytest.raises(UserError, match=f"requests '{kind}' without secure aggregation"):
            ask(here, kind, **facts)


def test_terms_that_do_not_protect_a_site_are_refused(here: Case) -> None:
    keys = here.settings.node_keys or {}
    with pytest.raises(UserError, match="needs 2 sites for a sum; this site expects at least 3"):
        ask(here, "hello", {"needed": 2})
    with pytest.raises(UserError, match="has 2 sites; expected at least 3"):
        ask(here, "hello", {"roster": {name: keys[name] for name in NAMES[:2]}})
    with pytest.raises(UserError, match="the same key for 'site-1' and 'site-2'"):
        ask(here, "hello", {"roster": {**keys, "site-2": f"{keys['site-1']} south"}})
    with pytest.raises(UserError, match=r"the key of 'site-0' in federation\.node_keys cannot be read"):
        ask(here, "hello", {"roster": {**keys, "site-0": "ssh-ecdsa other"}})
    for values in ({"largest_change": 0.0}, {"largest_change": float("inf")}, {"most_samples": -1}, {"roster": 3}):
        with pytest.raises(UserError, match="terms of secure aggregation cannot be read"):
            ask(here, "hello", values)
    with pytest.raises(UserError, match="leave 0 bits after the binary point; expected at least 16"):
        ask(here, "hello", {"largest_change": 1e12})
    with pytest.raises(UserError, match="does not have the public key of this site's node key for 'site-0'"):
        ask(here, "hello", {"roster": {**keys, "site-0": node_key_pair("other")[1].decode()}})


def test_where_a_damaged_node_key_is_stays_at_the_site(here: Case, tmp_path: Path) -> None:
    """Only the text of other refusals leaves the site."""
    _, site = here.grid._sites[1000]
    site.config = replace(site.config, keys=str(tmp_path / "absent"))
    with pytest.raises(StateUnusable, match="absent"):
        ask(here, "hello")


def test_a_signing_key_that_others_can_read_is_refused(here: Case, tmp_path: Path) -> None:
    _, site = here.grid._sites[1000]
    key = tmp_path / "keys" / "node.key"
    key.parent.mkdir()
    key.write_bytes(credentials(tuple(NAMES)).node("site-0").private.read_bytes())
    site.config = replace(site.config, keys=str(key.parent))
    key.chmod(0o640)
    with pytest.raises(StateUnusable, match=r"node\.key can be read by others, who could pose as this site; chmod 600"):
        ask(here, "hello")
    key.chmod(0o600)
    assert ask(here, "hello")["site"] == "site-0"


def test_a_site_can_require_secure_aggregation(here: Case, data: Path, split: Federation, tmp_path: Path) -> None:
    policy = Policy(require=("secure-aggregation",))
    plain = case(tmp_path / "plain", split, data, settings(), site={"policy": policy})
    with pytest.raises(UserError, match=r"only in runs with secure aggregation \(policy.require"):
        ask(plain, "hello")
    allow(here, policy)
    with pytest.raises(UserError, match="has approved no app, so the server could send any keys"):
        ask(here, "hello")


def test_a_site_takes_the_other_sites_keys_from_the_app_that_it_approved(
    here: Case, split: Federation, tmp_path: Path
) -> None:
    contract = Contract.from_dataset(split.dataset)
    app = write_app(tmp_path / "app", here.settings, contract, here.config)
    allow(here, Policy(require=("secure-aggregation",)))
    (tmp_path / "site-0").mkdir(exist_ok=True)
    add_approval(tmp_path / "site-0", make_approval(app, "site-0"))
    assert ask(here, "hello")["site"] == "site-0"
    keys = dict(here.settings.node_keys or {})
    for changed in ({"roster": {**keys, "site-1": keys["site-2"]}}, {"needed": 4}, {"largest_change": 1.0}):
        with pytest.raises(UserError, match="differs from every app that this site approved: secure_aggregation"):
            ask(here, "hello", changed)


def test_a_request_is_unmasked_for_one_set_of_sites_only(tmp_path: Path) -> None:
    released = ReleasedSums(tmp_path / "state")
    released.record("round 1", "one", ["a", "b", "c"])
    ReleasedSums(tmp_path / "state").record("round 1", "one", ["a", "b", "c"])
    released.record("round 1", "two", ["a", "b"])
    with pytest.raises(
        UserError, match="already helped to unmask the sum over a, b, c for the same request, not over a, b; the two"
    ):
        ReleasedSums(tmp_path / "state").record("round 1", "one", ["a", "b"])
    file = tmp_path / "state" / "released-sums.jsonl"
    file.write_text(file.read_text() + '{"request": "thr')  # a process was killed here
    released.record("round 2", "three", ["a", "c"])
    with pytest.raises(UserError, match="already helped to unmask"):
        released.record("round 2", "three", ["a", "b"])


def test_few_different_requests_are_unmasked_for_the_same_round(tmp_path: Path) -> None:
    """A server could change a bit of the model, which hardly changes the updates, and ask other sites each time."""
    for request, sites in (("model", "abc"), ("nearly the same", "ab"), ("model", "abc")):
        ReleasedSums(tmp_path).record("round 1", request, list(sites))
    with pytest.raises(UserError, match="already helped to unmask 2 different sums for round 1"):
        ReleasedSums(tmp_path).record("round 1", "nearly the same again", ["a", "c"])
    ReleasedSums(tmp_path).record("round 2", "nearly the same again", ["a", "c"])


def test_a_session_keeps_the_terms_with_which_it_began(here: Case) -> None:
    """Another approved app may need fewer sites for a sum."""
    ask(here, "secure_keys", session="s")
    with pytest.raises(UserError, match="continues a session with other terms"):
        ask(here, "secure_shares", {"needed": 4}, session="s", keys={})
    ask(here, "secure_keys", session="t")
    with pytest.raises(Garbled, match="does not have this site's keys"):
        ask(here, "secure_shares", session="t", keys={})


@pytest.mark.parametrize("method", ["fedavg", "moon"])
def test_sums_of_the_same_round_are_counted_whatever_the_server_changes(
    method: str, data: Path, split: Federation, tmp_path: Path
) -> None:
    """A dishonest server adds a tensor that nobody uses, so that each request differs.

    With MOON, it lets the sites continue from their saved states, which the common part of a request does not show.
    """
    refused: set[str] = set()
    for attempt in range(3):
        here = secure_case(tmp_path / str(attempt), split, data, settings(method), attempts=1)
        for name, site in here.grid._sites.values():
            site.config = replace(site.config, state=str(tmp_path / "states" / name))
            change = padded(site, attempt) if method == "fedavg" else continued(site, attempt)
            site.answer = change  # type: ignore[method-assign]
        with contextlib.suppress(UserError):
            run_federation(here.grid, here.context)
        refused |= {message.facts["refused"] for message in here.grid.sent if "refused" in message.facts}
        assert bool(refused) == (attempt == 2)
    (reason,) = refused
    assert reason.startswith("this site has already helped to unmask 2 different sums for round 1 of stage ")


def test_a_server_that_sends_one_site_another_model_gets_no_sum(data: Path, split: Federation, tmp_path: Path) -> None:
    """If all other sites received a model whose updates the server knows, the sum would be that site's update."""
    here = secure_case(tmp_path, split, data, settings(), attempts=1, minimum=3)
    for number, (_, site) in enumerate(here.grid._sites.values()):
        site.answer = padded(site, number % 2)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="too few good updates"):
        run_federation(here.grid, here.context)
    refused = [message.facts.get("refused") for message in here.grid.sent if message.kind == "secure_unmask"]
    assert refused == ["2 sites confirmed the sum; this site needs at least 3"] * 4


def test_the_digest_of_a_request_covers_all_that_sites_have_in_common() -> None:
    facts = {"kind": "train", "terms": {"config": {"lr": 0.1}}, "local": {"epochs": 1}, "key": {"round": 0}, "stage": 0}
    own = {"client": 0, "kept": None, "oldest": 0, "secure": {"session": "s"}}
    for name in facts | own:
        is_same = request_digest({**facts, **own, name: "other"}, b"model") == request_digest(facts | own, b"model")
        assert is_same == (name in own), name
    assert request_digest(facts, b"model") != request_digest(facts, b"another model")


def padded(site: Site, number: int) -> Callable[[Facts, bytes], tuple[Facts, bytes]]:
    """Add a tensor to the requests for training, before the site receives them."""
    answer = site.answer

    def answer_padded(facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
        if facts["kind"] == "train":
            payload = to_bytes({**from_bytes(payload), "padding": torch.tensor(number)})
        return answer(facts, payload)

    return answer_padded


def continued(site: Site, attempt: int) -> Callable[[Facts, bytes], tuple[Facts, bytes]]:
    """From the second attempt on, let the site train from the state that it saved in the attempt before."""
    answer = site.answer
    return lambda facts, payload: answer(facts | ({"kept": attempt or None} if "kept" in facts else {}), payload)


def test_a_repeated_round_with_other_sites_is_refused(data: Path, split: Federation, tmp_path: Path) -> None:
    def run_with(folder: str, meddle: Meddle | None) -> list[Sent]:
        here = secure_case(tmp_path / folder, split, data, settings(), minimum=3, attempts=1, meddle=meddle)
        for name, site in here.grid._sites.values():
            site.config = replace(site.config, state=str(tmp_path / "states" / name))
        with contextlib.suppress(UserError):
            run_federation(here.grid, here.context)
        return here.grid.sent

    assert not any("refused" in message.facts for message in run_with("one", None))
    again = run_with("two", vanishing("site-1", "train"))
    refused = [m.facts["refused"] for m in again if m.kind == "secure_unmask"]
    assert len(refused) == 3
    assert all(
        "already helped to unmask the sum over site-0, site-1, site-2, site-3 for the same request" in reason
        for reason in refused
    )


def test_a_worker_with_an_open_session_does_not_end(here: Case, tmp_path: Path) -> None:
    """It would lose the secrets without which the others cannot unmask the sum."""
    answer_as_workers(here, Path(here.settings.test_data or ""), dict.fromkeys(NAMES, "idle: 5\n"))
    for name in NAMES:
        file = here.folder / name / "site.yaml"
        file.write_text(file.read_text() + f"keys: {credentials(tuple(NAMES)).node(name).folder}\n")
    patience: dict[str, float | None] = {}

    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        patience[asked["kind"]] = here.grid._sites[1000 + NAMES.index(site)][1].patience  # type: ignore[attr-defined]
        return facts, answer

    here.grid.meddle = meddle
    run_federation(here.grid, here.context)
    assert patience == {kind: 5 if kind in ("hello", "secure_unmask") else 3600 for kind in ("hello", *STEPS)}


def test_a_site_whose_configuration_changes_during_a_session_says_so(here: Case) -> None:
    answer_as_workers(here, Path(here.settings.test_data or ""))
    for name in NAMES:
        file = here.folder / name / "site.yaml"
        file.write_text(file.read_text() + f"keys: {credentials(tuple(NAMES)).node(name).folder}\n")

    def meddle(site: str, asked: Facts, facts: Facts, answer: bytes) -> tuple[Facts, bytes]:
        if (site, asked["kind"]) == ("site-1", "secure_shares"):
            os.utime(here.folder / "site-1" / "site.yaml", ns=(0, 0))
        return facts, answer

    here.grid.meddle = meddle
    run_federation(here.grid, here.context)
    (reason,) = (message.facts["refused"] for message in here.grid.sent if "refused" in message.facts)
    assert "does not know the session: its worker has been started again, its data or its site.yaml have" in reason


def test_a_worker_waits_for_no_further_step_of_a_session_in_which_it_failed(here: Case) -> None:
    """The server leaves the site out of the session. One site's policy refuses to train, another gets no keys."""
    answer_as_workers(here, Path(here.settings.test_data or ""), dict.fromkeys(NAMES, "idle: 5\n"))
    for name in NAMES:
        file = here.folder / name / "site.yaml"
        own = "policy: {noise: 1}\n" if name == "site-1" else ""
        file.write_text(file.read_text() + own + f"keys: {credentials(tuple(NAMES)).node(name).folder}\n")
    third = here.grid._sites[1002][1]
    answer = third.answer

    def answer_without_keys(facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
        return answer(facts | ({"keys": {}} if "keys" in facts else {}), payload)

    third.answer = answer_without_keys  # type: ignore[method-assign]
    patience: dict[tuple[str, str], float | None] = {}

    def meddle(site: str, asked: Facts, facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
        handler = here.grid._sites[1000 + NAMES.index(site)][1]
        patience[site, asked["kind"]] = handler.patience  # type: ignore[attr-defined]
        return facts, payload

    here.grid.meddle = meddle
    with pytest.raises(UserError, match="too few good updates"):
        run_federation(here.grid, here.context)
    refused = {(site, kind) for site, kind in patience if kind != "hello" and patience[site, kind] == 5}
    assert refused == {("site-1", "train"), ("site-2", "secure_shares")}
    assert set(patience.values()) == {5, 3600}


def test_a_worker_whose_reply_cannot_be_recorded_waits_for_no_further_step(here: Case) -> None:
    """The reply does not leave, so the server leaves the site out of the session."""
    answer_as_workers(here, Path(here.settings.test_data or ""), dict.fromkeys(NAMES, "idle: 5\n"))
    for name in NAMES:
        file = here.folder / name / "site.yaml"
        file.write_text(file.read_text() + f"keys: {credentials(tuple(NAMES)).node(name).folder}\n")
    log, handler = here.folder / "site-1" / "state" / "audit.jsonl", here.grid._sites[1001][1]
    patience: list[tuple[str, float | None]] = []

    def meddle(site: str, asked: Facts, facts: Facts, payload: bytes) -> tuple[Facts, bytes]:
        if site == "site-1":
            patience.append((asked["kind"], handler.patience))  # type: ignore[attr-defined]
            if asked["kind"] == "secure_keys" and log.is_file():
                log.unlink()
                log.mkdir()
        return facts, payload

    here.grid.meddle = meddle
    with pytest.raises(UserError, match="too few good updates"):
        run_federation(here.grid, here.context)
    assert patience[:3] == [("hello", 5), ("secure_keys", 3600), ("secure_shares", 5)]
    assert set(patience[3:]) == {("secure_keys", 5)}


def secure_settings(**own: Any) -> FederationSettings:
    return make_settings(NAMES, {"secure_aggregation": True, "node_keys": roster(NAMES), **own})


@pytest.mark.parametrize("method", METHODS)
def test_methods_that_need_single_updates_are_refused_by_name(method: str, split: Federation) -> None:
    contract, config = Contract.from_dataset(split.dataset), settings(method)
    if METHODS[method].secure_aggregation:
        require_sums_suffice(secure_settings(), contract, config)
    else:
        with pytest.raises(UserError, match=f"^{method} .*, so it cannot use secure aggregation"):
            require_sums_suffice(secure_settings(), contract, config)


def test_the_methods_for_secure_aggregation_are_those_one_expects() -> None:
    secure = {name for name, entry in METHODS.items() if entry.secure_aggregation}
    assert {"fedavg", "fedavgm", "fedadam", "fedprox", "fedvls", "fedlmd", "moon", "fedper", "fedacg"} <= secure
    refused = {"median", "trimmed-mean", "norm-clipping", "scaffold", "fedgr", "pkd", "fedconcat", "fednova"}
    assert not (refused | {"feddisco", "fedexp", "feddyn", "fedgf", "fpl", "afl", "local-only"}) & secure


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"site_metrics": "class"}, 'federation.site_metrics is "class", which needs single sites\' results'),
        ({"local_tests": True}, "federation.local_tests is true, which needs single sites' results"),
        ({"privacy": "central"}, 'federation.privacy is "central", which needs single sites\' results'),
        (
            {"secure_threshold": 0.5},
            "federation.secure_threshold is 0.5; expected a finite number of at least 0.666667",
        ),
        ({"node_keys": {"site-0": "x"}}, "federation.node_keys has no key of 'site-1'"),
        (
            {"node_keys": {**roster(NAMES), "site-2": "ecdsa-sha2-nistp384 !!!"}},
            "the key of 'site-2' in federation.node_keys cannot be read",
        ),
        (
            {"node_keys": {**roster(NAMES), "west": roster(NAMES)["site-1"]}},
            "federation.node_keys has a key of 'west', which is not one of federation.sites; expected one key per site",
        ),
        ({"largest_change": 1e12}, "leave 0 bits after the binary point; expected smaller values"),
        ({"largest_change": 1e305}, "bits after the binary point; expected smaller values"),
        (
            {"node_keys": roster(NAMES) | {"site-3": f"{roster(NAMES)['site-1']}  another-comment"}},
            "federation.node_keys has the same key for 'site-1' and 'site-3'; expected a key per site",
        ),
    ],
)
def test_settings_that_need_more_than_sums_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        secure_settings(**values)
    with pytest.raises(UserError, match="at least 3 sites for secure aggregation"):
        make_settings(NAMES[:2], {"secure_aggregation": True, "node_keys": roster(NAMES)})


def test_other_settings_that_need_single_sites_are_refused(split: Federation) -> None:
    contract = Contract.from_dataset(split.dataset)
    with pytest.raises(UserError, match="clients_per_round is 2; secure aggregation needs at least 3"):
        require_sums_suffice(secure_settings(), contract, settings(clients_per_round=2))
    with pytest.raises(UserError, match="class_weights=counts sends label counts, so it cannot"):
        require_sums_suffice(secure_settings(), contract, settings(class_weights="counts"))
    with pytest.raises(UserError, match="column sums are sent by single sites"):
        require_sums_suffice(secure_settings(), replace(contract, column_sums=True), settings())


def test_an_app_with_secure_aggregation_lists_the_sites_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = credentials(tuple(NAMES)).folder / "sites"
    command = ["federate", "init", str(tmp_path / "app"), "--sites", ",".join(NAMES), "--classes", "a,b"]
    command += ["--shape", "1,8,8", "--secure-aggregation", "--method", "fedprox"]
    assert main([*command, "--method", "median", "--node-keys", str(keys)]) == 2
    assert (
        "median uses individual updates on the server, so it cannot use secure aggregation" in capsys.readouterr().err
    )
    assert main(command) == 2
    assert "--secure-aggregation and --node-keys go together" in capsys.readouterr().err
    assert main([*command, "--node-keys", str(tmp_path)]) == 2
    assert "has no public key of 'site-0'; expected site-0/node.pub or site-0.pub" in capsys.readouterr().err
    assert main([*command, "--node-keys", str(keys)]) == 0
    read = read_app(tmp_path / "app")[0]
    assert read.secure_aggregation
    assert read.node_keys == roster(NAMES)
    commented = {name: f"{key} {name}\n" for name, key in roster(NAMES).items()}
    assert secure_settings(node_keys=commented).node_keys == roster(NAMES)
    shown = (tmp_path / "app" / "README.md").read_text()
    assert "- fedprox sends only masked numbers: from at least 3 sites per round, the server learns the mean" in shown
    assert f"node key of site-2: {fingerprint(roster(NAMES)['site-2'])}" in shown
