"""A site's configuration: where its data are, what it agrees to report, and where it keeps its state.

    name: hospital-a
    data: /data/scans.npz            # or {name: patients.csv, label: diagnosis}: as for `fedskew run`
    state: state                     # beside this file unless the path is absolute

The file never leaves the site.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data import Dataset, load
from fedskew.data.federation import Federation
from fedskew.data.loading import is_named
from fedskew.data.own.tables import ColumnMismatch
from fedskew.data.partitions.rule import IntArray
from fedskew.data.partitions.saved import Saved
from fedskew.errors import UserError, expect, plural, unknown
from fedskew.experiment.config.values import device, read_yaml
from fedskew.flower.contract import Contract, ContractMismatch
from fedskew.flower.policy import Policy, read_policy


class DataUnreadable(UserError):
    """A site's data cannot be read. The message may quote the data, so it must not leave the site."""


@dataclass(frozen=True)
class SiteConfig:
    """The configuration of one site."""

    folder: Path
    """The folder that relative paths start from."""
    name: str
    data: str
    """A path, or the name of a dataset."""
    data_params: Mapping[str, Any] = field(default_factory=dict)
    """The options with which the data are loaded: the keys of `data` other than `name`."""
    data_dir: str | None = None
    """The folder with the files of a named dataset."""
    state: str = "state"
    device: str = "auto"
    threads: int | None = None
    """Number of threads that torch uses. None: torch decides."""
    idle: int | None = None
    """Seconds without work after which the worker process ends and frees its memory. The next request starts it again.
    If `idle` is None, the worker keeps running."""
    metrics: str = ""
    """The most detailed test results that this site reports: none, total or class.

    With `total`, the site reports how many predictions it made and how many are correct. With `class`, it reports
    results by class. The default is `total`. If the policy demands noise or lists what may be revealed, the default is
    `none`, because test results have no noise and can reveal label counts.
    """
    packages: tuple[str, ...] = ()
    """Python packages whose methods and models the server may request, besides those of fedskew and of the app."""
    keys: str | None = None
    """The folder with the site's node key, with which the site proves its identity in secure aggregation."""
    policy: Policy = field(default_factory=Policy)
    """What the site allows, whatever the server requests."""
    split: str | None = None
    """For trials: the file of a saved split of the data. This site is client number `client` of the split."""
    client: int = 0

    def __post_init__(self) -> None:
        if not self.metrics:
            is_strict = self.policy.demands_noise or self.policy.reveals is not None
            object.__setattr__(self, "metrics", "none" if is_strict else "total")

    @property
    def state_folder(self) -> Path:
        return self.folder / self.state

    def data_version(self) -> int:
        """Return a hash of the names, times and sizes of the data's files, in all subfolders.

        It changes if a file is added, removed or written. Links to folders are not followed. If the data are given by a
        dataset's name, such as `digits`, the hash never changes.
        """
        paths = [self._resolve(given) for given in (self.data, self.data_params.get("test")) if isinstance(given, str)]
        walks = [walk for path in paths for walk in os.walk(path)]
        inside = [os.path.join(parent, name) for parent, folders, files in walks for name in (*folders, *files)]
        found = []
        for entry in (*map(str, paths), *sorted(inside)):
            with contextlib.suppress(OSError):
                status = os.stat(entry)
                found.append((entry, status.st_mtime_ns, status.st_size))
        return hash(tuple(found))

    def _resolve(self, path: str) -> Path:
        return self.folder / os.path.expanduser(path)  # unlike `Path.expanduser`, it accepts an unknown user

    def federation(self, contract: Contract | None = None) -> Federation:
        """Read the site's data, as a federation of one client.

        Files are read with the contract's classes and table encoding, if there is a contract.
        """
        dataset = self._dataset(contract)
        return Federation(dataset, (self._rows(dataset),), {"name": "site"}, 0)

    def _rows(self, dataset: Dataset) -> IntArray:
        if self.split is None:
            return np.arange(len(dataset.train), dtype=np.int64)
        groups, names = dataset.groups
        try:
            parts = Saved(self.folder / self.split).split(groups, len(names), 0)
            last = len(parts) - 1
            expect(self.client <= last, "client", self.client, f"a client of the split, from 0 to {last}")
        except UserError as error:  # the text names the site's file
            raise DataUnreadable(str(error)) from error
        return parts[self.client]

    def _dataset(self, contract: Contract | None) -> Dataset:
        path = self._resolve(self.data)
        is_dataset_name = is_named(self.data) or self.data.startswith("hf:")
        name = self.data if is_dataset_name and not path.exists() else str(path)
        options = dict(self.data_params) if contract is None else contract.data_options(path, self.data_params)
        if isinstance(options.get("test"), str):
            options["test"] = self._resolve(options["test"])
        try:
            return load(name, None if self.data_dir is None else self._resolve(self.data_dir), **options)
        except ColumnMismatch as error:
            raise ContractMismatch(f"the data do not meet the federation's contract: {error}") from error
        except UserError as error:
            raise DataUnreadable(str(error)) from error


