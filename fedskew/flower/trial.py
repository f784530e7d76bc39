"""A trial federation on one machine. A dataset is split over sites, and each site has its own SuperNode."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedskew.data import Federation, load
from fedskew.errors import UserError
from fedskew.experiment.config import Config, differing_keys
from fedskew.experiment.preparation import build_federation, data_options
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.flower.app_folder import PACKAGE, write_app
from fedskew.flower.contract import Contract
from fedskew.flower.credentials import is_site_name, make_credentials
from fedskew.flower.local_federation import LocalFederation, write_site
from fedskew.flower.planning import make_settings, read_app, resolve_config
from fedskew.flower.policy import COLUMN_SUMS, LOCAL_TESTS, revealed_by
from fedskew.flower.processes import Process
from fedskew.flower.run_record import RunRecord
from fedskew.flower.secure.identity import read_roster
from fedskew.flower.settings import FederationSettings
from fedskew.flower.supervised_run import read_progress, run_to_end
from fedskew.methods import make_method

_IDLE_SECONDS = 600
"""Seconds without work after which a site's worker ends and frees its memory."""


def plan_trial(folder: Path, config: Config, settings: Mapping[str, Any], column_sums: bool = False) -> LocalFederation:
    """Write the keys, app and sites of a trial. If the folder already has the same trial, its run can resume.

    With `column_sums`, the server fits the encoding of the tables to sums that the sites send.
    """
    federation = build_federation(config)
    # If there are notes, a file of counts may have changed the classes. The sites' data would still have the old ones.
    if federation.notes:
        data = load(config.data, config.data_dir, **data_options(config))
        if federation.dataset.classes != data.classes:
            raise UserError(
                f"the counts name other classes than {config.data}; expected data with the same classes, for example "
                f"--data synthetic --set data.classes={','.join(federation.dataset.classes)}"
            )
    names = site_names(federation)
    is_secure = bool(settings.get("secure_aggregation"))
    keys = make_credentials(folder / "keys", names) if is_secure else None  # the app then has the sites' public keys
    values = {
        "minimum": federation.clients,
        **_test_settings(config, is_secure),
        **({} if keys is None else {"node_keys": read_roster(keys.folder / "sites", names)}),
        "folder": str((folder / "run").resolve()),
        **settings,
    }
    contract = Contract.from_dataset(federation.dataset)
    contract = contract.draft() if column_sums else contract
    planned = make_settings(names, values)
    app = folder / "app"
    with TemporaryDirectory() as drafts:  # if `folder` has another run, that run's app and split must stay
        draft, split = Path(drafts) / "app", Path(drafts) / "split.json"
        write_app(draft, planned, contract, resolve_config(config, contract, names))
        federation.save_split(split)
        _require_same_run(folder, draft, split)
        if (app / PACKAGE).is_dir():
            shutil.rmtree(app)
        write_app(app, planned, contract, resolve_config(config, contract, names))
        shutil.copyfile(split, folder / "split.json")
    keys = keys or make_credentials(folder / "keys", names)
    trial = LocalFederation(folder, app, keys, names, forks_workers=True)
    for client, name in enumerate(names):
        site = _site(client, name, config, planned, column_sums)
        own_keys = {"keys": str(keys.node(name).folder.resolve())} if is_secure else {}
        write_site(trial.site_file(name), site | own_keys)
    return trial


def _require_same_run(folder: Path, app: Path, split: Path) -> None:
    """Refuse a folder whose run has other settings than `app`, or other data than `split`."""
    settings, contract, config = read_app(app)
    run = RunFolder(settings.folder)
    if not run.config_path.exists():
        return
    RunRecord(run.path, settings, contract).check()
    differences = differing_keys(run.config, resolve_config(config, contract, settings.sites))
    before = folder / "split.json"
    if before.exists() and before.read_bytes() != split.read_bytes():
        differences.append("the split of the data")
    if differences:
        raise UserError(
            f"{folder} holds a run that differs in {', '.join(differences)}; expected the command that started it, "
            "or another folder"
        )


def site_names(federation: Federation) -> list[str]:
    """Return the clients' names. If there are none, or one cannot be a site's name, number the sites, as in site-1."""
    if federation.client_names and all(map(is_site_name, federation.client_names)):
        return list(federation.client_names)
    number = federation.clients
    digits = len(str(number))
    return [f"site-{site:0{digits}d}" for site in range(1, number + 1)]


def _test_settings(config: Config, is_secure: bool) -> dict[str, Any]:
    """Return the settings of the tests: the server tests the model.

    If the method has no global model, each site tests its own model.
    """
    personal = make_method(config.method, config.method_params).personal
    if personal is not None and not personal.has_global_model:
        return {"evaluation": "sites", "site_metrics": "total" if is_secure else "class"}
    test_data = {"data_dir": _data_dir(config), **_data(config)}
    return {"evaluation": "server", "site_metrics": "none", "test_data": test_data}


def _data(config: Config) -> dict[str, Any]:
    name = str(Path(config.data).resolve()) if Path(config.data).exists() else config.data
    options = data_options(config)
    if isinstance(options.get("test"), str):
        options["test"] = str(Path(os.path.expanduser(options["test"])).resolve())
    return {"name": name, **options}


def _data_dir(config: Config) -> str | None:
    return None if config.data_dir is None else str(Path(os.path.expanduser(config.data_dir)).resolve())


def _site(client: int, name: str, config: Config, settings: FederationSettings, column_sums: bool) -> dict[str, object]:
    """Return the content of a site's site.yaml."""
    # These two items leave a site only if its policy lists them. The list must then have all that the run reveals.
    agreed = [item for item, used in ((COLUMN_SUMS, column_sums), (LOCAL_TESTS, settings.local_tests)) if used]
    own_code = [code.partition(":")[0] for code in (*config.method.split("+"), config.model) if ":" in code]
    return {
        "name": name,
        "data": _data(config),
        "data_dir": _data_dir(config),
        "split": "../../split.json",
        "client": client,
        "metrics": settings.site_metrics,
        "packages": sorted({module.strip().partition(".")[0] for module in own_code}),
        "device": config.device,
        "threads": 1,
        "idle": _IDLE_SECONDS,
        "policy": {"reveals": [*agreed, *revealed_by(config)]} if agreed else None,
    }


def run_folder(trial: LocalFederation) -> RunFolder:
    """The folder of the trial's run."""
    return RunFolder(read_app(trial.app)[0].folder)


def run_trial(trial: LocalFederation, log: Callable[[str], None]) -> None:
    """Run a trial to its end. Its processes must be running. A process that ends too early is started again."""
    runs, folder = trial.app_runs(trial.app), run_folder(trial).path

    def keep_running() -> None:
        trial.restart_ended(log)

    def start() -> Process:
        keep_running()
        return runs.start()

    run_to_end(start, lambda: read_progress(folder), log, keep_running)
