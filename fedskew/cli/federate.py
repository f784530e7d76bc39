"""`fedskew federate`: run a federation across machines with Flower."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli import federate_audit, federate_status
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
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.data.federation import Federation
    from fedskew.flower.credentials import Credentials
    from fedskew.flower.local_federation import LocalFederation
    from fedskew.flower.site_config import SiteConfig

FEDERATION = "Federation"

_SIMULATION_ONLY = ("engine", "compile", "eval_local", "save_predictions", "client_test", "train", "lora_rank")
"""Flags that have no meaning in a federation across machines."""
_APP_FLAGS = [
    name
    for name, flag in FLAGS.items()
    if not flag.key.startswith("partition") and name not in ("device", *_SIMULATION_ONLY)
]
_TRIAL_FLAGS = [name for name in FLAGS if name not in ("clients", *_SIMULATION_ONLY)]

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
        help="fit the encoding of a table to sums that the sites send; --data or --encoding then give the columns only",
        rich_help_panel=FEDERATION,
    ),
]

_REAL_FEDERATIONS = """These keys are for testing, because you know every site's private key. For a real federation,
- get the server's certificate from your organisation or a public authority;
- let each site create a key pair, ssh-keygen -t ecdsa -b 384 -N '' -f node.key, and send you only node.key.pub."""


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
        group, "site", _with_flower(_site),
        "fedskew federate site site.yaml --check my-federation",
        "fedskew federate site site.yaml --check my-federation --superlink fl.example.org:9092 --keys keys/sites/north",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "approve", _with_flower(_approve),
        "fedskew federate approve my-federation site.yaml",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "run", _with_flower(_run),
        "fedskew federate run my-federation",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "certs", _with_flower(_certs),
        "fedskew federate certs keys --sites north,south,east --host fl.example.org",
        group="federate",
    )  # fmt: skip
    add_command(
        group, "status", _with_flower(federate_status.status),
        "fedskew federate status runs/first",
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
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for the app; it must not exist")],
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
    from fedskew.flower.disclosure import settings_warnings
    from fedskew.flower.planning import contract_from_file, contract_from_text, make_settings, resolve_config

    config, names = settings.config(), split_names(sites)
    if (classes is None) != (shape is None and encoding is None) or (shape and encoding):
        raise UserError("--classes goes with --shape or with --encoding; expected both, or --data instead")
    if classes is not None and encoding is not None:
        contract = contract_from_file(classes, encoding)
    elif classes is not None and shape is not None:
        contract = contract_from_text(classes, shape)
    else:
        contract = Contract.from_dataset(load(config.data, config.data_dir, **data_options(config)))
    if column_sums:
        contract = contract.draft()
    federation_settings = make_settings(names, parse_assignments(federation or ()))
    resolved_config = resolve_config(config, contract, names)
    path = write_app(folder, federation_settings, contract, resolved_config)
    for warning in settings_warnings(federation_settings, contract, resolved_config):
        notice(f"warning: {warning}")
    stdout().print(f"{path}: a Flower app for {', '.join(names)}", soft_wrap=True, markup=False)
    notice(f"instructions for operators: {path / 'README.md'}; all settings: {path / 'pyproject.toml'}")


@takes_settings(_TRIAL_FLAGS)
def _up(
    settings: Settings,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for keys, app, logs and the run")] = "federation",
    sites: Annotated[
        int,
        typer.Option(
            "--sites",
            metavar="N",
            min=1,
            help="number of sites; not used with --partition column, counts or saved, which set it themselves",
            rich_help_panel=FEDERATION,
        ),
    ] = 3,
    column_sums: _ColumnSums = False,
    federation: _FederationSettings = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run a whole federation on this machine, as separate processes with real TLS and node keys.

    Repeat the command to resume after the last saved round.
    """
    from fedskew.cli.terminal import notice, print_json, stdout
    from fedskew.experiment.config import parse_assignments, with_values
    from fedskew.experiment.result import describe_participation
    from fedskew.flower.disclosure import settings_warnings
    from fedskew.flower.planning import read_app
    from fedskew.flower.trial import plan_trial, run_folder

    def show(line: str) -> None:
        if not (quiet or as_json):
            notice(line)

    config = settings.config()
    if config.partition.rule not in ("column", "counts", "saved"):  # these take the sites from the data or a file
        config = with_values(config, {"partition.clients": sites})
    trial = plan_trial(Path(folder), config, parse_assignments(federation or ()), column_sums)
    for warning in settings_warnings(*read_app(trial.app)):
        show(f"warning: {warning}")
    run = run_folder(trial)
    if run.finished:
        show(f"{run.path} is already finished; nothing was run")
    else:
        _start_trial(trial, show)
    summary = run.summary() or {}
    if as_json:
        print_json(summary | {"folder": str(run.path)})
        return
    rounds = f"{summary['rounds']} round{'s' if summary['rounds'] > 1 else ''}"
    participation = describe_participation(summary.get("sites", {}), summary["rounds"])
    line = f"{summary['method']}: accuracy {100 * summary['accuracy']:.2f} % after {rounds}, {participation}; "
    line += f"run saved in {run.path}"
    stdout().print(line, soft_wrap=True, markup=False)


