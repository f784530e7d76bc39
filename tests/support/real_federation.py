"""A federation of real processes on loopback, and apps whose sites misbehave on purpose."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from in_process import small_data

from fedskew.data import Dirichlet, Federation, federation
from fedskew.experiment.config import Config, with_values
from fedskew.flower.app_folder import PACKAGE, write_app
from fedskew.flower.contract import Contract
from fedskew.flower.credentials import make_credentials
from fedskew.flower.local_federation import LocalFederation, write_site
from fedskew.flower.planning import make_settings, resolve_config

NAMES = ("site-1", "site-2", "site-3")
PATIENCE = 300.0


class Real:
    """Sites with the clients of a small split."""

    def __init__(self, folder: Path, sites: tuple[str, ...] = NAMES, days: int = 365) -> None:
        self.folder, self.sites = folder, sites
        self.data = small_data(folder)
        self.split: Federation = federation(str(self.data), Dirichlet(beta=0.5, clients=len(sites)), seed=0)
        self.split.save_split(folder / "split.json")
        self.local = LocalFederation(folder, folder, make_credentials(folder / "keys", sites, days=days), sites)
        for client, name in enumerate(sites):
            write_site(self.local.site_file(name), self._site(client, name))

    def _site(self, client: int, name: str) -> dict[str, object]:
        split = str(self.folder / "split.json")
        return {"name": name, "data": str(self.data), "split": split, "client": client, "device": "cpu", "threads": 1}

    def config(self, method: str, **changed: Any) -> Config:
        values = {
            "method": method,
            "rounds": 2,
            "local_epochs": 1,
            "batch_size": 20,
            "engine": "plain",
            "device": "cpu",
        }
        return with_values(Config(), {"partition.clients": len(self.sites), **values, **changed})

    def app(self, name: str, config: Config, client_app: str | None = None, **own: Any) -> Path:
        """An app with its run in `folder/runs/NAME`."""
        values = {"evaluation": "server", "site_metrics": "none", "test_data": str(self.data)}
        contract = Contract.from_dataset(self.split.dataset)
        settings = make_settings(
            self.sites, {"minimum": len(self.sites), "folder": str(self.run_folder(name)), **values, **own}
        )
        app = write_app(self.folder / "apps" / name, settings, contract, resolve_config(config, contract, self.sites))
        if client_app is not None:
            (app / PACKAGE / "client_app.py").write_text(client_app)
        return app

    def run_folder(self, name: str) -> Path:
        return self.folder / "runs" / name


def until(condition: Callable[[], object], what: str, local: LocalFederation) -> None:
    """Wait for something that processes do in their own time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            logs = "\n".join(f"== {p.name}\n{_tail(p)}" for p in sorted((local.folder / "logs").iterdir()))
            pytest.fail(f"waited {PATIENCE:g} s for {what}\n{logs}")
        time.sleep(0.1)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def processes(*words: str) -> list[int]:
    """The processes whose command line has all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if all(any(word in part for part in command) for word in words) and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def worker_of(site_file: Path) -> list[int]:
    return processes("fedskew.flower.worker", str(site_file))


MISBEHAVING = '''
"""A ClientApp that does as the plan beside its site's file says: {round: fault}."""

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedskew.flower import client_app as ours
from fedskew.flower.frames import send_frame
from fedskew.flower.wire import from_records, to_records

app = ClientApp()


def answer(message, context):
    site = Path(context.node_config["site"])
    facts, payload = from_records(message.content)
    plan = site.parent / "plan.json"
    faults = json.loads(plan.read_text()) if plan.exists() else {}
    fault = faults.get(str(facts["key"]["round"] + 1)) if facts["kind"] == "train" else None
    if fault == "hang":
        with ours._connect_to_worker(site) as worker:
            send_frame(worker, facts | {"paths": []}, payload)
            (site.parent / "hanging").write_text(str(os.getpid()))
            time.sleep(3600)
    if fault == "garbage":
        return Message(RecordDict({"nonsense": ConfigRecord({"a": b"\\\\x00"})}), reply_to=message)
    told, sent = from_records(ours.answer(message, context).content)
    if fault == "stale":
        told["round"] -= 1
    if fault in ("nan", "shape"):
        from safetensors.numpy import load, save

        tensors = load(sent)
        name = "trained:params/head.bias"
        tensors[name] = np.full_like(tensors[name], np.nan) if fault == "nan" else tensors[name][:3]
        sent = save(tensors)
    return Message(to_records(told, sent), reply_to=message)


app.query()(answer)
app.train()(answer)
app.evaluate()(answer)
'''


def plan(site_file: Path, faults: Mapping[int, str]) -> None:
    import json

    (site_file.parent / "plan.json").write_text(json.dumps({str(k): v for k, v in faults.items()}))
