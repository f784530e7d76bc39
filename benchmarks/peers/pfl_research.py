"""pfl-research (Apple's simulator): its FederatedAveraging with the simulated backend, in one process."""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch_parts import CNN, count_parameters, set_precision, tensors
from work import LEARNING_RATE, MOMENTUM, RoundTimes, Task, read_task


class PflCNN(CNN):
    """The CNN with the two functions that pfl-research requires."""

    def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:  # noqa: ARG002
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, *_: Any) -> dict[str, Weighted]:
        """Return a constant, because pfl-research would test every client of the first round otherwise."""
        return {"untested": Weighted(0, 1)}


class Clock(TrainingProcessCallback):
    def __init__(self, times: RoundTimes, device: str) -> None:
        self._times, self._device = times, device

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._times.end_round()
        return False, Metrics()


def make_dataset(task: Task) -> FederatedDataset:
    """Make a federated dataset. All images lie on the device, and pfl-research draws clients at random."""
    x, y = tensors(task.work, task.device)
    clients = list(range(task.work.clients))

    def make_client(client: int) -> Dataset:
        return Dataset((x[client], y[client]), user_id=str(client))

    return FederatedDataset(make_client, get_user_sampler("random", clients))


def main() -> None:
    task = read_task("pfl-research")
    times = RoundTimes()
    os.environ["PFL_PYTORCH_DEVICE"] = task.device
    set_precision(task.precision)
    torch.manual_seed(0)
    network = PflCNN()
    model = PyTorchModel(
        network,
        local_optimizer_create=partial(torch.optim.SGD, momentum=MOMENTUM),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if task.precision == "bf16" else None,
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds,
            train_cohort_size=task.work.participants,
            val_cohort_size=0,
        ),
        SimulatedBackend(make_dataset(task), val_data=None),
        model,
        NNTrainHyperParams(
            local_num_epochs=task.work.epochs,
            local_learning_rate=LEARNING_RATE,
            local_batch_size=task.work.batch_size,
        ),
        callbacks=[Clock(times, task.device)],
    )
    times.print_json("pfl-research", version("pfl"), count_parameters(network))


if __name__ == "__main__":
    main()
