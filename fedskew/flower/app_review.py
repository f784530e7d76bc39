"""Review an app at a site: describe the app to the administrator, and make the approval."""

from __future__ import annotations

import getpass
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fedskew.errors import UserError, plural
from fedskew.flower.approved_apps import Approval, app_hash, file_hashes, read_approvals
from fedskew.flower.contract import Contract
from fedskew.flower.disclosure import disclosures
from fedskew.flower.planning import read_app, resolve_config_at_site
from fedskew.flower.request_checks import approved_settings

_MAX_NAMES = 20
"""The maximum number of names in a list."""


def make_approval(app: Path, site: str, approved_by: str | None = None) -> Approval:
    """Make the approval of an app, with the hashes of the files that Flower would send.

    `approved_by` is a person, by default the current user.
    """
    settings, contract, config = read_app(app)
    if site not in settings.sites:
        raise UserError(f"the app has no site {site!r}; expected one of {', '.join(settings.sites)}")
    files = file_hashes(build_archive(app))
    return Approval(
        app=app.resolve().name,
        hash=app_hash(files),
        approved_by=approved_by or _user(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        files=files,
        settings=approved_settings(settings, contract, resolve_config_at_site(config, contract, settings.sites)),
    )


def _user() -> str:
    """The name of the current user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # as in a container whose user has only a number
        raise UserError("the current user has no name; expected --by with the name of the approving person") from error


def build_archive(app: Path) -> bytes:
    """Build the archive of an app's folder, as Flower sends it to the sites."""
    from flwr.cli.build import build_fab_from_disk

    if not app.is_dir():
        raise UserError(f"{app} is not a folder; expected the folder of a federation's app")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower calls deprecated functions
        try:
            return build_fab_from_disk(app)
        except (ValueError, OSError) as error:  # for example, a setting is missing, or the app is too large
            raise UserError(f"Flower cannot pack {app}: {' '.join(str(error).split())}") from error


def require_approval(app: Path, site_folder: Path) -> bool:
    """If the site has a list of approvals, refuse an app that is not on it. Return whether there is such a list."""
    approvals = read_approvals(site_folder)
    if approvals is None:
        return False
    folder = app if app.is_dir() else app.parent  # `app` may be the app's pyproject.toml
    if app_hash(file_hashes(build_archive(folder))) not in {approval.hash for approval in approvals}:
        raise UserError(f"this site has not approved {folder}; run `fedskew federate approve {folder} SITE.yaml`")
    return True


def describe_app(app: Path, approval: Approval) -> Iterator[str]:
    """Describe an app to an administrator, line by line.

    Control characters are escaped. Otherwise, a name in the app could add a false line, or hide a true one.
    """
    for line in _lines(app, approval):
        yield "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _lines(app: Path, approval: Approval) -> Iterator[str]:
    settings, contract, config = read_app(app)
    yield f"app {approval.app}, hash {approval.hash}"
    yield f"sites: {_listed(settings.sites)}"
    rounds, epochs = plural(config.rounds, "round"), plural(config.local_epochs, "local epoch")
    yield f"method {config.method}, model {config.model}, {rounds}, {epochs}"
    yield _describe_contract(contract)
    yield from disclosures(settings, contract, config)
    yield "files:"
    for name, digest in approval.files.items():
        yield f"  {digest}  {name}"


def _describe_contract(contract: Contract) -> str:
    if contract.column_sums and contract.encoding is not None:
        kinds = [f"{c.name} ({'number' if c.categories is None else 'category'})" for c in contract.encoding.columns]
        return f"data: table with columns {_listed(tuple(kinds))}, classes {_listed(contract.classes)}"
    columns = f", columns {_listed(contract.columns)}" if contract.columns else ""
    return f"data: {contract.kind} of shape {list(contract.shape)}, classes {_listed(contract.classes)}{columns}"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
