"""The ServerApp, the part of a federation that runs on the server.

It trains a model with the sites and writes the run's folder. If `federation.purpose` is `survey` or `evaluate`, it
surveys the sites' data or lets the sites test a finished model instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedskew.data import load
from fedskew.data.dataset import Dataset, lacking_notes
from fedskew.errors import UserError
from fedskew.experiment.callbacks import Callback
from fedskew.experiment.config import Config, config_hash
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.experiment.result import Result, describe_participation
from fedskew.experiment.round.record import RoundRow
from fedskew.experiment.round.state import RunState
from fedskew.experiment.run import run_prepared
from fedskew.experiment.storage.files import replace_file, reporting_os_errors
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.experiment.trained_part import make_part
from fedskew.flower.app_folder import PACKAGE
from fedskew.flower.approved_apps import app_hash, installed_file_hashes
from fedskew.flower.chained_log import ChainedLog, Entry, read_chain
from fedskew.flower.contract import Contract
from fedskew.flower.disclosure import settings_warnings
from fedskew.flower.federation_server import FederationServer, refuse_unfit
from fedskew.flower.inquiry import inquiry_folder, run_inquiry
from fedskew.flower.loop import FederatedRounds
from fedskew.flower.planning import resolve_config
from fedskew.flower.received_replies import ReceivedReplies
from fedskew.flower.remote_encoding import FittedEncoding, fit_at_sites
from fedskew.flower.remote_evaluation import SiteEvaluation
from fedskew.flower.remote_federation import RemoteFederation
from fedskew.flower.remote_training import SiteTraining
from fedskew.flower.reply_times import ReplyTimes
from fedskew.flower.run_record import RunRecord
from fedskew.flower.run_status import STATUS, RunHistory
from fedskew.flower.secure.evaluation import SecureEvaluation
from fedskew.flower.secure.requirements import require_sums_suffice
from fedskew.flower.secure.terms import secure_terms
from fedskew.flower.secure.training import SecureTraining
from fedskew.flower.settings import FederationSettings, data_source, read_settings
from fedskew.flower.sites import Sites
from fedskew.flower.start_weights import start_payload
from fedskew.flower.wire import Facts, one_line
from fedskew.methods import make_method
from fedskew.models import has_features
from fedskew.platforms import parent_of, start_mark, wait_for_end

app = ServerApp()

_LOG = logging.getLogger("flwr")
_PROGRAM = "flwr-serverapp"
"""The Flower program in which a ServerApp runs on a server. In another program, the parent is not a SuperExec."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation to its end. The `status.json` of a training run then says how it ended.

    The status is `finished`, `stopped` or `failed`. `stopped` means that a person must act before another start.
    `failed` means that another start may help, so `supervised_run` starts the run again.

    An error is raised again, because Flower marks a run as failed only if its ServerApp ends with an Exception.
    """
    if Path(sys.argv[0]).name == _PROGRAM:
        threading.Thread(target=_end_with_superlink, daemon=True).start()
    try:
        if _purpose(context) == "train":
            run_federation(grid, context)
        else:
            ask_sites(grid, context)
    except Exception as error:
        if isinstance(error, UserError):
            status, reason = "stopped", str(error)
        else:
            status, reason = "failed", one_line(f"{type(error).__name__}: {error}")
        log(f"{status}: {reason}")
        _write_status(context, {"status": status, "reason": reason})
        raise
    _write_status(context, {"status": "finished", "reason": ""})


def _end_with_superlink() -> None:
    """End this process at once when the SuperExec or the SuperLink ends.

    The SuperExec is the parent of this process, and the SuperLink is the parent of the SuperExec. Flower would let the
    ServerApp go on for minutes. Meanwhile, the run's folder would stay locked, and the run could not resume. It is safe
    to end at any moment, because the run resumes from its last checkpoint.
    """
    superexec = os.getppid()
    wait_for_end(superexec, parent_of(superexec))
    os._exit(1)


def _write_status(context: Context, status: dict[str, str]) -> None:
    """Record how the attempt ended: in the audit log, and in `status.json` if a training run has begun.

    A failure to write the status is ignored, so that it does not hide the error that ended the run.
    """
    folder = Path(os.path.expanduser(str(context.run_config.get("federation.folder") or FederationSettings.folder)))
    purpose = _purpose(context)
    run = RunFolder(folder if purpose == "train" else inquiry_folder(folder, purpose))
    if run.audit_path.exists():
        with contextlib.suppress(UserError):
            ChainedLog(run.audit_path).append({"event": "end", **status})
    if not run.config_path.exists():
        return
    text = json.dumps(status | {"time": datetime.now(UTC).isoformat(timespec="seconds")}, indent=2) + "\n"
    with contextlib.suppress(OSError, UserError):
        replace_file(run.path / STATUS, lambda draft: _put(draft, text))


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _purpose(context: Context) -> str:
    return str(context.run_config.get("federation.purpose") or "train")


def ask_sites(grid: Grid, context: Context) -> None:
    """Run a survey, or have a finished model tested. Nothing is trained."""
    settings, contract, config = read_settings(dict(context.run_config))
    folder = inquiry_folder(settings.folder, settings.purpose)
    with reporting_os_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
    audit = ChainedLog(RunFolder(folder).audit_path).append
    _record_start(audit, settings)

    def make_sites(agreed: Contract, resolved: Config, start: bytes) -> Sites:
        terms = _terms(agreed, resolved)
        return Sites(grid, settings.sites, terms, log, settings.most_samples, audit=audit, start=start)

    run_inquiry(settings, contract, config, folder, make_sites)
    log(f"finished; the answers are in {folder}")


def _record_start(audit: Callable[[Entry], object], settings: FederationSettings) -> None:
    process = {"process": os.getpid(), "process_start": start_mark(os.getpid()), "machine": socket.gethostname()}
    audit({"event": "start", "app": _installed_app_hash(), "federation": list(settings.sites), **process})


def run_federation(grid: Grid, context: Context) -> Result:
    """Train with the sites. A run that has begun in the same folder resumes."""
    settings, contract, config = read_settings(dict(context.run_config))
    folder = Path(os.path.expanduser(settings.folder))
    record = RunRecord(folder, settings, contract)
    record.check()
    RunFolder(folder).refuse_foreign()
    audit = ChainedLog(RunFolder(folder).audit_path).append
    _record_start(audit, settings)
    if contract.column_sums:
        record.fitted = record.fitted or _fit_encoding(grid, settings, contract, config, audit)
        contract = contract.complete(record.fitted.encoding)
    dataset = _server_data(settings, contract)
    # The terms need the prepared configuration. So the run is first prepared with sites that get no requests.
    provisional = RemoteFederation(dataset, Sites(grid, settings.sites, {}, log), config.seed)
    refuse_unfit(make_method(config.method, config.method_params), config)
    prepared = prepare(config, provisional)
    require_sums_suffice(settings, contract, prepared.config)
    terms = _terms(contract, prepared.config) | secure_terms(settings, prepared.config)
    times = _reply_times(settings, RunFolder(folder).audit_path)
    is_secure, start = settings.secure_aggregation, start_payload(prepared.config, prepared.model)
    sites = Sites(
        grid, settings.sites, terms, log, settings.most_samples, times, audit, knows_samples=not is_secure, start=start
    )
    senders = () if record.fitted is None else record.fitted.sites
    federation = RemoteFederation(dataset, sites, config.seed, column_sums_from=senders)
    prepared = replace(prepared, federation=federation)
    training_type, evaluation_type = (SecureTraining, SecureEvaluation) if is_secure else (SiteTraining, SiteEvaluation)
    server = _make_server(prepared, federation, sites, settings, evaluation_type)
    kept_rounds = 2 * config.checkpoint_every  # a run keeps two checkpoints, and may resume from the older one
    received = ReceivedReplies(folder)
    training = training_type(sites, settings, config_hash(prepared.config), kept_rounds, record.release, received)
    rounds = FederatedRounds(server, training, sites, settings, prepared.config, record)
    for warning in settings_warnings(settings, contract, prepared.config):
        log(f"warning: {warning}")
    if not RunFolder(folder).finished:
        _await_sites(sites, settings, received, is_resumed=RunFolder(folder).rounds_path.exists())
    result = run_prepared(prepared, folder, [_WriteSettings(record), LogProgress()], server, rounds.run)
    received.clear()
    return result


def _reply_times(settings: FederationSettings, audit: Path) -> ReplyTimes:
    """Read how long the sites took to reply in earlier attempts. This tells a resumed run when a site is late."""
    times = ReplyTimes(settings.grace, settings.grace_seconds)
    history = RunHistory(settings.sites, times)
    for entry in read_chain(audit).entries:
        history.add(entry)
    return times


def _await_sites(sites: Sites, settings: FederationSettings, received: ReceivedReplies, is_resumed: bool) -> None:
    """Wait until enough sites are connected to begin. `begin_with` applies only to a new run, not to a resumed one."""
    if not is_resumed:
        sites.wait_for(settings.begin_with or settings.sites_to_begin_round)
        return
    # A site takes part in a round if its number of samples is known. A site whose update has arrived must take part in
    # the repeated round, even if it is not connected now.
    for name, samples in received.samples().items():
        sites.samples[sites.names.index(name)] = samples
    sites.wait_for(settings.sites_to_begin_round)
    sites.wait_for_greetings(settings.grace_seconds)


def _make_server(
    prepared: Prepared,
    federation: RemoteFederation,
    sites: Sites,
    settings: FederationSettings,
    evaluation_type: type[SiteEvaluation],
) -> FederationServer:
    """Make the server. If sites train only a part of the model, the server's model is that part."""
    config, model = prepared.config, prepared.model
    if config.train == "all":
        return FederationServer(federation, prepared.method, model, config, sites, settings, evaluation_type)
    assert has_features(model)
    part = make_part(config, model, federation.dataset)
    with_part = RemoteFederation(part.dataset, sites, federation.seed, column_sums_from=federation.column_sums_from)
    return FederationServer(
        with_part, prepared.method, part.model, config, sites, settings, evaluation_type, part.whole
    )


