"""Checks before a run starts: whether its method and settings work with secure aggregation."""

from __future__ import annotations

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.contract import Contract
from fedskew.flower.secure.session import FEWEST_SITES
from fedskew.flower.settings import FederationSettings
from fedskew.methods import make_method
from fedskew.methods.class_weights import entries_with_weights
from fedskew.methods.parts import individual_updates_reason


def require_sums_suffice(settings: FederationSettings, contract: Contract, config: Config) -> None:
    """Refuse methods and settings for which the server needs single sites' answers."""
    if not settings.secure_aggregation:
        return
    for entry in entries_with_weights(config.method, config.class_weights):
        if entry.individual_updates_reason:
            raise UserError(
                f"{entry.name} {entry.individual_updates_reason}, so it cannot use secure aggregation; expected a "
                "method whose server needs only the mean (`fedskew methods --combinations` lists such methods)"
            )
    _refuse_stages(config)
    if contract.column_sums:
        raise UserError(
            "column sums are sent by single sites; secure aggregation needs an encoding from a file (init --encoding "
            "without --column-sums)"
        )
    if config.clients_per_round is not None and config.clients_per_round < FEWEST_SITES:
        raise UserError(
            f"clients_per_round is {config.clients_per_round}; secure aggregation needs at least {FEWEST_SITES} sites "
            "in a round"
        )


def _refuse_stages(config: Config) -> None:
    """Refuse stages that ask sites about their data, and stages with parts that need individual updates."""
    method = make_method(config.method, config.method_params)
    for stage in method.stages(config.rounds, config.local_epochs, {}):
        asks = stage.survey is not None or stage.labels is not None
        reasons = [f"asks every site about its data in stage {stage.name!r}"] if asks else []
        reasons += filter(None, (individual_updates_reason(type(part)) for part in stage.parts))
        if reasons:
            raise UserError(f"{method.name} {reasons[0]}, so it cannot use secure aggregation; expected another method")
