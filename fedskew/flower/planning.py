"""Make and check the settings of a federation from an operator's choices, and read the settings of an app."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedskew import __version__
from fedskew.data.federation import Federation
from fedskew.data.spelling import composed
from fedskew.data.table_encoding import read_encoding
from fedskew.errors import UserError, unknown
from fedskew.experiment.config import Config
from fedskew.experiment.preparation import Prepared, prepare
from fedskew.flower.app_folder import PACKAGE
from fedskew.flower.contract import Contract
from fedskew.flower.federation_server import refuse_unfit
from fedskew.flower.settings import FederationSettings, read_settings
from fedskew.flower.versions import version_problem
from fedskew.methods import make_method
from fedskew.user_code import importing_from_current_folder


def resolve_config(config: Config, contract: Contract, sites: Sequence[str]) -> Config:
    """Resolve every choice that the configuration leaves open, for data that meet the contract.

    Refuse a method or configuration that cannot run across machines.
    """
    return prepare_for_sites(config, contract, sites).config


def prepare_for_sites(config: Config, contract: Contract, sites: Sequence[str]) -> Prepared:
    """Do what `resolve_config` does, and also return the model."""
    # First, because `prepare` may ask for a setting that a federation refuses, such as `server_data`.
    refuse_unfit(make_method(config.method, config.method_params), config)
    blank = contract.blank()
    rows = np.arange(len(blank.train), dtype=np.int64)
    federation = Federation(blank, tuple(rows for _ in sites), {"name": "sites", "names": list(sites)}, config.seed)
    prepared = prepare(config, federation)
    if config.init is None:
        return prepared
    if contract.column_sums and config.train != "all":
        raise UserError(
            f"train is {config.train!r}, but sites cannot use the weights of init before the encoding is fitted "
            "to column sums; expected train: all, or no column sums"
        )
    # The path is made absolute, because the ServerApp may run in another folder.
    return replace(prepared, config=replace(prepared.config, init=str(Path(config.init).expanduser().resolve())))


def resolve_config_at_site(config: Config, contract: Contract, sites: Sequence[str]) -> Config:
    """Resolve the configuration of an app at a site.

    Only the server has the file of `init`, so the hash is taken from the app.
    """
    resolved = resolve_config(replace(config, init=None), contract, sites)
    return replace(resolved, init_sha256=config.init_sha256)


def make_settings(sites: Sequence[str], values: Mapping[str, Any]) -> FederationSettings:
    """Make a federation's settings. `values` has the settings other than `sites`, by name."""
    known = {spec.name for spec in fields(FederationSettings)} - {"sites"}
    for key in values:
        if key not in known:
            raise unknown("federation setting", key, known)
    return FederationSettings(sites=tuple(sites), **values)


def contract_from_text(classes: str, shape: str) -> Contract:
    """Make a contract without data, from texts such as `cat,dog` and `3,32,32`."""
    try:
        sizes = tuple(int(size) for size in shape.replace("x", ",").split(","))
    except ValueError as error:
        raise UserError(f"shape is {shape!r}; expected sizes such as 3,32,32, or a number of columns") from error
    names = _class_names(classes)
    if len(sizes) not in (1, 3):
        raise UserError(f"shape is {shape!r}; expected channels, height and width of images, or a number of columns")
    mean = std = (0.5,) * sizes[0] if len(sizes) == 3 else ()  # maps images from [0, 1] to [-1, 1]
    return Contract("image" if len(sizes) == 3 else "table", names, sizes, mean, std)


def contract_from_file(classes: str, encoding: str) -> Contract:
    """Make a contract without data, from class names and a file that says how a table's columns become inputs."""
    return Contract.from_encoding(_class_names(classes), read_encoding(encoding))


def _class_names(classes: str) -> tuple[str, ...]:
    names = tuple(composed(name.strip()) for name in classes.split(","))
    if not all(names):
        raise UserError(f"classes is {classes!r}; expected names such as benign,malignant, none of them empty")
    return names


def read_app(path: str | Path) -> tuple[FederationSettings, Contract, Config]:
    """Read an app's settings, contract and configuration. `path` is its folder or its pyproject.toml."""
    file = _project_file(path)
    try:
        values = _flatten(_read_project(file)["tool"]["flwr"]["app"]["config"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not the pyproject.toml of a federation's app ({error})") from error
    return read_settings(values)


def check_app_version(path: str | Path) -> str | None:
    """Refuse an app of another minor version of fedskew. Return a warning if its version is unknown or differs."""
    file = _project_file(path)
    recorded = _read_project(file).get("tool", {}).get("fedskew", {}).get("version")
    if recorded is None:
        return f"{file} does not say which version of fedskew wrote it; this is {__version__}"
    if version_problem(str(recorded)) is not None:
        raise UserError(
            f"{file} was written by fedskew {recorded}, but this is {__version__}; expected the same minor version, "
            "here and on every other machine of the federation"
        )
    return None if recorded == __version__ else f"{file} was written by fedskew {recorded}; this is {__version__}"


def require_app_code(path: str | Path, config: Config) -> None:
    """Refuse a method or a model from the app's package, unless the user has put this app into Python's path.

    The calling command imports the method and the model. A user should decide whether an app's code is executed.
    """
    package = _project_file(path).parent / PACKAGE
    for name in (*config.method.split("+"), config.model):
        if name.strip().partition(":")[0].partition(".")[0] != PACKAGE:
            continue
        if not _is_found(package):
            raise UserError(
                f"{name.strip()!r} is code of the app, which this command would execute; expected PYTHONPATH="
                f"{package.parent}, after you have read the code in {package}"
            )
        with importing_from_current_folder():
            if not _is_found(package):
                raise UserError(
                    f"the current folder has another {PACKAGE}, which Python imports first; expected another current "
                    "folder"
                )


def _is_found(package: Path) -> bool:
    """Whether Python would import this package under its name."""
    found = find_spec(package.name)
    return found is not None and found.origin is not None and Path(found.origin).resolve().parent == package.resolve()


def _project_file(path: str | Path) -> Path:
    file = Path(path)
    return file / "pyproject.toml" if file.is_dir() else file


def _read_project(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; expected the pyproject.toml of an app") from error
    except ValueError as error:
        raise UserError(f"{file} is not the pyproject.toml of a federation's app ({error})") from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys, as Flower passes them to its apps."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return values
