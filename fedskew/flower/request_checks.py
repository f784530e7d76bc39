"""A site's checks of the server's requests.

The server chooses the method, the model and the requests. Code that is installed at the site checks them before the
site replies. The site runs only known methods and models, does only what the method declares, and reports only the
tests that its administrator allows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from fedskew.engine import RoundKey
from fedskew.errors import UserError
from fedskew.experiment.config import Config, differing_keys
from fedskew.experiment.round.plan import local_training
from fedskew.experiment.round.sampler import model_number
from fedskew.flower.app_folder import PACKAGE
from fedskew.flower.approved_apps import read_approvals
from fedskew.flower.contract import Contract, Scaling
from fedskew.flower.policy import COLUMN_SUMS, LOCAL_TESTS, EvaluationRules, Policy
from fedskew.flower.privacy import refuse_unbounded
from fedskew.flower.releases import Release
from fedskew.flower.secure.terms import secure_terms
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.site_survey import SurveyRules
from fedskew.flower.wire import Facts, one_line
from fedskew.methods import Method, Stage, Tensors
from fedskew.methods.stages import Notes, survey_stage

DETAILS = ("none", "total", "class")
"""How detailed a site's test results may be, from the least to the most detailed."""


def approved_settings(settings: FederationSettings, contract: Contract, config: Config) -> dict[str, Any]:
    """Return the settings that a site approves with an app, as JSON values, without paths on the operator's machine."""
    return {
        "config": config.to_mapping() | {"data_dir": None, "init": None},
        "contract": contract.to_json(),
        "share_loss": settings.share_loss,
        "noise": [settings.clip, settings.noise] if settings.privacy == "local" else None,
        "central_noise": [settings.clip, settings.noise] if settings.privacy == "central" else None,
        "detail": settings.site_metrics,
        "local_tests": settings.local_tests,
        **secure_terms(settings, config),
        "survey": settings.survey,
        "evaluate_only": settings.evaluate_only,
    }


def require_approved(facts: Facts, site: SiteConfig) -> None:
    """Refuse a request whose settings differ from those of every app that the site has approved.

    A server can send other settings than those in its app, so it is not enough to approve the app. A site without a
    list of approvals refuses none.
    """
    try:
        approvals = read_approvals(site.folder)
    except UserError as error:  # not sent to the server, because the text names the site's file
        raise StateUnusable(str(error)) from error
    if approvals is None:
        return
    if not approvals:
        raise UserError("this site has approved no app")
    differences = [_differences(approval.settings, facts) for approval in approvals]
    if all(differences):
        nearest = min(differences, key=len)
        compared = "" if len(approvals) == 1 else f" (compared with the nearest of {len(approvals)} apps)"
        raise UserError(
            f"the server's request differs from every app that this site approved: {', '.join(nearest)}{compared}"
        )


def _differences(approved: dict[str, Any], facts: Facts) -> list[str]:
    """Name the settings in which a request differs from an approved app."""
    terms = facts["terms"]
    found = differing_keys(Config.from_mapping(approved["config"]), Config.from_mapping(terms["config"]))
    requested, agreed = Contract.from_json(terms["contract"]), Contract.from_json(approved["contract"])
    if requested != agreed and not requested.completes(agreed):
        found.append("the contract")
    if terms.get("secure_aggregation") != approved.get("secure_aggregation"):
        found.append("secure_aggregation")
    found += [key for key in ("share_loss", "noise") if key in facts and facts[key] != approved[key]]
    # Approvals of older versions do not have `central_noise`. They still count, and allow any noise at the server.
    if facts["kind"] == "train" and "central_noise" in approved:
        found += ["central_noise"] if facts.get("central_noise") != approved["central_noise"] else []
    if facts.get("local_tests", False) and not approved.get("local_tests", False):
        found.append("local_tests")
    declaration = {"describe": "survey", "score": "evaluate_only"}.get(facts["kind"])
    if declaration is not None and not approved.get(declaration, False):
        found.append(declaration)
    tests = facts if facts["kind"] == "evaluate" else facts.get("tests")
    if tests is not None and tests["detail"] != approved["detail"]:
        found.append("site_metrics")
    return found


def require_known_code(config: Config, site: SiteConfig) -> None:
    """Refuse methods and models that are neither fedskew's, nor in the app's package, nor allowed by the site."""
    allowed = (PACKAGE, *site.packages)
    for kind, name in (*(("method", part) for part in config.method.split("+")), ("model", config.model)):
        module, colon, _ = name.strip().partition(":")
        if colon and module.partition(".")[0] not in allowed:
            raise UserError(
                f"this site does not run the {kind} {name!r}; expected one of fedskew's, one in the app's package "
                f"{PACKAGE}, or one in a package listed under 'packages' in site.yaml"
            )


def require_declared_counts(request: str, method: Method) -> None:
    """Refuse to count labels for a method that does not declare that it reveals label counts."""
    if not _reveals_label_counts(method):
        raise UserError(
            f"the server sends a {request}, which reveals label counts; method {method.name!r} does not declare that"
        )


