"""What the PyTorch peers share: the CNN, the images on the device, and one client's training."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from work import CHANNELS, CLASSES, HIDDEN, KERNEL, LEARNING_RATE, MOMENTUM, SHAPE, Task, Work


class CNN(nn.Module):
    """The network that `work.py` describes."""

    def __init__(self) -> None:
        super().__init__()
        first, second = CHANNELS
        side = ((SHAPE[1] - KERNEL + 1) // 2 - KERNEL + 1) // 2
        self.layers = nn.Sequential(
            nn.Conv2d(SHAPE[0], first, KERNEL), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(first, second, KERNEL), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(second * side * side, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tensors(work: Work, device: str) -> tuple[Tensor, Tensor]:
    """Return all normalised images and labels on the device, client by client."""
    images, labels = work.data()
    return torch.from_numpy(images).to(device).float().div_(127.5).sub_(1), torch.from_numpy(labels).to(device)


def set_precision(precision: str) -> None:
    """Let products of float32 matrices use TF32, or not. PyTorch would allow it for convolutions by default."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"


def autocast(task: Task) -> contextlib.AbstractContextManager[None]:
    return torch.autocast(task.device, torch.bfloat16, enabled=task.precision == "bf16")


def train_client(model: nn.Module, x: Tensor, y: Tensor, task: Task) -> None:
    """Train the model on one client's images, as tutorials do."""
    optimiser = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    model.train()
    for _ in range(task.work.epochs):
        for batch in torch.randperm(len(y), device=y.device).split(task.work.batch_size):
            optimiser.zero_grad()
            with autocast(task):
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimiser.step()