def _server_data(settings: FederationSettings, contract: Contract) -> Dataset:
    """Make a dataset in the contract's form, with the server's test data if the server tests the model."""
    blank = contract.blank()
    if settings.evaluation != "server" or settings.test_data is None:
        return blank
    name, options = data_source(settings.test_data)
    folder = options.pop("data_dir", None)
    dataset = load(name, folder, **contract.data_options(Path(name).expanduser(), options))
    tested = replace(blank, test=contract.admit(dataset).test)
    for note in lacking_notes(tested):
        log(f"warning: {note}")
    return tested


def _fit_encoding(
    grid: Grid, settings: FederationSettings, draft: Contract, config: Config, audit: Callable[[Entry], object]
) -> FittedEncoding:
    """Fit the encoding of the sites' tables to sums that the sites send."""
    terms = _terms(draft, resolve_config(config, draft, settings.sites))
    sites = Sites(grid, settings.sites, terms, log, settings.most_samples, audit=audit)
    return fit_at_sites(sites, draft, settings)


def _installed_app_hash() -> str | None:
    """Compute the hash of the app that this process runs, in the same way as sites do. None if no app is installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None or not found.origin.endswith("__init__.py"):
        return None
    return app_hash(installed_file_hashes(Path(found.origin).parents[1]))


def _terms(contract: Contract, config: Config) -> Facts:
    """Return what every site needs to know about the run: the contract, and the configuration without paths."""
    return {"contract": contract.to_json(), "config": config.to_mapping() | {"data_dir": None, "init": None}}


def log(line: str) -> None:
    """Log one line for the operator.

    `supervised_run` reads the lines, too. From a line that begins with `finished`, `stopped: ` or `failed: `, it learns
    how the run ended.
    """
    _LOG.info("fedskew: %s", line)


class _WriteSettings(Callback):
    """Writes the federation's settings into the run's folder when the run begins."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def on_start(self, prepared: Prepared, state: RunState, rounds_ahead: int) -> None:  # noqa: ARG002
        self._record.begin()


class LogProgress(Callback):
    """Logs the progress of the run."""

    def on_round(self, row: RoundRow, rounds_ahead: int) -> None:
        line = f"round {row.round} of {row.round + rounds_ahead}"
        if row.evaluation is not None:
            line += f": accuracy {100 * row.evaluation.accuracy:.2f} %"
        if row.sites:
            line += f", tested by {', '.join(row.sites)}"
        if row.loss is not None:
            line += f", loss {row.loss:.4f}"
        if row.absent:
            line += f", absent: {', '.join(row.absent)}"
        log(f"{line}, {row.seconds:.1f} s")

    def on_notice(self, line: str) -> None:
        log(line)

    def on_end(self, result: Result) -> None:
        accuracy, sites = f"{100 * result.accuracy:.2f} %", describe_participation(result.site_rounds, result.rounds)
        testers = f", tested by {', '.join(result.testing_sites)}" if result.testing_sites else ""
        if result.history[-1].evaluation is None:
            accuracy += f" after round {result.last_round}, the last one with an evaluation"
        log(f"finished with accuracy {accuracy}{testers}; trained by {sites}; the run is in {result.folder}")
