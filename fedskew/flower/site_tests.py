"""Tests of a model at a site, on the site's test part."""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.engine import ModelState, RoundResult
from fedskew.errors import UserError
from fedskew.flower.model_message import single_model
from fedskew.flower.request_checks import (
    planned_rounds,
    planned_tests,
    require_agreed_histograms,
    require_agreed_local_tests,
    require_agreed_tests,
    require_planned_test,
)
from fedskew.flower.site_answers import Answer
from fedskew.flower.site_run import SiteRun
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.wire import Facts
from fedskew.methods import Stage, Tensors
from fedskew.metrics.confusion import Confusion, correct


def run_test(run: SiteRun, test_request: Facts, kept_round: int | None, tensors: Tensors, kept: Tensors) -> Facts:
    """Test the received model. Refuse more results, or more detailed ones, than the site allows.

    If the method has no global model, the site tests its own model, with `kept`, the personal tensors that it saved
    after round `kept_round`. If the site has its own model beside the global one, it also reports that model's totals.
    """
    require_agreed_tests(test_request, run.method, run.site)
    model, round, labels = test_request["model"], test_request["round"], test_request["labels"]
    require_planned_test(model, round, planned_tests(run.method, run.config, test_request["notes"]))

    def test() -> Answer:
        test_set = run.runtime(test_request["frozen"], tensors).test_set
        confusion, log_loss = test_set.sums(run.tested_model(tensors, kept), labels)
        own = {}
        if run.tests_both_models:
            own = {"personal": _totals(test_set.confusion(run.own_model(tensors, kept), labels))}
        if test_request["detail"] == "class":
            return {"confusion": confusion.tolist(), "log_loss": log_loss, **own}, b""
        return _totals(confusion) | own, b""

    request = {key: test_request[key] for key in ("labels", "detail", "frozen")}
    request["kept"] = None if run.method.personal is None else kept_round
    tested = _tested_tensors(tensors, test_request["frozen"])
    return run.answer_once(f"a test of model {model!r} after round {round}", request, tested, test)[0]


def run_test_or_refuse(
    run: SiteRun, test_request: Facts, kept_round: int | None, tensors: Tensors, kept: Tensors
) -> Facts:
    """Return the test results. If the site refuses to report them, return the reason instead of raising it.

    A site may refuse to test a round's model, and still train the round.
    """
    try:
        return run_test(run, test_request, kept_round, tensors, kept)
    except StateUnusable:
        raise
    except UserError as error:
        return {"refused": str(error)}


def run_local_tests(
    run: SiteRun, stage: Stage, facts: Facts, tensors: Tensors, result: RoundResult, kept: Tensors
) -> Facts:
    """Test the model before and after local training. Return the totals, or why the site does not report them."""

    def test() -> Answer:
        test_set = run.runtime(stage.concatenates, tensors).test_set
        own = {name: t[0] for name, t in result.states.items()}
        whole, trained = run.tested_model(tensors, own), single_model(result.trained)
        # `whole` has the shared tensors as received. Those in `trained` replace them.
        after = ModelState({**whole.params, **trained.params}, {**whole.buffers, **trained.buffers})
        models = {"before": run.tested_model(tensors, kept), "after": after}
        return {when: _totals(test_set.confusion(model)) for when, model in models.items()}, b""

    round = facts["key"]["round"] + 1
    try:
        require_agreed_local_tests(run.method, run.site)
        require_planned_test(stage.model, round, planned_tests(run.method, run.config, facts["notes"]))
        request = {key: facts[key] for key in ("client", "stage", "local", "key", "kept")}
        question = f"a test of model {stage.model!r} before and after training in round {round}"
        return run.answer_once(question, request, tensors, test)[0]
    except StateUnusable:
        raise
    except UserError as error:
        return {"refused": str(error)}


def score_histograms(run: SiteRun, test_request: Facts, tensors: Tensors, kept: Tensors) -> Answer:
    """Compute histograms of the final model's probabilities on the site's test part."""
    require_agreed_histograms(test_request, run.method, run.site)
    *_, (stage, rounds) = planned_rounds(run.method, run.config, test_request["notes"])
    require_planned_test(test_request["model"], test_request["round"], {(stage.model, rounds.stop - 1)})

    def compute() -> Answer:
        return {}, run.score(run.tested_model(tensors, kept), test_request["frozen"], tensors)

    request = {"frozen": test_request["frozen"], "kept": test_request.get("kept")}
    tested = _tested_tensors(tensors, test_request["frozen"])
    return run.answer_once("score histograms", request, tested, compute)


def _tested_tensors(tensors: Tensors, frozen: Sequence[str]) -> Tensors:
    """Select the tensors of the tested model. A request for training also has other tensors."""
    prefixes = ("sent:", *(f"companion:{name}:" for name in frozen))
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}


def _totals(confusion: Confusion) -> Facts:
    return {"right": correct(confusion), "tested": int(confusion.sum())}