def require_agreed_sums(contract: Contract, site: SiteConfig) -> None:
    """Refuse column sums unless the app declares them and the site's policy allows them."""
    if not contract.column_sums:
        raise UserError("the server requests column sums, which its app does not declare (contract.column_sums)")
    if not site.policy.allows(COLUMN_SUMS):
        raise UserError(
            f"the server requests column sums, which this site does not allow; expected policy.reveals: [{COLUMN_SUMS}]"
        )


def require_agreed_tests(tests: Facts, method: Method, site: SiteConfig) -> None:
    """Refuse test results that are more detailed than the site allows.

    Also refuse totals over some labels if the method does not declare that it reveals label counts.
    """
    detail = tests["detail"]
    if detail not in DETAILS[1 : DETAILS.index(site.metrics) + 1]:
        raise UserError(f"the server requests metrics {detail!r}; this site allows metrics: {site.metrics} (site.yaml)")
    if detail == "total" and tests["labels"] is not None and not _reveals_label_counts(method):
        raise UserError(
            "the server requests test results of some labels, which reveals label counts; "
            f"method {method.name!r} does not declare that"
        )


def planned_rounds(method: Method, config: Config, notes: Notes) -> list[tuple[Stage, range]]:
    """List the stages of a run, each with the numbers of its rounds.

    The rounds of each model are counted separately. A stage that concatenates encoders makes a new model, so its count
    begins again, even if the model has the name of an earlier one. The stages follow from the configuration, which a
    site can approve. The stages of some methods also depend on the server's notes.
    """
    trained: dict[str, int] = {}
    planned = []
    for stage in method.stages(config.rounds, config.local_epochs, notes):
        first = 0 if stage.concatenates else trained.get(stage.model, 0)
        last = trained[stage.model] = first + stage.rounds
        planned.append((stage, range(first + 1, last + 1)))
    _require_separate_clients([stage for stage, _ in planned], config)
    return planned


def _require_separate_clients(stages: Sequence[Stage], config: Config) -> None:
    """Refuse notes with overlapping or empty clusters, or with clients that do not exist.

    A client in several clusters would train once for each of them.
    """
    clusters = [stage.clients for stage in stages if stage.clients is not None]
    members = [client for cluster in clusters for client in cluster]
    are_separate = len(set(members)) == len(members) and set(members) <= set(range(config.partition.clients or 0))
    if not are_separate or not all(clusters):
        raise UserError("the server's notes have empty clusters, clients in two clusters, or clients that do not exist")


def require_planned_round(stage: int, round: int, planned: Sequence[tuple[Stage, range]]) -> None:
    """Refuse to train a round that the run's configuration does not plan, because each round reveals something."""
    if stage not in range(len(planned)) or round not in planned[stage][1]:
        raise UserError(
            f"the server requests round {round} of stage {stage}, which the run's configuration does not plan (rounds)"
        )


def require_planned_survey(facts: Facts, planned: Sequence[tuple[Stage, range]], config: Config, site: str) -> Stage:
    """Return a stage of one round, in which the sites answer the survey of the requested stage.

    This round follows the last round of the requested stage. Refuse a survey or settings that the run's configuration
    does not plan.
    """
    number, done = facts["stage"], facts["key"]["round"]
    has_survey = number in range(len(planned)) and planned[number][0].survey is not None
    if not has_survey or done != planned[number][1].stop - 1:
        raise UserError(
            f"the server requests the survey of stage {number} after round {done}, which the run's configuration does "
            "not plan"
        )
    stage = survey_stage(planned[number][0])
    require_own_number(facts["client"], stage, config, site)
    require_planned_training(facts, stage, config)
    return stage


def require_planned_label_survey(asks_predictions: bool, planned: Sequence[tuple[Stage, range]]) -> Stage:
    """Return the first stage whose survey is `labels`, or `predictions` if the request asks for predictions.

    Refuse if there is none.
    """
    kind = "predictions" if asks_predictions else "labels"
    stage = next((stage for stage, _ in planned if stage.survey == kind), None)
    if stage is None:
        raise UserError(f"the server requests a survey of {kind}, which the run's configuration does not plan")
    return stage


def planned_tests(method: Method, config: Config, notes: Notes) -> set[tuple[str, int]]:
    """List the planned tests of a run: names of models, each with the number of rounds after which it is tested."""
    planned = {("global", 0)}
    for stage, rounds in planned_rounds(method, config, notes):
        due = (number for number in rounds if number % config.eval_every == 0 or number == rounds[-1])
        planned |= {(stage.model, number) for number in due}
    return planned


def require_planned_test(model: str, round: int, planned: Collection[tuple[str, int]]) -> None:
    """Refuse a test that the run's configuration does not plan, so that a server cannot test models at will."""
    if (model, round) not in planned:
        raise UserError(
            f"the server requests a test of model {one_line(str(model))!r} after round {round}, which the run's "
            "configuration does not plan (rounds, eval_every)"
        )


def require_agreed_survey(policy: Policy) -> SurveyRules:
    """Return the site's rules for surveys before training (`fedskew federate survey`). Refuse if it allows none."""
    if policy.survey is None:
        raise UserError(
            "the server requests a survey before training, which this site does not allow; expected policy.survey "
            "({} for the defaults)"
        )
    return policy.survey


