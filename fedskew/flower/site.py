"""A site, which answers the server's requests from its own data. It reports nothing that was not requested.

    hello        check the server's version and the site's data; report the number of samples and the versions
    census       report how many samples have certain labels
    column_sums  report sums of a table's columns, from which the server fits the encoding of the table
    survey       report label counts and mean predictions per class, or answer the survey of a method's stage
    train        train the received model, and test it if the server requests that
    evaluate     test the received model
    describe     report label counts and ranges of columns, for `fedskew federate survey`
    score        report score histograms of a finished model, for `fedskew federate evaluate`

`request_checks.py` and the site's policy (`policy.py`) decide which of these requests the site refuses.
`secure/site.py` answers the steps of secure aggregation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedskew.data.column_sums import CategorySums, ColumnSums, NumberSums, sum_columns
from fedskew.data.federation import Federation
from fedskew.data.table_encoding import RawTable
from fedskew.engine import arithmetic, survey, train_clients
from fedskew.errors import UserError
from fedskew.experiment.config import Config, config_hash
from fedskew.flower.contract import Contract
from fedskew.flower.declared_tensors import refuse_undeclared
from fedskew.flower.model_message import read_model, result_tensors
from fedskew.flower.policy import Policy
from fedskew.flower.privacy import private_change, refuse_changed_buffers
from fedskew.flower.releases import Release, read_release
from fedskew.flower.request_checks import (
    planned_rounds,
    require_agreed_evaluation,
    require_agreed_sums,
    require_agreed_survey,
    require_approved,
    require_covered,
    require_covered_survey,
    require_declared_counts,
    require_own_number,
    require_planned_label_survey,
    require_planned_round,
    require_planned_survey,
    require_planned_training,
    require_same_run,
)
from fedskew.flower.request_form import require_survey_form, require_training_form
from fedskew.flower.site_answers import Answer, SiteAnswers
from fedskew.flower.site_config import SiteConfig, data_warnings, mention
from fedskew.flower.site_ledger import SiteLedger
from fedskew.flower.site_run import SiteRun, hash_data_form
from fedskew.flower.site_state import SiteState
from fedskew.flower.site_survey import describe_site
from fedskew.flower.site_tests import run_local_tests, run_test, run_test_or_refuse, score_histograms
from fedskew.flower.site_trainings import SiteTrainings, describe_round, training_request
from fedskew.flower.start_weights import keep_start
from fedskew.flower.tensors import from_bytes, to_bytes
from fedskew.flower.versions import installed_versions, read_versions, version_problem
from fedskew.flower.wire import Facts, digest
from fedskew.methods import Stage, Tensors, pack, unpack

if TYPE_CHECKING:
    from fedskew.flower.secure.site import SecureSite

_ALLOWED_FACTS = {
    "hello": {"refused", "versions"},
    "census": {"labels"},
    "train": {"run", "client", "stage", "notes", "companions", "local", "key", "kept", "oldest", "share_loss", "noise"}
    | {"tests", "local_tests", "central_noise", "secure"},
    "evaluate": {"labels", "detail", "frozen", "model", "round", "notes", "scores", "run", "kept", "secure"},
    "survey": {"predictions", "client", "stage", "notes", "local", "key"},
    "column_sums": set(),
    "secure_keys": {"session"},
    "secure_shares": {"session", "keys"},
    "secure_confirm": {"session", "contributors"},
    "secure_unmask": {"session", "signatures"},
    "describe": set(),
    "score": set(),
}
"""The facts that each kind of request may have besides `kind` and `terms`. A request with an unknown fact is refused,
because the fact may be a privacy setting of a later version."""


class Site:
    """One site. The data and the model stay in memory between messages."""

    def __init__(self, config: SiteConfig, log: Callable[[str], object] = str) -> None:
        """`log` receives lines for the site's log. The default, `str`, drops them."""
        self.config, self._log = config, log
        self._data: dict[str, Federation] = {}
        """The site's data in the form of the last run's contract. The key is that contract."""
        self._runs: dict[str, SiteRun] = {}
        """The last run. The key is its terms."""
        self._secure: SecureSite | None = None
        """The sessions of secure aggregation, if a run uses it."""

    def answer(self, facts: Facts, payload: bytes) -> Answer:
        """Answer one message."""
        try:
            return self._answer(facts, payload)
        except Exception:
            self.end_session(facts)
            raise

    def _answer(self, facts: Facts, payload: bytes) -> Answer:
        handlers: dict[str, Callable[[SiteRun, Facts, bytes], Answer]] = {
            "hello": self._report_samples,
            "census": self._report_samples,
            "train": self._train,
            "evaluate": self._evaluate,
            "survey": self._survey,
            "column_sums": self._column_sums,
            "describe": self._describe,
            "score": self._score,
        }
        if facts.get("kind") not in _ALLOWED_FACTS:
            raise UserError(f"the server requests {facts.get('kind')!r}; expected one of {', '.join(handlers)}")
        _check_form(facts)
        self.config.policy.require_request(facts, datetime.now())  # the hours are local time
        is_secure = facts["terms"].get("secure_aggregation") is not None
        self.config.policy.require_secure_aggregation(is_secure)
        require_approved(facts, self.config)
        run_name = config_hash(Config.from_mapping(facts["terms"]["config"]))
        self._ledger.require_time(run_name)
        began = time.monotonic()
        try:
            if facts["kind"] == "hello" and payload:  # the weights that the run starts from
                keep_start(self.config.state_folder, Config.from_mapping(facts["terms"]["config"]), payload)
            run = self._current_run(facts["terms"])
            with arithmetic(run.config.precision):
                if is_secure:
                    return self._secure_site().answer(run, facts, payload, lambda f, p: handlers[f["kind"]](run, f, p))
                if facts["kind"] not in handlers or "secure" in facts:
                    raise UserError("the server requests a step of secure aggregation, which the run does not use")
                return handlers[facts["kind"]](run, facts, payload)
        finally:
            self._ledger.add_time(run_name, time.monotonic() - began)

    def end_session(self, facts: Facts) -> None:
        """End the session of secure aggregation that a request belongs to, because the request has failed."""
        if self._secure is not None:
            self._secure.end_session(facts)

    @property
    def has_open_session(self) -> bool:
        """Whether a session of secure aggregation has begun and not ended."""
        return self._secure is not None and self._secure.has_open_session

    def _secure_site(self) -> SecureSite:
        from fedskew.flower.secure.site import SecureSite  # imported late, because most runs do not use it

        self._secure = self._secure or SecureSite(self.config, self._log)
        return self._secure

    def privacy_spent(self) -> Facts:
        """The privacy that all updates of this site have spent."""
        return self._ledger.spent()

    @property
    def _ledger(self) -> SiteLedger:
        return SiteLedger(self.config.state_folder, self.config.policy)

    def _current_run(self, terms: Facts) -> SiteRun:
        key = json.dumps(terms, sort_keys=True)
        if key not in self._runs:
            contract = Contract.from_json(terms["contract"])
            federation = self._read_data(contract)
            self._runs = {key: SiteRun(self.config, federation, terms)}
            for warning in mention(data_warnings(federation.dataset, contract)):
                self._log(f"warning: {warning}")
        return self._runs[key]

    def _read_data(self, contract: Contract) -> Federation:
        key = json.dumps(contract.to_json(), sort_keys=True)
        if key not in self._data:
            self._data = {key: self.config.federation(contract)}
        return self._data[key]

    def _report_samples(self, run: SiteRun, facts: Facts, _: bytes) -> Answer:
        """Report the number of training samples. With `labels`, report how many of them have these labels.

        The reply to a greeting also has the site's versions of fedskew, torch and Flower.
        """
        labels = facts.get("labels")
        if labels is None:
            samples = int(run.held(None).sizes[0])
        else:
            require_declared_counts("census of labels", run.method)
            run.held(labels)  # raises an error if a label is not one of the dataset's classes
            samples = sum(self._label_counts(run)[label] for label in set(labels))
        reply = {"site": self.config.name, "samples": samples}
        return reply | ({"versions": installed_versions()} if facts["kind"] == "hello" else {}), b""

    def _label_counts(self, run: SiteRun) -> list[int]:
        """Count the labels once per run. A row that is added later does not change what the site reports."""

        def count() -> Answer:
            return {"counts": run.held(None).label_counts[0].tolist()}, b""

        question, request = f"the number of samples per label in run {run.name}", {"contract": run.contract_hash}
        counts: list[int] = SiteAnswers(self.config.state_folder).answer_once(question, request, count)[0]["counts"]
        return counts

    def _column_sums(self, run: SiteRun, facts: Facts, _: bytes) -> Answer:
        """Report sums of the columns, once for the same classes and columns. Later rows do not change them."""
        contract = Contract.from_json(facts["terms"]["contract"])
        require_agreed_sums(contract, self.config)

        def compute() -> Answer:
            return {"columns": [asdict(sums) for sums in sum_site_columns(run.held(None), self.config.policy)]}, b""

        return SiteAnswers(self.config.state_folder).answer_once(*_ask_column_sums(contract), compute)

    def _describe(self, run: SiteRun, facts: Facts, _: bytes) -> Answer:
        """Describe the data as the site's policy says, once for the same classes and columns."""
        rules = require_agreed_survey(self.config.policy)
        contract = Contract.from_json(facts["terms"]["contract"])

        def compute() -> Answer:
            return describe_site(run.held(None), read_raw_table(self.config, contract), rules), b""

        return SiteAnswers(self.config.state_folder).answer_once(*_ask_survey(contract), compute)

    def _score(self, run: SiteRun, _: Facts, payload: bytes) -> Answer:
        """Test a finished model. The policy limits the number of models for the same classes and columns."""
        rules = require_agreed_evaluation(run.method, self.config.policy)
        tensors = run.on_device(from_bytes(payload))

        def compute() -> Answer:
            return {}, run.score(read_model("sent", tensors))

        question = f"tests of finished models on the data {run.data_form}"
        request = {"config": run.name, "contract": run.contract_hash, "model": digest(payload)}
        answers = SiteAnswers(self.config.state_folder)
        _, histograms = answers.answer_once(question, request, compute, rules.models)
        return {"by_site": rules.by_site}, histograms  # as the policy says now, also for a recorded answer

    def _train(self, run: SiteRun, facts: Facts, payload: bytes) -> Answer:
        """Train the received model.

        The reply has the trained model and the other tensors that the method sends. If losses are shared, the reply
        also has the loss and, without secure aggregation, the counts that the method keeps during training (`tally`).
        The reply has test results only if the server requests them and the site allows them.
        """
        stage, release = self._require_allowed_training(run, facts)
        trainings = SiteTrainings(self.config.state_folder, self.config.policy.trainings_per_round)
        states = self._states(run, facts["run"])
        kept = None if facts["kept"] is None else states.read_nearest(stage.model, facts["kept"], self._log)
        round_name = describe_round(run.name, facts)
        request = training_request(facts, payload, kept or {}, release.has_site_noise)
        trainings.require_allowed(round_name, request)
        tensors = run.on_device(from_bytes(payload))
        run.require_model(stage, tensors)
        tests = facts.get("tests")
        test_results = None if tests is None else run_test_or_refuse(run, tests, facts["kept"], tensors, kept or {})
        work = run.work(facts, stage, tensors, kept or {})
        result = train_clients(run.runtime(stage.concatenates, tensors).engine, work)
        model_round, loss = work.key.round, float(result.loss[0])
        reply: Facts = {
            "round": model_round,
            "start": digest(payload),
            "visits": int(result.visits[0]),
            # The loss has no noise. So if the site adds noise, the reply must say nothing about the loss.
            "finite": release.has_site_noise or bool(np.isfinite(loss)),
        }
        if facts["share_loss"] and np.isfinite(loss):
            reply["loss"] = loss
        if test_results is not None:
            reply["tests"] = test_results
        if facts.get("local_tests"):
            reply["local_tests"] = run_local_tests(run, stage, facts, tensors, result, kept or {})
        shares_tally = facts["share_loss"] and facts["terms"].get("secure_aggregation") is None
        refuse_undeclared(work, result.uplink, result.tally if shares_tally else {})
        reply_tensors = result_tensors(result, work.sent, shares_tally)
        if release.privacy != "none":
            refuse_changed_buffers(release.privacy, unpack("trained:buffers", reply_tensors))
        if facts["noise"] is not None:
            reply_tensors = _add_noise(reply_tensors, work.exchanged.params, facts["noise"])
        answer = reply, to_bytes(reply_tensors)
        # The training and its privacy are recorded before the answer leaves and before the site's state changes.
        trainings.record(round_name, request)
        self._ledger.charge(release)
        if result.states:
            state = {name: t[0].cpu() for name, t in result.states.items()}
            states.write(stage.model, model_round + 1, state, facts["kept"], facts["oldest"])
        return answer

    def _require_allowed_training(self, run: SiteRun, facts: Facts) -> tuple[Stage, Release]:
        """Return the stage and the release of a request for training. Refuse a request that the site does not allow."""
        planned = planned_rounds(run.method, run.config, facts["notes"])
        require_planned_round(facts["stage"], facts["key"]["round"] + 1, planned)
        stage = run.stage(facts)
        require_own_number(facts["client"], stage, run.config, self.config.name)
        require_planned_training(facts, stage, run.config)
        release = read_release(facts, run.method)
        self._ledger.require_budget(release)  # checked now, so that the site does not train in vain
        require_covered(facts, release, run.method, run.config, run.exchanged_buffers, self.config.policy)
        return stage, release

    def _evaluate(self, run: SiteRun, facts: Facts, payload: bytes) -> Answer:
        """Test the received model. With `scores`, report score histograms in place of counts."""
        tensors = run.on_device(from_bytes(payload))
        kept: Tensors = {}
        if facts.get("kept") is not None:
            kept = self._states(run, facts["run"]).read_nearest("global", facts["kept"], self._log) or {}
        if facts.get("scores"):
            return score_histograms(run, facts, tensors, kept)
        return run_test(run, facts, facts.get("kept"), tensors, kept), b""

    def _states(self, run: SiteRun, name: str) -> SiteState:
        """Return the site's states of the run. Refuse a request that names another run or changes the contract."""
        require_same_run(name, run.name)
        states = SiteState(self.config.state_folder, run.name)
        states.bind(run.contract_hash)
        return states

    def _survey(self, run: SiteRun, facts: Facts, payload: bytes) -> Answer:
        """Report label counts, and mean predictions per class if the server requests them.

        A request with a stage is for that stage's own survey instead.
        """
        if "stage" in facts:
            return self._answer_survey(run, facts, payload)
        require_declared_counts("survey", run.method)
        planned = planned_rounds(run.method, run.config, facts.get("notes", {}))
        stage = require_planned_label_survey(facts["predictions"], planned)
        if facts["predictions"]:  # a site that demands noise refuses these even if `reveals` lists label counts
            require_covered_survey(stage.name, self.config.policy)
        tensors = run.on_device(from_bytes(payload)) if facts["predictions"] else {}
        counts = self._label_counts(run)

        def count() -> Answer:
            report = {"label_counts": torch.tensor(counts)}
            if facts["predictions"]:
                model = read_model("sent", tensors)
                found = survey(run.runtime().network, model, run.runtimes.train_samples, run.held(None).indices[0])
                assert found.probability is not None
                report["probability"] = torch.from_numpy(np.nan_to_num(found.probability))
            return {}, to_bytes(report)

        return run.answer_once("label counts", {"predictions": facts["predictions"]}, tensors, count)

    def _answer_survey(self, run: SiteRun, facts: Facts, payload: bytes) -> Answer:
        """Answer the survey of a stage, without any training. The site's own copy of the method defines the survey."""
        planned = planned_rounds(run.method, run.config, facts["notes"])
        stage = require_planned_survey(facts, planned, run.config, self.config.name)
        require_covered_survey(stage.name, self.config.policy)
        tensors = run.on_device(from_bytes(payload))

        def ask() -> Answer:
            work = run.work({**facts, "companions": []}, stage, tensors, {})  # of zero epochs: only hooks run
            answers = train_clients(run.runtime(stage.concatenates, tensors).engine, work).uplink
            refuse_undeclared(work, answers, {})
            return {}, to_bytes({name: t[0].cpu() for name, t in answers.items()})

        return run.answer_once(f"the survey of stage {stage.name!r}", {"stage": facts["stage"]}, tensors, ask)


