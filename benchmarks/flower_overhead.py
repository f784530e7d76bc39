"""What a round across machines costs beside the training: fedskew on Flower, and a plain Flower app beside it.

    python benchmarks/flower_overhead.py [--megabytes 0.5,9,45] [--rounds 4] [--sites 3]

Both run on this machine one after the other, over TLS with node keys, with the same model and the same few samples, so
that training takes milliseconds and what is measured is everything else. The plain app is written as Flower's own
quickstart is: torch imported by its ClientApp, FedAvg of flwr.serverapp.strategy, a train and an evaluate message a
round. Ours trains and evaluates on the sites, too. The first round, in which programs start, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedskew.experiment.config import Config, with_values
from fedskew.flower.app_folder import PACKAGE, write_app
from fedskew.flower.contract import Contract
from fedskew.flower.credentials import make_credentials
from fedskew.flower.local_federation import LocalFederation, write_site
from fedskew.flower.planning import make_settings, resolve_config
from fedskew.flower.site_config import load_site

INPUTS, CLASSES = 64, 10
PATIENCE = 900.0

MODEL = '''"""A model of a given size whose training costs next to nothing."""

from torch import nn

WIDTH = {width}


class Big(nn.Module):
    def __init__(self, inputs={inputs}, classes={classes}):
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.head(self.first(x.flatten(1)).relu())


def make(*_, **__):
    return Big()
'''

PLAIN_CLIENT = """import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from plain_app.model import Big

app = ClientApp()


def samples(context):
    with np.load(context.run_config["data"]) as file:
        x, y = torch.tensor(file["x_train"]).float(), torch.tensor(file["y_train"]).long()
    return x, y


@app.train()
def train(message: Message, context: Context) -> Message:
    model = Big()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = samples(context)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimiser.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = Big()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = samples(context)
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": right, "num-examples": len(y)})}), reply_to=message)
"""

PLAIN_SERVER = '''import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from plain_app.model import Big

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that notes when a round is over."""

    def aggregate_evaluate(self, server_round, replies):
        metrics = super().aggregate_evaluate(server_round, replies)
        with Path(self.log).open("a") as file:
            file.write(json.dumps({"round": server_round, "at": time.time()}) + "\\n")
        return metrics


@app.main()
def main(grid: Grid, context: Context) -> None:
    sites = context.run_config["sites"]
    strategy = Timed(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=sites)
    strategy.log = context.run_config["log"]
    strategy.start(grid=grid, initial_arrays=ArrayRecord(Big().state_dict()), num_rounds=context.run_config["rounds"])
