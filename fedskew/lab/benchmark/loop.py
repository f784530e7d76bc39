"""The plain loop's local steps: one client after another, as tutorials and other frameworks train them.

An ordinary `nn.Module`, `torch.optim.SGD`, `zero_grad`, `backward`, `step`; nothing of fedskew's engines. The tuned
loop takes the fastest of PyTorch's implementations of SGD instead of its default.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedskew.engine import DeviceSamples
from fedskew.lab.benchmark.arithmetic import casting, fastest_arithmetic
from fedskew.lab.benchmark.cases import Case
from fedskew.methods import Client, Method, Objective, Outputs, Part, Tensors, make_method

STEPS = 10
"""Of a call to `LoopSteps`: a hundred clients take ten times as long as ten, and need not be waited for."""


class Trainer:
    """One model that is trained for one client after another."""

    def __init__(self, case: Case, tuned: bool) -> None:
        self._case, self._config = case, case.config("plain")
        self.device = torch.device(case.device)
        self.method = make_method(case.method)
        self.model = case.fresh_model().to(self.device)
        self._teacher = copy.deepcopy(self.model)
        self._implementation = _fastest_sgd(self.model) if tuned else {}

    def begin(self, client: Client) -> None:
        """Start with the next client; the model is already as it received it."""
        self._client = client
        self._optimizer = _sgd(self.model, self._implementation, self._config.lr, self._config.momentum)
        self.model.train()
        if isinstance(self.method.objective, Objective) and self.method.objective.companions():
            self._teacher.load_state_dict(self.model.state_dict())
            self._teacher.train(self.method.objective.companions()["teacher"] == "train")

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One local step; the loss before it."""
        self._optimizer.zero_grad()
        loss = self._loss(self.logits(self.model, x), x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._case.method == "scaffold":
            self._add_control_variates()
        self._optimizer.step()
        return loss.detach()

    def logits(self, model: nn.Module, x: Tensor) -> Tensor:
        with casting(self._case.precision, self.device):
            out: Tensor = model(x)
        return out.float()

    def _loss(self, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        objective = self.method.objective
        if self._case.method != "fedvls" or not isinstance(objective, Objective):
            return nn.functional.cross_entropy(logits, y)
        with torch.no_grad():
            teacher = Outputs(self.logits(self._teacher, x))
        return objective.loss(Outputs(logits, companions={"teacher": teacher}), y, self._client)

    @torch.no_grad()
    def _add_control_variates(self) -> None:
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        direction = self.method.solver.direction(lambda *_: grads, dict(self.model.named_parameters()), self._client)
        for name, parameter in self.model.named_parameters():
            parameter.grad = direction[name]

    def params(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class LoopSteps:
    """Local steps of a client that is never done, on images that lie on the device, normalised."""

    def __init__(self, case: Case, tuned: bool = False) -> None:
        self._case, self._trainer = case, Trainer(case, tuned)
        device, method = self._trainer.device, self._trainer.method
        federation = case.federation()
        data = DeviceSamples(federation.dataset, federation.dataset.train, device)
        rows = torch.from_numpy(federation.indices[0]).to(device)
        self._x, self._y = data.inputs(rows), data.y[rows]
        self._batches = torch.split(torch.arange(len(rows), device=device), case.setting.batch_size)
        received = self._trainer.params()
        server = told(method, lambda part: part.server_state(received))
        state = told(method, lambda part: part.client_state(received))
        counts = torch.tensor(federation.label_counts[0], device=device)
        self._trainer.begin(Client(counts, received, told(method, lambda part: part.downlink(server)), state))
        self.samples = STEPS * case.setting.batch_size
        """Of one call."""

    def __call__(self) -> None:
        with fastest_arithmetic(self._case.precision):
            for step in range(STEPS):
                batch = self._batches[step % len(self._batches)]
                self._trainer.step(self._x[batch], self._y[batch])

    @torch.no_grad()
    def current_loss(self) -> float:
        """The cross-entropy over the client's samples."""
        logits = self._trainer.logits(self._trainer.model, self._x)
        return float(nn.functional.cross_entropy(logits, self._y))


def told(method: Method, hook: Callable[[Part], Tensors]) -> Tensors:
    """What all parts of a method say together."""
    return {name: t for part in method.parts for name, t in hook(part).items()}


def _sgd(model: nn.Module, implementation: dict[str, bool], lr: float, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        model.parameters(), lr, momentum, foreach=implementation.get("foreach"), fused=implementation.get("fused")
    )


def _fastest_sgd(model: nn.Module) -> dict[str, bool]:
    """PyTorch has three implementations of SGD; the one that is fastest for this model on this device."""
    probe = copy.deepcopy(model)
    for parameter in probe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    choices: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    return min(choices, key=lambda choice: _seconds(_sgd(probe, choice, lr=0.01, momentum=0.9)))


def _seconds(optimizer: torch.optim.SGD) -> float:
    device = optimizer.param_groups[0]["params"][0].device
    times = []
    for _ in range(10):
        start = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
