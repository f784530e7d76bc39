"""`fedskew federate site` and `approve`: two commands that a site runs."""

from __future__ import annotations

import subprocess
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedskew.cli.commands import USAGE_ERROR, option
from fedskew.cli.federate_log import CommandLog, LogFormat, LogLevel, MetricsPort
from fedskew.errors import UserError, plural
from fedskew.platforms import python_module, require_posix

if TYPE_CHECKING:
    from fedskew.data.federation import Federation
    from fedskew.flower.contract import Contract
    from fedskew.flower.site_config import SiteConfig
    from fedskew.flower.supernode import Connection


def site(
    file: Annotated[str, typer.Argument(metavar="SITE.yaml", help="the site's configuration")],
    check: Annotated[
        str | None, option("--check", "APP", "check the data against this app (its folder or pyproject.toml)")
    ] = None,
    superlink: Annotated[str | None, option("--superlink", "HOST:PORT", "connect to this server")] = None,
    keys: Annotated[
        str | None,
        option("--keys", "DIR", "folder with the site's ca.pem and node.key, as written by `federate certs`"),
    ] = None,
    metrics_port: MetricsPort = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    for_service: Annotated[bool, typer.Option("--for-service", hidden=True)] = False,
) -> None:
    """Check a site's configuration and data. With --superlink, connect the site and keep it connected.

    Before the site connects, its data are checked against the app. Its keys and the server's certificate are also
    checked.
    """
    log = CommandLog("site", log_format, log_level)
    if metrics_port is not None and superlink is None:
        raise UserError("--metrics-port needs --superlink, because a check ends at once")
    if superlink is not None and check is None:
        raise UserError("--superlink needs --check; expected the federation's app, or its pyproject.toml")
    if superlink is not None and keys is None:
        raise UserError("--superlink needs --keys; expected the folder with the site's ca.pem and node.key")
    if superlink is not None and check is not None and keys is not None:
        _check_in_other_process(file, check, log)
        with log.reporting_errors():
            _connect(Path(file), superlink, Path(keys), log, metrics_port)
    else:
        _check(file, check, for_service)


def _check(file: str, app: str | None, for_service: bool) -> None:
    """Read the site's data, and check them against the app if there is one.

    If the check is `for_service`, stderr goes to the service's log. So no warning quotes the data.
    """
    from fedskew.cli.terminal import notice
    from fedskew.engine.choice import choose_devices
    from fedskew.flower.planning import read_app
    from fedskew.flower.policy import policy_warnings
    from fedskew.flower.site_config import load_site

    config = load_site(file)
    for warning in policy_warnings(config.policy):
        notice(f"warning: {warning}")
    choose_devices(config.device)  # refuses a device that is not available
    if app is not None:
        _check_version(app)
    contract = None if app is None else read_app(app)[1]
    federation = config.federation(contract)
    _show_data(config.name, federation)
    if app is not None:
        _check_against_app(app, config, federation, for_service)


def _check_in_other_process(file: str, app: str, log: CommandLog) -> None:
    """Check the site's data in another process, whose end frees the memory of the data and of torch.

    The current process runs for as long as the site is connected. Its log gets the warnings and the error of the check,
    but not its results: they have label counts, and a service's log is often collected elsewhere.
    """
    command, env = python_module("fedskew", "federate", "site", file, "--check", app, "--for-service")
    checked = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", errors="replace", check=False)
    has_crashed = checked.returncode not in (0, USAGE_ERROR)  # the lines are then those of a traceback
    for line in checked.stderr.splitlines():
        log.write(f"error: {line}" if has_crashed else line)
    if checked.returncode:
        raise typer.Exit(checked.returncode)
    log.write(f"checked {file} and its data against {app}")


def _check_version(app: str) -> None:
    """Refuse an app of another minor version, before reading settings that this version may not know.

    Otherwise, show the installed versions.
    """
    from fedskew.cli.terminal import notice, stdout
    from fedskew.flower.planning import check_app_version
    from fedskew.flower.versions import installed_versions

    warning = check_app_version(app)
    versions = ", ".join(f"{package} {version}" for package, version in installed_versions().items())
    stdout().print(f"versions: {versions}", soft_wrap=True, markup=False)
    if warning is not None:
        notice(f"warning: {warning}")


