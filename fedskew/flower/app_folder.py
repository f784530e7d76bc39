"""The Flower app of a federation: a folder that `flwr run` accepts, with instructions for its operators."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedskew import __version__
from fedskew.errors import UserError, plural
from fedskew.experiment.config import KEYS, Config
from fedskew.experiment.storage.files import reporting_os_errors
from fedskew.flower.contract import Contract
from fedskew.flower.disclosure import disclosures
from fedskew.flower.operators_guide import GUIDE, SITE
from fedskew.flower.secure.requirements import require_sums_suffice
from fedskew.flower.settings import (
    FederationSettings,
    require_example_settings,
    require_noiseless_sums,
    require_testable,
)
from fedskew.methods import make_method

PACKAGE = "federation_app"
"""The app's Python package."""
_OMITTED_KEYS = (
    "data", "data_dir", "partition", "engine", "device", "compile", "method", "eval_local", "save_predictions",
    "client_test", "server_data",
)  # fmt: skip
"""Keys that are left out of the table of training settings. `method` has its own table. A federation sets the others
itself, or cannot use them."""


def write_app(
    folder: str | Path,
    settings: FederationSettings,
    contract: Contract,
    config: Config,
    from_data: bool = False,
) -> Path:
    """Write the app's folder, which must be new or empty.

    `from_data` says that the contract describes the coordinator's own data. The app's README tells the sites.
    """
    require_example_settings(settings, config)
    require_noiseless_sums(settings, contract)
    require_sums_suffice(settings, contract, config)
    require_testable(settings, make_method(config.method, config.method_params))
    path = Path(folder)
    with reporting_os_errors("write", path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists and is not an empty folder; choose another")
        (path / PACKAGE).mkdir(parents=True, exist_ok=True)
        for name, content in _files(path.resolve().name, settings, contract, config, from_data).items():
            (path / name).write_text(content, encoding="utf-8")
    return path


def _files(
    name: str, settings: FederationSettings, contract: Contract, config: Config, from_data: bool
) -> dict[str, str]:
    project = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "federation"
    return {
        "pyproject.toml": _pyproject(project, settings, contract, config),
        "README.md": _guide(project, settings, contract, config, from_data),
        "site.example.yaml": SITE.format(
            first=json.dumps(settings.sites[0], ensure_ascii=False), shape=list(contract.shape), kind=contract.kind
        ),
        f"{PACKAGE}/__init__.py": '"""Put your methods and models here. Name them federation_app.module:Class."""\n',
        f"{PACKAGE}/server_app.py": _APP.format(side="server"),
        f"{PACKAGE}/client_app.py": _APP.format(side="client"),
    }


def _guide(project: str, settings: FederationSettings, contract: Contract, config: Config, from_data: bool) -> str:
    is_fitted = from_data and contract.table_encoding is not None
    lines = [*disclosures(settings, contract, config), *([_FROM_DATA] if is_fitted else [])]
    listed = "\n".join(f"- {line}" for line in lines)
    first = shlex.quote(settings.sites[0])  # the guide has it only in commands
    return GUIDE.format(name=project, sites=", ".join(settings.sites), first=first, disclosures=listed)


_FROM_DATA = (
    "for the encoding of the table: nothing; the contract has the categories, means and standard deviations of the "
    "coordinator's own table, and every site receives them"
)

# The content of server_app.py and client_app.py.
_APP = '''"""What Flower starts on the {side}."""

from fedskew.flower.{side}_app import app

__all__ = ["app"]
'''

# The beginning of pyproject.toml.
_PROJECT = """[project]
name = "{name}"
version = "1.0.0"
description = "A federation of {sites}, trained with {method}."
license = "Apache-2.0"
dependencies = ["fedskew[flower]"]

[tool.fedskew]
version = "{version}"  # of the fedskew that wrote this app; server and sites need the same minor version

[tool.flwr.app]
publisher = "fedskew"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

"""


def _pyproject(name: str, settings: FederationSettings, contract: Contract, config: Config) -> str:
    head = _PROJECT.format(
        name=name, sites=plural(len(settings.sites), "site"), method=config.method, package=PACKAGE, version=__version__
    )
    training = {key: (value, KEYS[key].metadata["help"]) for key, value in _training_values(config).items()}
    federation = {spec.name: (getattr(settings, spec.name), spec.metadata["help"]) for spec in fields(settings)}
    federation["sites"] = (", ".join(settings.sites), federation["sites"][1])
    return "\n".join(
        [
            head + _table("tool.flwr.app.config", training),
            _table("tool.flwr.app.config.method", _without_help({"name": config.method, **config.method_params})),
            _table("tool.flwr.app.config.federation", federation),
            "# Every site's data must meet this contract. With one label per sample, a site may lack some classes.",
            _table("tool.flwr.app.config.contract", _without_help(contract.to_json())),
        ]
    )


def _training_values(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.to_mapping().items() if key not in _OMITTED_KEYS}


def _without_help(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    return {key: (value, "") for key, value in values.items()}


def _table(name: str, values: Mapping[str, tuple[Any, str]]) -> str:
    lines = [f"{_key(key)} = {_toml(value)}" + (f"  # {help}" if help else "") for key, (value, help) in values.items()]
    return f"[{name}]\n" + "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _toml(value: Any) -> str:
    """Write a value in TOML. Flower accepts only text, numbers and booleans, so all other values become text."""
    if value is None:
        return '""'
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    text = value if isinstance(value, str) else json.dumps(list(value) if isinstance(value, tuple) else value)
    return json.dumps(text, ensure_ascii=False)