def _start_trial(trial: LocalFederation, show: Callable[[str], None]) -> None:
    """Start all processes and show what the server reports. The processes end with the run, even if it fails."""
    from fedskew.cli.terminal import notice
    from fedskew.flower.trial import run_trial

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `with trial` ends the processes
    logs = trial.folder / "logs"
    try:
        with trial:
            show(f"starting a SuperLink on port {trial.port} and {len(trial.sites)} SuperNodes; logs in {logs}")
            run_trial(trial, show)
    except KeyboardInterrupt as interrupt:
        notice("stopped; repeat the command to resume after the last saved round")
        raise typer.Exit(INTERRUPTED) from interrupt


def _site(
    file: Annotated[str, typer.Argument(metavar="SITE.yaml", help="the site's configuration")],
    check: Annotated[
        str | None, option("--check", "APP", "check the data against this app (its folder or pyproject.toml)")
    ] = None,
    superlink: Annotated[str | None, option("--superlink", "HOST:PORT", "connect to this server")] = None,
    keys: Annotated[
        str | None,
        option("--keys", "DIR", "folder with the site's ca.pem and node.key, as written by `federate certs`"),
    ] = None,
) -> None:
    """Check a site's configuration and data. With --superlink, connect the site and keep it connected.

    Before the site connects, its data are checked against the app's contract. Its keys and the server's certificate
    are also checked.
    """
    from fedskew.flower.planning import read_app
    from fedskew.flower.site_config import load_site

    if superlink is not None and check is None:
        raise UserError("--superlink needs --check; expected the federation's app, or its pyproject.toml")
    if superlink is not None and keys is None:
        raise UserError("--superlink needs --keys; expected the folder with the site's ca.pem and node.key")
    config = load_site(file)
    contract = None if check is None else read_app(check)[1]
    federation = config.federation(contract)
    _show_data(config.name, federation)
    if check is not None:
        _check_against_app(check, config, federation)
    if superlink is not None and keys is not None:
        _connect(Path(file), superlink, Path(keys))


def _show_data(name: str, federation: Federation) -> None:
    from fedskew.cli.terminal import stdout

    counts = federation.label_counts[0].tolist()
    by_class = ", ".join(f"{label} {count}" for label, count in zip(federation.dataset.classes, counts, strict=True))
    stdout().print(f"{name}: {federation.sizes[0]} training samples ({by_class})", soft_wrap=True, markup=False)


def _check_against_app(app: str, site: SiteConfig, federation: Federation) -> None:
    from fedskew.cli.terminal import notice, stdout
    from fedskew.flower.app_review import require_approval
    from fedskew.flower.disclosure import disclosures, settings_warnings
    from fedskew.flower.planning import read_app
    from fedskew.flower.policy import LOCAL_TESTS
    from fedskew.flower.request_checks import DETAILS
    from fedskew.flower.site_ledger import SiteLedger, planned_release

    settings, contract, config = read_app(app)
    if site.name not in settings.sites:
        raise UserError(f"{site.name!r} is not a site of this federation; expected one of {', '.join(settings.sites)}")
    site.policy.require_run(config)
    site.policy.require_noise([settings.clip, settings.noise] if settings.privacy == "local" else None)
    contract.admit(federation.dataset)
    for line in (*federation.dataset.notes, *contract.warnings(federation.dataset)):
        notice(f"warning: {line}")
    for line in disclosures(settings, contract, config):
        stdout().print(line, soft_wrap=True, markup=False)
    budget = SiteLedger(site.state_folder, site.policy).describe_plan(planned_release(settings), config.rounds)
    if budget is not None:
        stdout().print(budget, soft_wrap=True, markup=False)
    if contract.column_sums:
        _show_column_sums(site, federation)
    if DETAILS.index(settings.site_metrics) > DETAILS.index(site.metrics):
        notice(f"this site allows only metrics: {site.metrics}, so the server will not receive its test results")
    if settings.local_tests and not site.policy.allows(LOCAL_TESTS):
        notice(
            "this site's policy does not allow local tests, so the server will not learn its accuracy after local "
            f"training; to report it, add policy: {{reveals: [{LOCAL_TESTS}]}}"
        )
    for warning in settings_warnings(settings, contract, config):
        notice(f"warning: {warning}")
    if not require_approval(Path(app), site.folder):
        notice("warning: this site runs every app that the server sends; restrict it with `fedskew federate approve`")


def _show_column_sums(site: SiteConfig, federation: Federation) -> None:
    """Show the sums that the site will send, or say that its policy does not allow them."""
    from fedskew.cli.terminal import notice, stdout
    from fedskew.flower.policy import COLUMN_SUMS
    from fedskew.flower.site import sum_site_columns

    if not site.policy.allows(COLUMN_SUMS):
        notice(
            "this site's policy does not allow column sums, so the encoding will be fitted without its data; to send "
            f"them, add policy: {{reveals: [{COLUMN_SUMS}]}}"
        )
        return
    for sums in sum_site_columns(federation, site.policy):
        stdout().print(f"column sums of {sums.describe()}", soft_wrap=True, markup=False)


