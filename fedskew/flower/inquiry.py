"""Inquiries: runs that train nothing, but survey the sites' data or test a finished model on these data.

The answers are written to a folder beside that of the training run, such as `runs/first-survey`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.contract import Contract
from fedskew.flower.planning import prepare_for_sites, resolve_config
from fedskew.flower.remote_scoring import read_finished_model, score_at_sites, write_evaluation
from fedskew.flower.remote_survey import survey_sites, write_survey
from fedskew.flower.run_record import RunRecord
from fedskew.flower.settings import FederationSettings
from fedskew.flower.sites import Sites
from fedskew.flower.start_weights import start_payload

MakeSites = Callable[[Contract, Config, bytes], Sites]
"""Connects to the sites. The contract and the configuration are sent with every request to them. The bytes are the
result of `start_payload`, which the server sends when it greets a site."""


def inquiry_folder(folder: str | Path, purpose: str) -> Path:
    """The folder of an inquiry's answers. `folder` is the training run's. `purpose` is `survey` or `evaluate`."""
    run = Path(folder).expanduser()
    return run.with_name(f"{run.name}-{purpose}")


def require_declared_purpose(settings: FederationSettings, purpose: str) -> None:
    """Refuse an inquiry that the app does not declare. Sites that approve apps would refuse it, too."""
    key = {"survey": "survey", "evaluate": "evaluate_only"}[purpose]
    if not getattr(settings, key):
        raise UserError(f"federation.{key} is false in the app; expected true, in an app that the sites approve")


def run_inquiry(
    settings: FederationSettings, contract: Contract, config: Config, folder: Path, make_sites: MakeSites
) -> None:
    """Ask the sites, and write their answers."""
    require_declared_purpose(settings, settings.purpose)
    if settings.purpose == "survey":
        prepared = prepare_for_sites(config, contract, settings.sites)
        sites = make_sites(contract, prepared.config, start_payload(prepared.config, prepared.model))
        write_survey(folder, survey_sites(sites, contract, settings))
        return
    if settings.tested_model is None:
        raise UserError("federation.tested_model is not set; expected `fedskew federate evaluate MODEL APP`")
    contract = complete_contract(settings, contract)
    resolved = resolve_config(config, contract, settings.sites)
    model = read_finished_model(settings.tested_model, contract, resolved)
    sites = make_sites(contract, resolved, b"")
    write_evaluation(folder, score_at_sites(sites, model, contract, resolved, settings))


def complete_contract(settings: FederationSettings, contract: Contract) -> Contract:
    """Return the contract with the encoding that the training run fitted to column sums.

    A contract without column sums is returned unchanged.
    """
    if not contract.column_sums:
        return contract
    record = RunRecord(Path(settings.folder).expanduser(), settings, contract)
    record.check()
    if record.fitted is None:
        raise UserError(f"{settings.folder} has no fitted encoding; expected the folder of the trained run")
    return contract.complete(record.fitted.encoding)
