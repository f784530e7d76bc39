"""The apps that a site has approved.

`approvals.json` beside a site's `site.yaml` lists the approved apps. For each app, it has the hashes of the files, the
settings, the name of the person who approved it, and the date. A site with this file runs no other app, and trains with
no other settings. `fedskew federate approve` writes the file. Code that is installed at the site reads it before any
code of an app is executed.

An app is identified by the names and contents of its files. The bytes of Flower's archive do not identify it, because
they depend on the version of the compression library.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.flower.audit import read_site_values

NAME = "approvals.json"
_FILE_LIST = ".info/"
"""The folder with Flower's list of the files in an archive. Flower deletes it when it installs the app."""
_UNPROTECTED = (
    "this site requires secure aggregation, but has approved no app, so the server could send any code; expected "
    "`fedskew federate approve`"
)


@dataclass(frozen=True)
class Approval:
    """One app that may run at the site."""

    app: str
    hash: str
    approved_by: str
    date: str
    files: dict[str, str]
    """SHA-256 of each file."""
    settings: dict[str, Any]
    """The settings that the server may use. `approved_settings` in request_checks.py makes them."""


def read_approvals(folder: Path) -> list[Approval] | None:
    """Read the approvals of the site in this folder. None if the folder has no list of approvals."""
    path = folder / NAME
    try:
        return [Approval(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():  # with a broken link, the list is lost
            return None
        raise UserError(f"{path} cannot be read ({error}); restore it, or delete it and approve again") from error


def add_approval(folder: Path, approval: Approval) -> Path:
    """Add an approval to the site's list, in place of an earlier one with the same hash."""
    # Imported late, because a SuperNode only reads approvals, and must start quickly.
    from fedskew.experiment.storage.files import write_file

    others = [known for known in read_approvals(folder) or [] if known.hash != approval.hash]
    path = folder / NAME
    write_file(path, json.dumps([asdict(known) for known in (*others, approval)], indent=2) + "\n")
    return path


def file_hashes(archive: bytes) -> dict[str, str]:
    """SHA-256 of each file in one of Flower's app archives (FAB). Flower's list of the files is left out.

    Raise `UserError` for an archive that is damaged, or has two files of the same name.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            names = [name for name in files.namelist() if not name.startswith(_FILE_LIST)]
            hashes = {name: hashlib.sha256(files.read(name)).hexdigest() for name in sorted(names)}
    except Exception as error:  # zipfile raises errors of many types, such as BadZipFile, zlib.error and ValueError
        raise UserError("the app's archive is damaged") from error
    if len(hashes) < len(names):
        raise UserError("the app's archive has two files of the same name")
    return hashes


def installed_file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of an app that Flower has installed. Python's bytecode is left out."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def app_hash(files: Mapping[str, str]) -> str:
    """Compute the hash of an app from the hashes of its files."""
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def refusal(site: Path, archive: bytes) -> str | None:
    """Return the reason why a site refuses an app. None if it accepts the app. `site` is the path of its site.yaml.

    Raise `UserError` if a file of the site cannot be read. The error's text names the file, so it must not leave the
    site.
    """
    approvals = read_approvals(site.parent)
    if approvals is None:
        return _UNPROTECTED if _requires_secure_aggregation(site) else None
    try:
        files = file_hashes(archive)
    except UserError as error:
        return str(error)
    if any(approval.hash == app_hash(files) for approval in approvals):
        return None
    return f"the site has not approved this app (hash {app_hash(files)[:16]}…)"


def _requires_secure_aggregation(site: Path) -> bool:
    """Whether the site's policy requires secure aggregation. `load_site` is not used, because it would import torch."""
    policy = read_site_values(site).get("policy")
    if policy is not None and not isinstance(policy, dict):
        raise UserError(f"the policy in {site} is {policy!r}; expected keys such as require")
    return policy is not None and bool(policy.get("require"))  # the worker checks the value