def _check_form(facts: Facts) -> None:
    """Refuse a request with unknown facts or a wrong form, or a greeting of a server with another minor version."""
    if strange := sorted(facts.keys() - _ALLOWED_FACTS[facts["kind"]] - {"kind", "terms"}):
        raise UserError(
            f"the server sets {strange[0]!r}, which this site does not know; expected the same version of fedskew"
        )
    if "versions" in facts and (problem := version_problem(read_versions(facts["versions"]).get("fedskew"))):
        raise UserError(f"the server does not fit this site: {problem}")
    if facts["kind"] == "train":
        require_training_form(facts)
    elif facts["kind"] == "survey":
        require_survey_form(facts)


def _add_noise(reply_tensors: Tensors, start: Tensors, noise: tuple[float, float]) -> Tensors:
    """Return the tensors of a reply with a clipped and noisy change of the model's parameters.

    `noise` has the clip and the noise multiplier. `start` has the parameters before training.
    """
    clip, multiplier = noise
    before = {name: t.cpu() for name, t in start.items()}
    trained = {name: t.cpu() for name, t in unpack("trained:params", reply_tensors).items()}
    private = private_change(trained, before, clip, multiplier * clip)
    return reply_tensors | pack("trained:params", private)


def _ask_column_sums(contract: Contract) -> tuple[str, Facts]:
    """Return the question and the request of column sums. A site answers once for the same classes and columns.

    The answer lists the columns in the contract's order. The site refuses a request with another order.
    """
    return f"column sums of the data {hash_data_form(contract)}", {"columns": contract.column_names}


