"""A plain PyTorch loop: one client after another, then the mean of their models."""

from __future__ import annotations

import torch
from torch_parts import CNN, count_parameters, set_precision, tensors, train_client
from work import RoundTimes, read_task


def main() -> None:
    task = read_task("the plain loop")
    times = RoundTimes()
    set_precision(task.precision)
    torch.manual_seed(0)
    model = CNN().to(task.device)
    x, y = tensors(task.work, task.device)
    for _ in range(task.rounds):
        received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in received.items()}
        for client in torch.randperm(task.work.clients)[: task.work.participants].tolist():
            model.load_state_dict(received)
            train_client(model, x[client], y[client], task)
            for name, tensor in model.state_dict().items():
                total[name] += tensor
        model.load_state_dict({name: tensor / task.work.participants for name, tensor in total.items()})
        if task.device == "cuda":
            torch.cuda.synchronize()
        times.end_round()
    times.print_json("plain loop", torch.__version__, count_parameters(model))


if __name__ == "__main__":
    main()
