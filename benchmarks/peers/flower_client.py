"""The ClientApp of `flower_simulation.py`, in a module of its own, because Ray's workers import it."""

from __future__ import annotations

from functools import cache

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch_parts import CNN, set_precision, tensors, train_client
from work import Task


@cache
def samples(task: Task) -> tuple[Tensor, Tensor]:
    """Return the images on the device. Each of Ray's workers makes them once."""
    set_precision(task.precision)
    return tensors(task.work, task.device)


@cache
def network(device: str) -> CNN:
    return CNN().to(device)


def make_client_app(task: Task) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = network(task.device)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = samples(task)
        client = int(context.node_config["partition-id"])
        train_client(model, x[client], y[client], task)
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": task.work.samples, "trained": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app