def require_agreed_evaluation(method: Method, policy: Policy) -> EvaluationRules:
    """Return the site's rules for tests of finished models (`fedskew federate evaluate`).

    Refuse if the site allows none, or if the method has no global model.
    """
    if policy.evaluate is None:
        raise UserError(
            "the server requests a test of a finished model, which this site does not allow; expected policy.evaluate "
            "({} for the defaults)"
        )
    if method.personal is not None and not method.personal.has_global_model:
        raise UserError(f"method {method.name!r} has no global model that the site could test")
    return policy.evaluate


def require_same_run(name: str, run: str) -> None:
    """Refuse a request that names another run than `run`, the run of its terms.

    Such a request would change the other run's state.
    """
    if name != run:
        raise UserError(
            f"the server's request names the run {one_line(str(name))!r}, but its terms are those of {run!r}"
        )


def require_covered(
    facts: Facts, release: Release, method: Method, config: Config, buffers: Tensors, policy: Policy
) -> None:
    """If the site demands noise, refuse updates with parts that the noise does not cover.

    With example-level privacy, every site refuses to send losses, because the run's ε does not cover them.
    """
    if release.privacy == "example" and facts["share_loss"]:
        raise UserError("training losses have no noise; expected federation.share_loss = false with example privacy")
    if not policy.demands_noise:
        return
    policy.refuse_items_without_noise(release.privacy, facts["share_loss"])
    if release.privacy in ("local", "central"):  # `SiteRun` checks methods for example-level privacy
        refuse_unbounded(release.privacy, method, config.average, buffers)


def require_planned_training(facts: Facts, stage: Stage, config: Config) -> None:
    """Refuse local training with settings or random numbers that the run's configuration does not plan.

    With another learning rate or batch size, an update could reveal far more about single samples.
    """
    done = facts["key"]["round"]
    _require_same(facts["local"], asdict(local_training(config, stage, done)))
    _require_same(facts["key"], asdict(RoundKey(config.seed, model_number(stage.model), done)))


def _require_same(asked: Facts, planned: Facts) -> None:
    for key in sorted(planned.keys() | asked.keys()):
        if key not in asked or not _is_same(asked[key], planned.get(key)):
            raise UserError(
                f"the server sets {one_line(key)} to {one_line(repr(asked.get(key)))} in this round; expected "
                f"{planned.get(key)!r}, as the run's configuration plans"
            )


def _is_same(asked: object, planned: object) -> bool:
    """Whether two settings are equal. Decayed learning rates may differ in the last bit between machines."""
    if isinstance(asked, float) and isinstance(planned, float):
        return math.isclose(asked, planned, rel_tol=1e-9)
    return type(asked) is type(planned) and asked == planned


def require_own_number(client: int, stage: Stage, config: Config, site: str) -> None:
    """Refuse to train as another client, or in a stage in which this site does not take part."""
    names = list(config.partition.params.get("names", ()))
    if site not in names or client != names.index(site):
        raise UserError(f"the server sets client to {client}, which is not the number of this site, {site}")
    if stage.clients is not None and client not in stage.clients:
        raise UserError(f"the server requests stage {one_line(stage.name)!r}, in which this site does not take part")


def require_shared_scaling(scaling: Scaling, contract: Contract) -> None:
    """Refuse a run with example-level privacy if the columns of this site's table are scaled with the site's own means.

    The means depend on every sample, so one replaced sample changes the inputs of all others.
    """
    if scaling and sorted(scaling) != sorted(contract.scaling):  # the site's columns may be in another order
        raise UserError(
            "the columns of this site's table are scaled with the site's own means, which example-level privacy does "
            "not cover; expected a CSV or Parquet file, which is scaled as the contract says"
        )


def require_covered_survey(stage: str, policy: Policy) -> None:
    """If the site demands noise, refuse the survey of a stage, because the answers have no noise."""
    if policy.demands_noise:
        raise UserError(
            f"the server requests the survey of stage {one_line(stage)!r}, whose answers have no noise; this site "
            f"demands noise (policy.{policy.noise_demand})"
        )


def require_agreed_local_tests(method: Method, site: SiteConfig) -> None:
    """Refuse to report the accuracy before and after local training unless the site's metrics and policy allow it."""
    require_agreed_tests({"detail": "total", "labels": None}, method, site)
    if not site.policy.allows(LOCAL_TESTS):
        raise UserError(
            "the server requests the accuracy before and after local training, which this site does not allow; "
            f"expected policy.reveals: [{LOCAL_TESTS}], and metrics: total or class in site.yaml"
        )


def require_agreed_histograms(tests: Facts, method: Method, site: SiteConfig) -> None:
    """Refuse score histograms unless the site reports results by class, which reveal the same label counts."""
    require_agreed_tests(tests, method, site)
    if tests["detail"] != "class":
        raise UserError(
            "the server requests score histograms by class, which reveal label counts; expected "
            f"federation.site_metrics = 'class', not {tests['detail']!r}"
        )


def _reveals_label_counts(method: Method) -> bool:
    return any("label counts" in part.reveals for part in method.members)