def _show_data(name: str, federation: Federation) -> None:
    from fedskew.cli.terminal import stdout

    counts = federation.label_counts[0].tolist()
    by_class = ", ".join(f"{label} {count}" for label, count in zip(federation.dataset.classes, counts, strict=True))
    samples = plural(int(federation.sizes[0]), "training sample")
    stdout().print(f"{name}: {samples} ({by_class})", soft_wrap=True, markup=False)


def _check_against_app(app: str, site: SiteConfig, federation: Federation, for_service: bool) -> None:
    from dataclasses import replace

    from fedskew.cli.terminal import notice, stdout
    from fedskew.experiment.config import config_hash
    from fedskew.flower.app_review import require_approval
    from fedskew.flower.disclosure import disclosures, settings_warnings
    from fedskew.flower.planning import read_app, require_app_code, resolve_config_at_site
    from fedskew.flower.policy import LOCAL_TESTS, SECURE_AGGREGATION
    from fedskew.flower.releases import planned_release
    from fedskew.flower.request_checks import DETAILS, require_known_code, require_shared_scaling
    from fedskew.flower.secure.site import SecureSite
    from fedskew.flower.secure.terms import SecureTerms
    from fedskew.flower.site_config import data_warnings, mention
    from fedskew.flower.site_ledger import SiteLedger

    settings, contract, config = read_app(app)
    if site.name not in settings.sites:
        raise UserError(f"{site.name!r} is not a site of this federation; expected one of {', '.join(settings.sites)}")
    require_known_code(config, site)
    require_app_code(app, config)
    run = config_hash(resolve_config_at_site(config, contract, settings.sites))
    site.policy.require_run(config)
    site.policy.require_secure_aggregation(settings.secure_aggregation)
    site.policy.require_local_noise([settings.clip, settings.noise] if settings.privacy == "local" else None)
    site.policy.refuse_items_without_noise(settings.privacy, settings.share_loss)
    contract.admit(federation.dataset)
    if settings.privacy == "example":
        require_shared_scaling(federation.dataset.scaling, contract)
    warnings = data_warnings(federation.dataset, contract)
    for line in mention(warnings) if for_service else warnings:
        notice(f"warning: {line}")
    for line in disclosures(settings, contract, config):
        stdout().print(line, soft_wrap=True, markup=False)
    release = replace(planned_release(settings, config), run=run)
    for line in SiteLedger(site.state_folder, site.policy).describe_plan(release, config.rounds):
        stdout().print(line, soft_wrap=True, markup=False)
    if contract.column_sums:
        _show_column_sums(site, contract, federation)
    if settings.survey and site.policy.survey is not None:
        _show_survey(site, contract, federation)
    for key, declared, allowed in (
        ("survey", settings.survey, site.policy.survey),
        ("evaluate", settings.evaluate_only, site.policy.evaluate),
    ):
        if declared and allowed is None:
            notice(
                f"this site's policy does not allow `fedskew federate {key}`; to allow it, add policy: {{{key}: {{}}}}"
            )
    if DETAILS.index(settings.site_metrics) > DETAILS.index(site.metrics):
        notice(f"this site allows only metrics: {site.metrics}, so the server will not receive its test results")
    if settings.local_tests and not site.policy.allows(LOCAL_TESTS):
        notice(
            "this site's policy does not allow local tests, so the server will not learn its accuracy after local "
            f"training; to report it, add policy: {{reveals: [{LOCAL_TESTS}]}} and metrics: total"
        )
    for warning in settings_warnings(settings, contract, config):
        notice(f"warning: {warning}")
    if settings.secure_aggregation:  # refuse the app if it has another public key for this site; `str` drops log lines
        SecureSite(site, log=str).identity(SecureTerms.from_settings(settings, config))
    is_approved = require_approval(Path(app), site.folder)
    if not is_approved and site.policy.requires(SECURE_AGGREGATION):
        notice("this site requires secure aggregation, so it refuses every app until it has approved one")
    elif not is_approved:
        notice("warning: this site runs every app that the server sends; restrict it with `fedskew federate approve`")


