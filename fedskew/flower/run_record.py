"""The settings of a federation, which are saved as `federation.json` in the folder of its run.

All rounds of a run must have the same settings, except those in `_MAY_CHANGE`. A run that resumes with other settings,
for instance without noise, is refused.

With noise, the file also counts the releases, from which ε is computed. The updates of all sites in a round are one
release. A round that is repeated after a crash is another release.

If a table's encoding was fitted to column sums from the sites, the file has the encoding. So a resumed run does not
request the sums again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.storage.files import replace_file, reporting_os_errors
from fedskew.flower.contract import Contract
from fedskew.flower.remote_encoding import FittedEncoding
from fedskew.flower.settings import FederationSettings

NAME = "federation.json"
_MAY_CHANGE = (
    "minimum", "begin_with", "round_timeout", "grace", "grace_seconds", "attempts", "folder",
    "survey", "evaluate_only", "purpose", "tested_model",
)  # fmt: skip
"""Settings that may change when a run resumes: how long and for how many sites the server waits, how often it attempts
a round, the folder, and the settings of surveys and tests without training."""


class RunRecord:
    """The record of one run."""

    def __init__(self, folder: Path, settings: FederationSettings, contract: Contract) -> None:
        self._folder, self._path = folder, folder / NAME
        self._fixed = _fixed_settings(settings, contract)
        self.releases = 0
        self.fitted: FittedEncoding | None = None
        """The encoding of a table that was fitted to column sums from the sites. None if there is none yet."""

    def check(self) -> None:
        """Read the folder's record, if it has one. Refuse a run with other settings, and rounds without a record."""
        kept = self._read()
        if kept is None:
            if self._has_rounds():
                raise UserError(
                    f"{self._folder} has rounds but no {NAME}, so the settings they were trained with are "
                    "unknown; restore it, or choose another federation.folder"
                )
            return
        if differences := _differences(kept["settings"], self._fixed):
            raise UserError(
                f"{self._folder} holds a run with {'; '.join(differences)}: restore these settings, or choose another "
                "federation.folder"
            )
        self.releases, self.fitted = kept["releases"], kept["fitted"]

    def begin(self) -> None:
        """Check the record in the run's folder. Write a new one if there is none."""
        self.check()
        if not self._path.exists():
            self._write()

    def release(self) -> None:
        """Count a release before it happens, so that a crash can only make the count too large."""
        self.releases += 1
        self._write()

    def _write(self) -> None:
        content: dict[str, Any] = {"settings": self._fixed, "releases": self.releases}
        if self.fitted is not None:
            content["encoding"] = self.fitted.to_json()
        text = json.dumps(content, indent=2) + "\n"
        replace_file(self._path, lambda draft: _put(draft, text))

    def _read(self) -> dict[str, Any] | None:
        with reporting_os_errors("read", self._path):
            text = self._path.read_text(encoding="utf-8", errors="replace") if self._path.exists() else None
        if text is None:
            return None
        try:
            kept = json.loads(text)
            fitted = FittedEncoding.from_json(kept["encoding"]) if "encoding" in kept else None
            return {"settings": dict(kept["settings"]), "releases": int(kept["releases"]), "fitted": fitted}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self._path} is damaged; restore it, or choose another federation.folder") from error

    def _has_rounds(self) -> bool:
        """Whether the folder has rounds besides row 0, which is the model before any training."""
        rows = self._folder / "rounds.jsonl"
        with reporting_os_errors("read", rows):
            return rows.exists() and rows.read_bytes().count(b"\n") > 1


def _fixed_settings(settings: FederationSettings, contract: Contract) -> dict[str, Any]:
    """Return the settings that must not change, and those of the contract, as JSON values."""
    own: Mapping[str, Any] = {f"federation.{k}": v for k, v in asdict(settings).items() if k not in _MAY_CHANGE}
    agreed = {f"contract.{key}": value for key, value in contract.to_json().items()}
    fixed: dict[str, Any] = json.loads(json.dumps({**own, **agreed}))
    return fixed


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    # Only settings in the record are compared, because an older version of fedskew did not write newer settings.
    pairs = {key: (value, now.get(key)) for key, value in sorted(before.items())}
    return [f"{key} = {json.dumps(old)}, not {json.dumps(new)}" for key, (old, new) in pairs.items() if old != new]


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
