"""Flower's simulation: its FedAvg strategy, and clients that Ray's workers train, one core each."""

from __future__ import annotations

from importlib.metadata import version

import torch
from flower_client import make_client_app
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch_parts import CNN, count_parameters
from work import RoundTimes, Task, read_task

CLIENTS_PER_GPU = 10
"""How many of Ray's workers share the GPU."""


def make_server_app(task: Task, times: RoundTimes) -> ServerApp:
    app = ServerApp()

    def end_round(number: int, _: ArrayRecord) -> None:
        if number:  # round 0 is the initial model
            times.end_round()

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        torch.manual_seed(0)
        strategy = FedAvg(
            fraction_train=task.work.participants / task.work.clients,
            fraction_evaluate=0.0,
            min_available_nodes=task.work.clients,
        )
        result = strategy.start(grid, ArrayRecord(CNN().state_dict()), task.rounds, evaluate_fn=end_round)
        if len(result.train_metrics_clientapp) != task.rounds:
            raise RuntimeError(f"clients trained in {len(result.train_metrics_clientapp)} of {task.rounds} rounds")

    return app


def main() -> None:
    task = read_task("Flower simulation")
    times = RoundTimes()
    resources = {"num_cpus": 1.0, "num_gpus": 1 / CLIENTS_PER_GPU if task.device == "cuda" else 0.0}
    run_simulation(
        make_server_app(task, times),
        make_client_app(task),
        num_supernodes=task.work.clients,
        backend_config={"client_resources": resources},
    )
    times.print_json("Flower simulation", version("flwr"), count_parameters(CNN()))


if __name__ == "__main__":
    main()