def _show_column_sums(site: SiteConfig, contract: Contract, federation: Federation) -> None:
    """Show the sums that the site will send, or say that its policy does not allow them."""
    from fedskew.cli.terminal import notice, stdout
    from fedskew.flower.policy import COLUMN_SUMS
    from fedskew.flower.site import recorded_column_sums, sum_site_columns

    if not site.policy.allows(COLUMN_SUMS):
        notice(
            "this site's policy does not allow column sums, so the encoding will be fitted without its data; to send "
            f"the sums, add policy: {{reveals: [{COLUMN_SUMS}]}}"
        )
        return
    recorded = recorded_column_sums(site, contract)
    if recorded is not None:
        notice("this site has sent its column sums, and will repeat them")
    for sums in recorded or sum_site_columns(federation, site.policy):
        stdout().print(f"column sums of {sums.describe()}", soft_wrap=True, markup=False)


def _show_survey(site: SiteConfig, contract: Contract, federation: Federation) -> None:
    """Show what the site will answer in a survey. If it has answered before, it will repeat that answer."""
    from dataclasses import replace

    from fedskew.cli.federate_inquiries import describe_column
    from fedskew.cli.terminal import notice, stdout
    from fedskew.flower.site import read_raw_table, recorded_survey
    from fedskew.flower.site_survey import describe_site

    assert site.policy.survey is not None
    found = recorded_survey(site, contract)
    if found is not None:
        notice("this site has answered the survey, and will repeat that answer")
    elif site.policy.survey.epsilon is not None:
        stdout().print(f"survey: label counts with noise of ε = {site.policy.survey.epsilon:g}", markup=False)
        return
    else:
        admitted = replace(federation, dataset=contract.admit(federation.dataset))
        found = describe_site(admitted, read_raw_table(site, contract), site.policy.survey)
    counts = zip(contract.classes, found["label_counts"], strict=True)
    lines = [f"label counts {', '.join(f'{name} {count}' for name, count in counts)}"]
    for line in (*lines, *map(describe_column, found["columns"])):
        stdout().print(f"survey: {line}", soft_wrap=True, markup=False)


def _connect(file: Path, superlink: str, folder: Path, log: CommandLog, metrics_port: int | None) -> None:
    from fedskew.flower import supernode
    from fedskew.flower.credentials import NodeKeys
    from fedskew.flower.processes import free_ports

    require_posix("the connection of a site")
    keys = NodeKeys(folder)
    supernode.require_keys(keys)
    connection = supernode.Connection()
    with _monitored(file, connection, metrics_port) as address:
        if address is not None:
            log.write(f"metrics: {address}/metrics; health: {address}/healthz")
        expires = supernode.require_trusted_server(superlink, keys)
        if warning := supernode.expiry_warning(superlink, expires):
            log.write(warning)
        threading.Thread(target=supernode.watch_certificate, args=(superlink, keys, log.write), daemon=True).start()
        command = supernode.supernode_command(file, superlink, keys, free_ports(1)[0])
        log.write(" ".join(command))
        env = {"FLWR_LOG_LEVEL": "DEBUG"} if log.level == "debug" else {}
        supernode.run_supernode(command, keys, log.write_output, connection, env)


def _monitored(file: Path, connection: Connection, port: int | None) -> AbstractContextManager[str | None]:
    """Serve the site's health and metrics, if there is a port. Without a port, do not import Flower, to save memory."""
    if port is None:
        return nullcontext()
    from fedskew.flower.monitoring import monitored
    from fedskew.flower.site_monitoring import SiteMonitor

    return monitored(SiteMonitor(file, connection), port)


def approve(
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
    from fedskew.flower.planning import read_app, require_app_code
    from fedskew.flower.request_checks import require_known_code
    from fedskew.flower.site_config import load_site

    site, config = load_site(file), read_app(app)[2]
    require_known_code(config, site)
    require_app_code(app, config)
    approval = make_approval(Path(app), site.name, name)
    for line in describe_app(Path(app), approval):
        stdout().print(line, soft_wrap=True, markup=False)
    if not yes and not typer.confirm(f"Approve this app for {site.name}?"):
        raise UserError("the app was not approved")
    path = add_approval(site.folder, approval)
    notice(f"approved by {approval.approved_by}; {site.name} runs only the apps in {path}")