def _connect(file: Path, superlink: str, folder: Path) -> None:
    from fedskew.cli.terminal import notice
    from fedskew.flower import supernode
    from fedskew.flower.credentials import NodeKeys
    from fedskew.flower.processes import free_ports

    keys = NodeKeys(folder)
    supernode.require_keys(keys)
    expires = supernode.require_trusted_server(superlink, keys)
    if warning := supernode.expiry_warning(superlink, expires):
        notice(warning)
    threading.Thread(target=supernode.watch_certificate, args=(superlink, keys, notice), daemon=True).start()
    command = supernode.supernode_command(file, superlink, keys, free_ports(1)[0])
    notice(" ".join(command))
    supernode.run_supernode(command, keys)


def _approve(
    app: Annotated[str, typer.Argument(metavar="APP", help="folder of the federation's app")],
    file: Annotated[str, typer.Argument(metavar="SITE.yaml", help="the site's configuration")],
    name: Annotated[str | None, option("--by", "NAME", "who approves the app (default: your user name)")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="approve without asking")] = False,
) -> None:
    """Show what an app does, and approve it for a site.

    A site with approvals runs only approved apps, and refuses requests whose settings were not approved.
    """
    from fedskew.cli.terminal import notice, stdout
    from fedskew.flower.app_review import describe_app, make_approval
    from fedskew.flower.approved_apps import add_approval
    from fedskew.flower.site_config import load_site

    site = load_site(file)
    approval = make_approval(Path(app), site.name, name)
    for line in describe_app(Path(app), approval):
        stdout().print(line, soft_wrap=True, markup=False)
    if not yes and not typer.confirm(f"Approve this app for {site.name}?"):
        raise UserError("the app was not approved")
    path = add_approval(site.folder, approval)
    notice(f"approved by {approval.approved_by}; {site.name} runs only the apps in {path}")


def _run(
    app: Annotated[str, typer.Argument(metavar="APP", help="folder of the federation's app")],
    connection: Annotated[
        str | None,
        option("--connection", "NAME", "the SuperLink's name in Flower's config.toml (default: Flower's default)"),
    ] = None,
) -> None:
    """Train a federation: start its run on the SuperLink, and resume it if it fails.

    Run it on the server. It ends with status 0 only if the run was completed.
    """
    from fedskew.cli.terminal import notice
    from fedskew.flower.planning import read_app
    from fedskew.flower.supervised_run import FlowerRun, completed_rounds, run_to_end

    folder = Path(read_app(app)[0].folder).expanduser()
    log = folder.with_name(f"{folder.name}.log")
    notice(f"the run's folder is {folder}; the whole log is {log}")
    run_to_end(FlowerRun(Path(app), connection, log, {}).start, lambda: completed_rounds(folder), notice)


def _certs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="folder for the keys; existing keys are kept")],
    sites: Annotated[str, option("--sites", "A,B,C", "names of the sites")],
    hosts: Annotated[
        list[str] | None,
        option("--host", "NAME", "the server's name or address, besides localhost; repeatable"),
    ] = None,
    days: Annotated[int, typer.Option("--days", metavar="N", help="days until the server's certificate expires")] = 365,
    as_json: Json = False,
) -> None:
    """Create a certificate authority, a server certificate and the sites' keys for a test federation.

    To add a site or a host, repeat the command with it. Existing keys are kept.
    """
    from fedskew.cli.terminal import notice, print_json
    from fedskew.flower.credentials import make_credentials

    names = split_names(sites)
    credentials = make_credentials(folder, names, hosts or (), days)
    if as_json:
        print_json(_certs_json(credentials, names))
        return
    _show_certs(credentials, names)
    notice(_REAL_FEDERATIONS)


def _certs_json(credentials: Credentials, sites: list[str]) -> dict[str, Any]:
    nodes = {
        site: {"authority": str(node.authority), "private": str(node.private), "public": str(node.public)}
        for site, node in ((site, credentials.node(site)) for site in sites)
    }
    server = {"authority": credentials.authority, "certificate": credentials.certificate, "key": credentials.key}
    return {"server": {name: str(path) for name, path in server.items()}, "sites": nodes}


def _show_certs(credentials: Credentials, sites: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from fedskew.cli.terminal import stdout

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        (f"{credentials.authority}", "the authority's certificate: public"),
        (f"{credentials.authority_key}", "signs server certificates: store it offline"),
        (f"{credentials.certificate}, {credentials.key.name}", "for the server"),
    ]
    rows += [(f"{credentials.node(site).folder}/", f"for {site}: send it over a secure channel") for site in sites]
    for path, purpose in rows:
        table.add_row(Text(path), Text(purpose, style="dim"))
    stdout().print(table)
