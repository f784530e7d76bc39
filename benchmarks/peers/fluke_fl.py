"""fluke (on PyPI: fluke-fl): its FedAVG with clients and a server in one process.

fluke has no switch for bf16. TF32 is PyTorch's own switch.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from torch_parts import CNN, count_parameters, set_precision, tensors
from work import CLASSES, LEARNING_RATE, MOMENTUM, RoundTimes, Task, read_task


class Clock(FederationObserver):
    def __init__(self, times: RoundTimes, device: str) -> None:
        self._times, self._device = times, device

    def end_round(self, round: int) -> None:  # noqa: ARG002
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._times.end_round()


def make_clients(task: Task) -> list[Client]:
    x, y = tensors(task.work, task.device)
    optimiser = OptimizerConfigurator({"name": "SGD", "lr": LEARNING_RATE, "momentum": MOMENTUM})
    return [
        Client(
            index=client,
            train_set=FastDataLoader(
                x[client], y[client], num_labels=CLASSES, batch_size=task.work.batch_size, shuffle=True
            ),
            test_set=None,
            optimizer_cfg=optimiser,
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=task.work.epochs,
            persistency=False,  # momentum starts from zero in each round, as in FedAvg
        )
        for client in range(task.work.clients)
    ]


def main() -> None:
    task = read_task("fluke", precisions=("float32", "tf32"))
    times = RoundTimes()
    set_precision(task.precision)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device(task.device)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    clients, model = make_clients(task), CNN()
    algorithm = FedAVG(task.work.clients, None, DDict(), clients=clients, server=Server(model, None, clients))
    algorithm.set_callbacks([Clock(times, task.device)])
    algorithm.run(task.rounds, eligible_perc=task.work.participants / task.work.clients)
    times.print_json("fluke", version("fluke-fl"), count_parameters(model))


if __name__ == "__main__":
    main()
