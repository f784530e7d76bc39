"""A federation in one process: real messages, real sites, but a grid that calls them instead of sending."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedskew.data import load
from fedskew.data.federation import Federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.contract import Contract
from fedskew.flower.local_federation import write_site
from fedskew.flower.planning import make_settings, resolve_config
from fedskew.flower.settings import FederationSettings
from fedskew.flower.site import Site
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.wire import Facts, Garbled, from_records, to_records
from fedskew.flower.worker import _RequestHandler

Meddle = Callable[[str, Facts, Facts, bytes], tuple[Facts, bytes]]
"""From a site's name, what it was asked, and its answer, to what is sent instead."""


@dataclass
class Sent:
    """One message that left a site."""

    site: str
    kind: str
    facts: Facts
    payload: bytes


class DirectGrid(Grid):
    """Delivers to `Site` objects at once."""

    def __init__(self, sites: dict[str, Site], meddle: Meddle | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's own processes do
        self._sites = dict(enumerate(sites.items(), start=1000))
        self.meddle = meddle
        self._numbers = itertools.count()
        self._replies: dict[str, Message] = {}
        self.sent: list[Sent] = []
        self.offline: set[str] = set()
        self.silent: set[str] = set()
        """Sites that never answer."""

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, (name, _) in self._sites.items() if name not in self.offline]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=number, name=self._sites[number][0]) for number in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(number) for number in list(message_ids) if number in self._replies]

    def _deliver(self, message: Message) -> str:
        number = f"message-{next(self._numbers)}"
        message.metadata.__dict__["_message_id"] = number
        name, site = self._sites[message.metadata.dst_node_id]
        if name not in self.silent:
            self._replies[number] = Message(self._answered(name, site, message), reply_to=message)
        return number

    def _answered(self, name: str, site: Site, message: Message) -> RecordDict:
        asked, payload = from_records(message.content)
        try:
            facts, answer = site.answer(asked, payload)
        except (UserError, Garbled) as error:
            facts, answer = {"refused": str(error)}, b""
        if self.meddle is not None:
            facts, answer = self.meddle(name, asked, facts, answer)
        self.sent.append(Sent(name, asked["kind"], facts, answer))
        if facts.get("garbage"):
            return RecordDict({"nonsense": ConfigRecord({"a": 1})})
        return to_records(facts, answer)


@dataclass
class Case:
    """A federation ready to run in one process."""

    grid: DirectGrid
    context: Context
    config: Config
    settings: FederationSettings
    folder: Path
    names: list[str] = field(default_factory=list)


def small_data(folder: Path) -> Path:
    """A few of scikit-learn's digits, as a user's own file."""
    digits = load("digits")
    rows = slice(0, 180)
    arrays = {"x_train": digits.train.x[rows], "y_train": digits.train.y[rows], "x_test": digits.test.x[:60]}
    np.savez(folder / "digits.npz", **arrays, y_test=digits.test.y[:60], classes=np.array(digits.classes))
    return folder / "digits.npz"


def case(
    folder: Path,
    federation: Federation,
    data: Path,
    config: Config,
    meddle: Meddle | None = None,
    site: dict[str, Any] | None = None,
    **own: Any,
) -> Case:
    """Sites that hold the clients of a simulated federation; `site` changes the sites' own configuration."""
    names = [f"site-{client}" for client in range(federation.clients)]
    contract = Contract.from_dataset(federation.dataset)
    values = {"evaluation": "server", "site_metrics": "none", "test_data": str(data)}
    settings = make_settings(names, {"folder": str(folder / "run"), "minimum": len(names), **values, **own})
    agreed = {"metrics": settings.site_metrics, **(site or {})}
    grid = DirectGrid(
        {name: _site(folder, federation, data, client, name, agreed) for client, name in enumerate(names)}, meddle
    )
    whole = resolve_config(config, contract, names)
    run_config = run_config_of(settings, contract, whole)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    return Case(grid, context, whole, settings, folder, names)


def answer_as_workers(here: Case, data: Path, more: dict[str, str] | None = None) -> None:
    """Let the sites answer as their workers do, with audit logs, each from a site.yaml with `more` lines at its end."""
    for client, name in enumerate(here.names):
        file = here.folder / name / "site.yaml"
        split = str(here.folder / "split.json")
        write_site(file, {"name": name, "data": str(data), "split": split, "client": client, "device": "cpu"})
        file.write_text(file.read_text() + (more or {}).get(name, ""))
        here.grid._sites[1000 + client] = (name, _RequestHandler(file))  # type: ignore[assignment]


def _site(folder: Path, federation: Federation, data: Path, client: int, name: str, changed: dict[str, Any]) -> Site:
    split = folder / "split.json"
    if not split.exists():
        federation.save_split(split)
    return Site(SiteConfig(folder / name, name, str(data), split=str(split), client=client, device="cpu", **changed))


def run_config_of(settings: FederationSettings, contract: Contract, config: Config) -> dict[str, Any]:
    """As Flower hands an app's pyproject to it."""
    import tomllib

    from fedskew.flower.app_folder import _files
    from fedskew.flower.planning import _flatten

    text = _files("test", settings, contract, config, from_data=False)["pyproject.toml"]
    return _flatten(tomllib.loads(text)["tool"]["flwr"]["app"]["config"])