'''

PLAIN_PROJECT = """[project]
name = "plain"
version = "1.0.0"
description = "Flower as everyone writes it."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "plain_app.server_app:app"
clientapp = "plain_app.client_app:app"

[tool.flwr.app.config]
rounds = {rounds}
sites = {sites}
log = {log}
data = {data}
"""


@dataclass(frozen=True)
class Cost:
    """Of one round."""

    seconds: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--megabytes", default="0.5,9,45")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sites", type=int, default=3)
    given = parser.parse_args()
    print("| model | plain Flower: s, CPU s a round | fedskew: s, CPU s a round | ratio: s, CPU s |\n|---|---|---|---|")
    for size in map(float, given.megabytes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            case = Case(Path(folder), size, given.sites, given.rounds)
            plain, ours = case.plain(), case.ours()
        print(
            f"| {size:g} MB | {plain.seconds:.1f}, {plain.cpu:.1f} | {ours.seconds:.1f}, {ours.cpu:.1f} "
            f"| {ours.seconds / plain.seconds:.2f}, {ours.cpu / plain.cpu:.2f} |",
            flush=True,
        )


class Case:
    """One model size on one federation."""

    def __init__(self, folder: Path, megabytes: float, sites: int, rounds: int) -> None:
        self._folder, self._rounds = folder, rounds
        self._names = [f"site-{number}" for number in range(1, sites + 1)]
        width = round(megabytes * 1e6 / 4 / (INPUTS + CLASSES + 1))
        self._model = MODEL.format(width=width, inputs=INPUTS, classes=CLASSES)
        random = np.random.default_rng(0)
        x, y = random.integers(0, 255, (20, 1, 8, 8), np.uint8), np.arange(20) % CLASSES
        np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    def ours(self) -> Cost:
        names, log = self._names, self._folder / "run" / "rounds.jsonl"
        own = {"minimum": len(names), "folder": str(self._folder / "run")}
        settings = make_settings(names, own)
        site = self._folder / "probe.yaml"
        write_site(site, {"name": names[0], "data": "data.npz"})
        contract = Contract.from_dataset(load_site(site).federation().dataset)
        config = with_values(
            Config(), {"method": "fedavg", "rounds": self._rounds, "local_epochs": 1, "device": "cpu", "model": "dnn"}
        )
        whole = with_values(resolve_config(config, contract, names), {"model": f"{PACKAGE}.big:make"})
        app = write_app(self._folder / "app", settings, contract, whole)
        (app / PACKAGE / "big.py").write_text(self._model)

        def ends() -> list[int]:
            lines = log.read_text().split("\n")[:-1] if log.exists() else []
            return [json.loads(line)["round"] for line in lines]

        return self._measured(app, ends, first=1)

    def plain(self) -> Cost:
        app, log = self._folder / "plain", self._folder / "plain.jsonl"
        (app / "plain_app").mkdir(parents=True)
        files = {"model": self._model, "client_app": PLAIN_CLIENT, "server_app": PLAIN_SERVER, "__init__": ""}
        for name, text in files.items():
            (app / "plain_app" / f"{name}.py").write_text(text)
        paths = {"log": json.dumps(str(log)), "data": json.dumps(str(self._folder / "data.npz"))}
        project = PLAIN_PROJECT.format(rounds=self._rounds, sites=len(self._names), **paths)
        (app / "pyproject.toml").write_text(project)

        def ends() -> list[int]:
            lines = log.read_text().split("\n")[:-1] if log.exists() else []
            return [json.loads(line)["round"] for line in lines]

        return self._measured(app, ends, first=1)

    def _measured(self, app: Path, ends: Callable[[], list[int]], first: int) -> Cost:
        keys = make_credentials(self._folder / "keys", self._names)
        marks: dict[int, tuple[float, float]] = {}
        with LocalFederation(self._folder, app, keys, self._names) as local:
            for name in self._names:
                write_site(
                    local.site_file(name),
                    {"name": name, "data": str(self._folder / "data.npz"), "device": "cpu", "threads": 1},
                )
            local.start()
            run, end = local.start_run(), time.monotonic() + PATIENCE
            while run.running and time.monotonic() < end and self._rounds not in marks:
                for number in ends():
                    marks.setdefault(number, (time.monotonic(), cpu_seconds(local)))
                time.sleep(0.05)
            if self._rounds not in marks:
                raise SystemExit(f"{app.name} did not finish:\n{run.output()[-3000:]}")
        shutil.rmtree(self._folder / "flower")
        (began, spent), (ended, total) = marks[first], marks[self._rounds]
        rounds = self._rounds - first
        return Cost((ended - began) / rounds, (total - spent) / rounds)


def cpu_seconds(local: LocalFederation) -> float:
    """Of all processes of the federation, and of those that they waited for."""
    sessions = {process.pid for process in (local.superlink, *local.nodes.values()) if process is not None}
    ticks = 0
    for stat, command in _processes():
        fields = stat.rpartition(")")[2].split()
        if int(fields[3]) in sessions or str(local.folder / "sites") in command:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes() -> Iterator[tuple[str, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield (entry / "stat").read_text(), (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue


if __name__ == "__main__":
    main()
