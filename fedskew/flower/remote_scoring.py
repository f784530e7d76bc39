"""Let the sites test a finished model on their own data. They send score histograms, which the server adds up.

A site may decline to have its own results listed. If exactly one site declines, no site's results are listed, because
the total minus the other results would be the result of that site. If only that site replies, there is no total either.
`evaluation.json` still names every site whose histograms are in the total. The server itself receives the histograms of
every site.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.engine import ModelState
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import data_shape, positive_class
from fedskew.experiment.storage.files import write_file
from fedskew.flower.contract import Contract
from fedskew.flower.model_message import model_tensors
from fedskew.flower.remote_evaluation import read_histograms
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site_replies import require_any_reply, usable_replies
from fedskew.flower.sites import Sites
from fedskew.flower.tensors import to_bytes
from fedskew.flower.wire import Garbled
from fedskew.metrics.score_histograms import ScoreHistograms
from fedskew.metrics.site_scores import score_site_histograms
from fedskew.models import make_model
from fedskew.models.weights import start_from
from fedskew.task import TASKS

EVALUATION = "evaluation.json"
WEIGHTS = "model.safetensors"
"""The file of the weights in the folder of an exported model."""


@dataclass(frozen=True)
class FinishedModel:
    """A model whose weights are in a file."""

    state: ModelState
    file: str
    sha256: str


def weights_file(model: str | Path) -> Path:
    """Return the file of weights. `model` is that file or the folder of an exported model."""
    path = Path(model).expanduser()
    path = path / WEIGHTS if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"no file {path}; expected the folder of an exported model, or a file of its weights")
    return path.resolve()


def read_finished_model(file: str, contract: Contract, config: Config) -> FinishedModel:
    """Read the weights of the app's model. Refuse a file in which some are missing, do not fit or are not finite."""
    if config.train != "all":
        raise UserError(
            f"train is {config.train!r}; expected 'all', because sites test only models that train as a whole"
        )
    blank = make_model(config.model, data_shape(contract.blank()), config.seed, config.head)
    model, report = start_from(file, blank)
    if report.left:
        name, reason = next(iter(report.left.items()))
        raise UserError(
            f"{file} is not a finished {config.model}: {name}, {reason}; expected weights of the app's model, for the "
            "app's classes and inputs"
        )
    state = ModelState(dict(model.named_parameters()), dict(model.named_buffers()))
    return FinishedModel(state, file, report.sha256)


def score_at_sites(
    sites: Sites, model: FinishedModel, contract: Contract, config: Config, settings: FederationSettings
) -> dict[str, Any]:
    """Return the results of all sites together, and those of each site that may be listed (see above)."""
    sites.wait_for(settings.begin_with or settings.required_sites)
    sites.wait_for_greetings(settings.grace_seconds)
    payload = to_bytes(model_tensors("sent", model.state))
    answers = sites.request("score", {client: {} for client in sites.online}, payload, settings.round_timeout)
    require_any_reply(answers, sites.names, "with its tests")
    found: dict[str, ScoreHistograms] = {}
    listed: list[str] = []
    for client, reply in usable_replies(answers):
        name = sites.names[client]
        try:
            found[name] = read_histograms(reply, len(contract.classes), TASKS[contract.task])
        except Garbled as problem:
            sites.log(f"warning: the score histograms of {name} are discarded: {problem}")
            continue
        listed += [name] if reply.facts.get("by_site") is True else []
    if not found:
        raise UserError("no site sent usable score histograms")
    listed = _sites_to_list(list(found), listed)
    positive = positive_class(config, contract.blank())
    total = ScoreHistograms.total(found.values())
    return {
        "model": model.file,
        "sha256": model.sha256,
        "tested_by": list(found),
        "without_answer": [name for name in sites.names if name not in found],
        "total": score_site_histograms(total, positive).to_json(),
        "scores": total.scores(config.specificity, positive).to_json(),
        "by_site": {name: score_site_histograms(found[name], positive).to_json() for name in listed},
    }


def _sites_to_list(tested_by: Sequence[str], agreed: Sequence[str]) -> list[str]:
    """Choose the sites whose results are listed, so that no site's results follow from the total if it withholds them.

    `agreed` are the sites that agree to be listed. Raise a UserError if the total itself would be a withheld result.
    """
    withheld = [name for name in tested_by if name not in agreed]
    if withheld == list(tested_by) and len(withheld) == 1:
        raise UserError(
            f"only {withheld[0]} sent usable score histograms, and the total would be its own results, which it "
            "withholds (policy.evaluate.by_site); expected replies of more sites"
        )
    return [] if len(withheld) == 1 else list(agreed)


def write_evaluation(folder: Path, evaluation: dict[str, Any]) -> None:
    write_file(folder / EVALUATION, json.dumps(evaluation, indent=2) + "\n")