def recorded_column_sums(site: SiteConfig, contract: Contract) -> tuple[ColumnSums, ...] | None:
    """Return the column sums that the site has sent for these columns, and will repeat. None if there are none."""
    answer = SiteAnswers(site.state_folder).recorded(*_ask_column_sums(contract))
    if answer is None:
        return None
    return tuple(NumberSums(**found) if "mean" in found else CategorySums(**found) for found in answer[0]["columns"])


def _ask_survey(contract: Contract) -> tuple[str, Facts]:
    """Return the question and the request of a survey. The answer lists the classes in the contract's order."""
    return f"a survey of the data {hash_data_form(contract)}", {"classes": contract.classes}


def recorded_survey(site: SiteConfig, contract: Contract) -> Facts | None:
    """Return the site's answer to a survey of these classes and columns, which it will repeat. None if it has none."""
    answer = SiteAnswers(site.state_folder).recorded(*_ask_survey(contract))
    return None if answer is None else answer[0]


def sum_site_columns(federation: Federation, policy: Policy) -> tuple[ColumnSums, ...]:
    """Sum the columns of the site's training rows.

    The federation was read with the draft of a contract, so it has the table as it was before the encoding.
    """
    if federation.dataset.raw_train is None:
        raise UserError("the site's data are not a table with named columns; expected a CSV or Parquet file")
    return sum_columns(federation.dataset.raw_train.take(federation.indices[0]), policy.smallest_group)


def read_raw_table(site: SiteConfig, contract: Contract) -> RawTable | None:
    """Read the site's training rows as a table that is not encoded yet.

    None if the contract has no encoding of tables, or if the site's data are not a table.
    """
    if contract.table_encoding is None:
        return None
    raw = site.federation(contract.draft())
    return None if raw.dataset.raw_train is None else raw.dataset.raw_train.take(raw.indices[0])
