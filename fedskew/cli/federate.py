"""`fedskew federate`: the group of commands, and the commands that plan and run a federation with Flower."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli import (
    federate_audit,
    federate_backup,
    federate_certs,
    federate_inquiries,
    federate_site,
    federate_status,
)
from fedskew.cli.commands import (
    FLAGS,
    INTERRUPTED,
    Commands,
    Json,
    Quiet,
    Settings,
    add_command,
    option,
    split_names,
    takes_settings,
)
from fedskew.cli.federate_log import CommandLog, LogFormat, LogLevel, MetricsPort
from fedskew.errors import UserError
from fedskew.platforms import require_posix

if TYPE_CHECKING:
    from fedskew.flower.local_federation import LocalFederation

FEDERATION = "Federation"

_SIMULATION_ONLY = ("engine", "compile", "eval_local", "save_predictions", "client_test", "server_data")
"""Flags that do not apply to a federation across machines."""
_APP_FLAGS = [
    name
    for name, flag in FLAGS.items()
    if not flag.key.startswith("partition") and name not in ("device", *_SIMULATION_ONLY)
]
_TRIAL_FLAGS = [name for name in FLAGS if name not in ("clients", *_SIMULATION_ONLY)]
_TRIAL_SITES = 3
"""The number of sites of a trial if neither a flag nor the configuration sets it."""

_FederationSettings = Annotated[
    list[str] | None,
    option("--federation", "KEY=VALUE",
           "federation setting: minimum, round_timeout, evaluation, site_metrics, share_loss, test_data, folder …; "
           "repeatable", FEDERATION),
]  # fmt: skip

_ColumnSums = Annotated[
    bool,
    typer.Option(
        "--column-sums",
        help="compute a table's categories, means and standard deviations from sums that the sites send; the given "
        "data or encoding then sets only the columns and their kinds",
        rich_help_panel=FEDERATION,
    ),
]

_SecureAggregation = Annotated[
    bool,
    typer.Option(
        "--secure-aggregation",
        help="let the server learn only sums over the sites, and no single site's update",
        rich_help_panel=FEDERATION,
    ),
]


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(cls=Commands, help="Run a federation across machines with Flower.", no_args_is_help=True)
    add_command(
        group, "init", _with_flower(_init),
        "fedskew federate init my-federation --sites north,south,east --data digits --method fedvls --rounds 20",
        "fedskew federate init scans --sites a,b --classes benign,malignant --shape 1,64,64 --federation minimum=2",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "up", _with_flower(_up),
        "fedskew federate up trial --sites 3 --data digits --method fedvls --rounds 5",
        "fedskew federate up trial2 --sites 4 --partition labels --labels-per-client 3 --rounds 3 "
        "--clients-per-round 2",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "site", _with_flower(federate_site.site),
        "fedskew federate site site.yaml --check my-federation",
        "fedskew federate site site.yaml --check my-federation --superlink fl.example.org:9092 --keys keys/sites/north",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "approve", _with_flower(federate_site.approve),
        "fedskew federate approve my-federation site.yaml",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "run", _with_flower(_run),
        "fedskew federate run my-federation",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "survey", _with_flower(federate_inquiries.survey),
        "fedskew federate survey my-federation",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "evaluate", _with_flower(federate_inquiries.evaluate),
        "fedskew federate evaluate model my-federation",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "compare", _with_flower(federate_inquiries.compare),
        "fedskew federate compare model my-federation site.yaml -o comparison.md",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "certs", _with_flower(federate_certs.certs),
        "fedskew federate certs keys --sites north,south,east --host fl.example.org",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "status", _with_flower(federate_status.status),
        "fedskew federate status runs/first",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "backup", _with_flower(federate_backup.backup),
        "fedskew federate backup my-federation backup-1 --database superlink.db --keys keys",
        group="federate",
    )  # fmt: skip
    federate_audit.add_to(group, _with_flower)
    app.add_typer(group, name="federate")


def _with_flower(command: Callable[..., None]) -> Callable[..., None]:
    """Refuse the command in one line if Flower is not installed."""

    @wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        if find_spec("flwr") is None:
            raise UserError("federations across machines need Flower: pip install 'fedskew[flower]'")
        command(*arguments, **options)

    return checked


@takes_settings(_APP_FLAGS)
def _init(
    settings: Settings,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for the app; it must be new or empty")],
    sites: Annotated[str, option("--sites", "A,B,C", "names of the sites", FEDERATION)],
    classes: Annotated[
        str | None, option("--classes", "A,B", "class names, if you have no sample of the sites' data", FEDERATION)
    ] = None,
    shape: Annotated[
        str | None,
        option("--shape", "C,H,W", "shape of an image, or number of table columns; requires --classes",
               FEDERATION),
    ] = None,
    encoding: Annotated[
        str | None,
        option("--encoding", "FILE", "how a table's columns become inputs, in JSON or YAML; requires --classes",
               FEDERATION),
    ] = None,
    column_sums: _ColumnSums = False,
    secure_aggregation: _SecureAggregation = False,
    node_keys: Annotated[
        str | None,
        option("--node-keys", "DIR",
               "folder with the sites' public keys, NAME/node.pub or NAME.pub; requires --secure-aggregation",
               FEDERATION),
    ] = None,
    federation: _FederationSettings = None,
) -> None:  # fmt: skip
    """Write the Flower app of a federation, with a README for its operators.

    The classes, input shape and normalisation come from --data, or from --classes with --shape or --encoding.
    """
    from fedskew.cli.terminal import notice, stdout
    from fedskew.data import load
    from fedskew.experiment.config import parse_assignments
    from fedskew.experiment.preparation import data_options
    from fedskew.flower.app_folder import write_app
    from fedskew.flower.contract import Contract
    from fedskew.flower.disclosure import encoding_warnings, settings_warnings
    from fedskew.flower.planning import contract_from_file, contract_from_text, make_settings, resolve_config
    from fedskew.flower.secure.identity import read_roster

    config, names = settings.config(), split_names(sites)
    fitted = None  # the coordinator's data, if the contract describes them
    if (classes is None) != (shape is None and encoding is None) or (shape and encoding):
        raise UserError("expected --classes with exactly one of --shape and --encoding, or --data instead")
    if classes is not None and encoding is not None:
        contract = contract_from_file(classes, encoding)
    elif classes is not None and shape is not None:
        contract = contract_from_text(classes, shape)
    else:
        dataset = load(config.data, config.data_dir, **data_options(config))
        contract = Contract.from_dataset(dataset)
        fitted = None if column_sums or "encoding" in data_options(config) else dataset
    if column_sums:
        contract = contract.draft()
    values = parse_assignments(federation or ())
    if secure_aggregation != (node_keys is not None):
        raise UserError("--secure-aggregation and --node-keys go together; expected both, or neither")
    if node_keys is not None:
        values |= {"secure_aggregation": True, "node_keys": read_roster(Path(node_keys), names)}
    federation_settings = make_settings(names, values)
    resolved_config = resolve_config(config, contract, names)
    path = write_app(folder, federation_settings, contract, resolved_config, from_data=fitted is not None)
    own_data = [] if fitted is None else encoding_warnings(fitted)
    for warning in (*own_data, *settings_warnings(federation_settings, contract, resolved_config)):
        notice(f"warning: {warning}")
    stdout().print(f"{path}: a Flower app for {', '.join(names)}", soft_wrap=True, markup=False)
    notice(f"instructions for operators: {path / 'README.md'}; all settings: {path / 'pyproject.toml'}")


@takes_settings(_TRIAL_FLAGS)
def _up(
    settings: Settings,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for keys, app, logs and the run")] = "federation",
    sites: Annotated[
        int | None,
        typer.Option(
            "--sites",
            metavar="N",
            min=1,
            help="number of sites (default: partition.clients, or 3); not used if the partition sets it, as column, "
            "counts and saved do",
            rich_help_panel=FEDERATION,
        ),
    ] = None,
    column_sums: _ColumnSums = False,
    secure_aggregation: _SecureAggregation = False,
    federation: _FederationSettings = None,
    as_json: Json = False,
    quiet: Quiet = False,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
) -> None:  # fmt: skip
    """Run a whole federation on this machine, as separate processes with real TLS and node keys.

    Repeat the command to resume after the last saved round.
    """
    from fedskew.cli.terminal import print_json, stdout
    from fedskew.experiment.config import parse_assignments, with_values
    from fedskew.experiment.result import describe_participation
    from fedskew.flower.disclosure import settings_warnings
    from fedskew.flower.planning import read_app
    from fedskew.flower.trial import plan_trial, run_folder

    log = CommandLog("trial", log_format, "error" if quiet or as_json else log_level)
    config = settings.config()
    if not _sets_sites(config.partition.rule):
        config = with_values(config, {"partition.clients": sites or config.partition.clients or _TRIAL_SITES})
    values = parse_assignments(federation or ()) | ({"secure_aggregation": True} if secure_aggregation else {})
    trial = plan_trial(Path(folder), config, values, column_sums)
    for warning in settings_warnings(*read_app(trial.app)):
        log.write(f"warning: {warning}")
    run = run_folder(trial)
    if run.finished:
        log.write(f"{run.path} is already finished; nothing was run")
    else:
        with log.reporting_errors():
            _start_trial(trial, log)
    summary = run.summary() or {}
    if as_json:
        print_json(summary | {"folder": str(run.path)})
        return
    rounds = f"{summary['rounds']} round{'s' if summary['rounds'] > 1 else ''}"
    participation = describe_participation(summary.get("sites", {}), summary["rounds"])
    line = f"{summary['method']}: accuracy {100 * summary['accuracy']:.2f} % after {rounds}, {participation}; "
    line += f"run saved in {run.path}"
    stdout().print(line, soft_wrap=True, markup=False)


def _sets_sites(rule: str) -> bool:
    """Whether this partition rule sets the number of sites itself, as a file of counts does."""
    from fedskew.data.partitions.rule import partition_class
    from fedskew.flower.settings import SITES

    # `plan_trial` refuses the rule SITES, which the configuration of a real federation has.
    return rule != SITES and all(spec.name != "clients" for spec in fields(partition_class(rule)))


def _start_trial(trial: LocalFederation, log: CommandLog) -> None:
    """Start all processes and show what the server reports. The processes end with the run, even if the run fails."""
    from fedskew.flower.trial import run_trial

    require_posix("fedskew federate up")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `with trial` ends the processes
    logs = trial.folder / "logs"
    try:
        with trial:
            log.write(f"starting a SuperLink on port {trial.port} and {len(trial.sites)} SuperNodes; logs in {logs}")
            trial.start()
            run_trial(trial, log.write)
    except KeyboardInterrupt as interrupt:
        log.write("stopped; repeat the command to resume after the last saved round")
        raise typer.Exit(INTERRUPTED) from interrupt


def _run(
    app: Annotated[str, typer.Argument(metavar="APP", help="folder of the federation's app")],
    connection: Annotated[
        str | None,
        option("--connection", "NAME", "the SuperLink's name in Flower's config.toml (default: Flower's default)"),
    ] = None,
    run_folder: Annotated[
        str | None, option("--folder", "RUN", "the run's folder (default: federation.folder of the app)")
    ] = None,
    metrics_port: MetricsPort = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
) -> None:
    """Train a federation: start its run on the SuperLink, and resume it if it fails.

    Use this command on the server. It ends with status 0 only if the run was completed.
    """
    from fedskew.flower.monitoring import monitored
    from fedskew.flower.planning import check_app_version, read_app
    from fedskew.flower.run_monitoring import RunMonitor
    from fedskew.flower.supervised_run import FlowerRun, only_command, read_progress, run_to_end

    require_posix("fedskew federate run")
    log = CommandLog("server", log_format, log_level)
    with log.reporting_errors():
        if warning := check_app_version(app):
            log.write(f"warning: {warning}")
        folder = Path(run_folder or read_app(app)[0].folder).expanduser().resolve()
        log_file = folder.with_name(f"{folder.name}.log")
        with only_command(folder), monitored(RunMonitor(folder), metrics_port) as address:
            if address is not None:
                log.write(f"metrics: {address}/metrics; health: {address}/healthz")
            log.write(f"the run's folder is {folder}; the whole log is {log_file}")
            # The path is absolute, because the ServerApp may run in another folder.
            runs = FlowerRun(Path(app), connection, log_file, {}, {"federation.folder": str(folder)})
            runs.stop_left_over(folder, log.write)  # an earlier command may have left its run at the SuperLink
            try:
                run_to_end(runs.start, lambda: read_progress(folder), log.write)
            except KeyboardInterrupt as interrupt:
                log.write(
                    "the run goes on at the SuperLink; repeat the command to stop it there and resume it, or end it "
                    "with `flwr stop`"
                )
                raise typer.Exit(INTERRUPTED) from interrupt
