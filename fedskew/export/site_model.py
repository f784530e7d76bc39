"""The model of one client or site: the final shared tensors, and the tensors that only the site has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedskew.errors import UserError, unknown
from fedskew.experiment.config import config_hash
from fedskew.experiment.storage.checkpoints import ClientFiles
from fedskew.methods import Method, make_method, unpack
from fedskew.methods.personal import PERSONAL
from fedskew.models import own_module
from fedskew.results import Result


def site_result(run: Result, site: str, kept: Mapping[str, Tensor] | None = None) -> Result:
    """Return the run's result with this site's own model in place of the global one.

    In a federation across machines, `kept` is the site's state. States of simulated clients are in the run's folder.
    """
    method = make_method(run.config.method, run.config.method_params)
    _require_own_models(run, method)
    if site not in run.client_labels:
        raise unknown("site", site, run.client_labels)
    if kept is None:
        kept = _read_state(run, site)
    # A client that trains alone has a whole model in place of personal tensors.
    own = unpack(PERSONAL, kept) or {**unpack("params", kept), **unpack("buffers", kept)}
    module = copy.deepcopy(run.model)
    tensors = own_module(module).state_dict()
    if not own.keys() <= tensors.keys() or any(t.shape != tensors[name].shape for name, t in own.items()):
        raise UserError(f"the state of {site!r} does not fit the model of {run.folder}; expected a state of that run")
    with torch.no_grad():
        for name, tensor in own.items():
            tensors[name].copy_(tensor)
    if run.sites and method.personal is not None and method.personal.has_global_model:
        run = replace(run, site_scores={})  # the sites' scores are those of the global model
    return replace(run, model_or_loader=module)


def own_accuracy(run: Result, site: str) -> float | None:
    """Return the accuracy of a site's own model on its test samples. None if the run did not record it.

    If sites report only totals, the run has no `site_scores`, but this accuracy is in its rounds.
    """
    if (score := run.site_scores.get(site)) is not None:
        return score.accuracy
    if not run.sites:
        return None
    last, method = run.evaluated[-1], make_method(run.config.method, run.config.method_params)
    if method.personal is None or not method.personal.has_global_model:
        return (last.sites or {}).get(site, {}).get("accuracy")
    accuracies = (last.client_tests or {}).get("personal")
    return accuracies[run.client_labels.index(site)] if accuracies else None


def _require_own_models(run: Result, method: Method) -> None:
    """Refuse a method whose sites keep no model."""
    trains_alone = method.stages(run.config.rounds, run.config.local_epochs, run.notes)[-1].cohort == "alone"
    if method.personal is None and not trains_alone:
        raise UserError(f"method {run.method!r} has one model for all sites; expected no --site")
    if method.personal is not None and method.personal.fine_tuning() is not None:
        raise UserError(
            f"with method {run.method!r}, each site fine-tunes the global model on its own data; export the global "
            "model without --site, and fine-tune it at the site"
        )


def _read_state(run: Result, site: str) -> Mapping[str, Tensor]:
    if run.sites:
        raise UserError(
            f"a part of the model of {site!r} never left that site; run this command there, with the path of its "
            "site.yaml as --site"
        )
    assert run.folder is not None
    states = run.folder / "clients"
    if not states.exists():
        raise UserError(
            f"{run.folder} has no states of clients: fedskew sweep and fedskew choose delete them; expected a "
            "run of fedskew run or fedskew compare"
        )
    client = run.client_labels.index(site)
    kept = ClientFiles(states).read_newest("global", client, config_hash(run.config))
    if kept is None:
        raise UserError(f"client {site!r} took part in no round, so it has no model; expected another client")
    return kept