def data_warnings(dataset: Dataset, contract: Contract) -> tuple[str, ...]:
    """List warnings about a site's data. They may quote counts, means and single values of the data."""
    return (*dataset.notes, *contract.warnings(dataset))


def mention(warnings: Sequence[str]) -> list[str]:
    """Say in one line, which quotes nothing, that there are warnings. For logs, which are often collected elsewhere."""
    if not warnings:
        return []
    shown = f"{plural(len(warnings), 'warning')} about this site's data"
    return [f"`fedskew federate site SITE.yaml --check APP` shows {shown}"]


def load_site(path: str | Path) -> SiteConfig:
    """Read the configuration in a site's YAML file."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path} has no keys; expected keys such as name and data")
    known = {spec.name for spec in fields(SiteConfig)} - {"folder", "data_params"}
    for key in values:
        if key not in known:
            raise UserError(f"{path}: {unknown('key', str(key), known)}")
    values = {key: value for key, value in values.items() if value is not None}  # a key without a value has no effect
    for key in ("name", "data"):
        if not values.get(key):
            raise UserError(f"{path}: no {key!r}; expected a line such as {_EXAMPLES[key]}")
    data = values.pop("data")
    params = dict(data) if isinstance(data, dict) else {}
    source = params.pop("name", None) if isinstance(data, dict) else data
    packages = values.pop("packages", [])
    try:
        _check(values, source)
        _check_options(params)
        is_list = isinstance(packages, list) and all(isinstance(package, str) for package in packages)
        expect(is_list, "packages", packages, "a list of names such as [hospital_models]")
        values["policy"] = read_policy(values.get("policy"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return SiteConfig(
        folder=Path(path).resolve().parent, data=source, data_params=params, packages=tuple(packages), **values
    )


_EXAMPLES = {
    "name": "name: hospital-a",
    "data": "data: scans.npz",
    "data.name": "data: {name: patients.csv, label: diagnosis}",
}


def _check_options(options: Mapping[Any, Any]) -> None:
    """Refuse options of the data that could not be passed to `load`."""
    expect("data_dir" not in options, "data.data_dir", options.get("data_dir"), "data_dir as a key beside data")
    for key in options:
        expect(isinstance(key, str) and key != "data", "a key of data", key, "name, or an option such as label")


def _check(values: Mapping[str, Any], source: object) -> None:
    if source is None:
        raise UserError(f"data has no 'name'; expected a path or a dataset's name, such as {_EXAMPLES['data.name']}")
    has_source = isinstance(source, str) and bool(source)
    expect(has_source, "data", source, "a path, a dataset's name, or a mapping with a name")
    for key in ("name", "data_dir", "state", "device", "keys", "split"):
        expect(isinstance(values.get(key, ""), str), key, values.get(key), "text")
    state = values.get("state", "")
    expect(not state.startswith("~"), "state", state, "a path without ~, because ~ depends on the user")
    if "device" in values:
        device("device", values["device"])
    if "metrics" in values:
        expect(values["metrics"] in ("none", "total", "class"), "metrics", values["metrics"], "none, total or class")
    for key, least in (("client", 0), ("threads", 1), ("idle", 1)):
        value = values.get(key, least)
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        expect(is_whole, key, value, f"a whole number of at least {least}")
