"""The plain loop, a reference without fedskew's engines. It trains one client after another, as tutorials do.

The tuned loop uses the fastest of PyTorch's implementations of SGD instead of the default.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedskew.data.augmentation.augment import make_augmentation
from fedskew.engine import DeviceSamples
from fedskew.lab.benchmark.arithmetic import autocast, fastest_arithmetic
from fedskew.lab.benchmark.cases import Case
from fedskew.methods import Client, Method, Objective, Outputs, Part, Tensors, Trained, Updates, make_method
from fedskew.methods.parts import weigh_updates, weighted_mean
from fedskew.randomness import fold

STEPS = 10
"""Steps per call of `LoopSteps`. One client does all of them, because clients do not affect each other's speed."""


class Trainer:
    """Trains one model for one client after another."""

    def __init__(self, case: Case, tuned: bool) -> None:
        self._case, self._config = case, case.config("plain")
        self.device = torch.device(case.device)
        self.method = make_method(case.method)
        self.model = case.fresh_model().to(self.device)
        self._teacher = copy.deepcopy(self.model)
        """The received model, for an objective that compares the trained model with it."""
        self._sgd_options = _fastest_sgd_options(self.model) if tuned else {}

    def begin(self, client: Client) -> None:
        """Start the next client. The model must already have the received weights."""
        self._client = client
        self._optimizer = _sgd(self.model, self._sgd_options, self._config.lr, self._config.momentum)
        self.model.train()
        if isinstance(self.method.objective, Objective) and self.method.objective.companions():
            self._teacher.load_state_dict(self.model.state_dict())
            self._teacher.train(self.method.objective.companions()["teacher"] == "train")

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Do one local step and return the loss before it."""
        self._optimizer.zero_grad()
        loss = self._loss(self.logits(self.model, x), x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._case.method == "scaffold":
            self._add_control_variates()
        self._optimizer.step()
        return loss.detach()

    def logits(self, model: nn.Module, x: Tensor) -> Tensor:
        with autocast(self._case.precision, self.device):
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
    """Repeats local steps of one client, with normalised images on the device."""

    def __init__(self, case: Case, tuned: bool = False) -> None:
        self._case, self._trainer = case, Trainer(case, tuned)
        device, method = self._trainer.device, self._trainer.method
        federation = case.federation()
        data = DeviceSamples(federation.dataset, federation.dataset.train, device)
        rows = torch.from_numpy(federation.indices[0]).to(device)
        self._x, self._y = data.inputs(rows), data.y[rows]
        self._batches = torch.split(torch.arange(len(rows), device=device), case.setting.batch_size)
        received = self._trainer.params()
        server = collect(method, lambda part: part.server_state(received))
        state = collect(method, lambda part: part.client_state(received))
        counts = torch.tensor(federation.label_counts[0], device=device)
        self._trainer.begin(Client(counts, received, collect(method, lambda part: part.downlink(server)), state))
        self.samples = STEPS * case.setting.batch_size
        """Samples per call."""

    def __call__(self) -> None:
        with fastest_arithmetic(self._case.precision):
            for step in range(STEPS):
                batch = self._batches[step % len(self._batches)]
                self._trainer.step(self._x[batch], self._y[batch])

    @torch.no_grad()
    def current_loss(self) -> float:
        """The current cross-entropy on the client's samples."""
        logits = self._trainer.logits(self._trainer.model, self._x)
        return float(nn.functional.cross_entropy(logits, self._y))


def collect(method: Method, hook: Callable[[Part], Tensors]) -> Tensors:
    """Collect the tensors that a hook returns for all parts of a method."""
    return {name: t for part in method.parts for name, t in hook(part).items()}


def _sgd(model: nn.Module, options: dict[str, bool], lr: float, momentum: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr, momentum, foreach=options.get("foreach"), fused=options.get("fused"))


def _fastest_sgd_options(model: nn.Module) -> dict[str, bool]:
    """Find the fastest of PyTorch's three implementations of SGD for this model and device."""
    probe = copy.deepcopy(model)
    for parameter in probe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    choices: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]
    return min(choices, key=lambda choice: _step_seconds(_sgd(probe, choice, lr=0.01, momentum=0.9)))


def _step_seconds(optimizer: torch.optim.SGD) -> float:
    device = optimizer.param_groups[0]["params"][0].device
    times = []
    for _ in range(10):
        start = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


_TEST_BATCH = 1000


@dataclass(frozen=True)
class _ClientResult:
    """A client's results of a round."""

    model: Tensors
    uplink: Tensors


class LoopRounds:
    """Runs whole rounds: train clients in turn, average, and evaluate. The data are on the device, as in fedskew."""

    def __init__(self, case: Case, tuned: bool = False) -> None:
        self._case, self._config, self._trainer = case, case.config("plain"), Trainer(case, tuned)
        self._device, self._federation = self._trainer.device, case.federation()
        dataset, augment = self._federation.dataset, self._config.augment
        augmentation = make_augmentation(augment, dataset.input_shape) if augment else None
        self._train = DeviceSamples(dataset, dataset.train, self._device, augmentation=augmentation)
        self._test = DeviceSamples(dataset, dataset.test, self._device)
        self._key = torch.zeros((), dtype=torch.int64, device=self._device)
        self._server_state = collect(self._trainer.method, lambda part: part.server_state(self._trainer.params()))
        self._states: dict[int, Tensors] = {}
        self.samples = int(self._federation.sizes[: case.clients].sum()) * self._config.local_epochs
        """Samples per call."""
        self.accuracy = 0.0
        """Accuracy after the last round."""

    def __call__(self) -> None:
        with fastest_arithmetic(self._case.precision):
            sent = self._weights_and_buffers()
            client_results = [self._train_client(client, sent) for client in range(self._case.clients)]
            self._aggregate(sent, client_results)
            self.accuracy = self._evaluate()

    def _train_client(self, client: int, sent: Tensors) -> _ClientResult:
        trainer, config = self._trainer, self._config
        trainer.model.load_state_dict(sent)
        participant = self._participant(client)
        trainer.begin(participant)
        rows = torch.from_numpy(self._federation.indices[client]).to(self._device)
        steps = 0
        for _ in range(config.local_epochs):
            self._key = fold(self._key, 1)
            order = torch.randperm(len(rows), device=self._device)
            for batch in torch.split(rows[order], config.batch_size):
                trainer.step(self._train.training_inputs(batch, self._key), self._train.y[batch])
                steps += 1
        trained = Trained(trainer.params(), torch.tensor(float(steps)), config.lr, config.momentum)
        self._states[client] = collect(self._trainer.method, lambda part: part.next_state(trained, participant))
        return _ClientResult(
            self._weights_and_buffers(),
            collect(self._trainer.method, lambda part: part.uplink(trained, participant)),
        )

    def _participant(self, client: int) -> Client:
        received = self._trainer.params()
        counts = torch.tensor(self._federation.label_counts[client], device=self._device)
        state = self._states.get(client) or collect(self._trainer.method, lambda part: part.client_state(received))
        return Client(
            counts, received, collect(self._trainer.method, lambda part: part.downlink(self._server_state)), state
        )

    @torch.no_grad()
    def _aggregate(self, sent: Tensors, client_results: list[_ClientResult]) -> None:
        sizes = torch.from_numpy(self._federation.sizes[: len(client_results)].copy()).to(self._device, torch.float64)
        weights = sizes / sizes.sum()
        stacked = {name: torch.stack([result.model[name] for result in client_results]) for name in sent}
        extras = client_results[0].uplink
        uplink = {name: torch.stack([result.uplink[name] for result in client_results]) for name in extras}
        names = [name for name, _ in self._trainer.model.named_parameters()]
        trained = {name: stacked.pop(name) for name in names}
        updates = Updates(trained, weights, uplink, lr=self._config.lr, participation=1.0)
        method, sent_params = self._trainer.method, {name: sent[name] for name in names}
        if method.weighting is not None:
            updates = weigh_updates(method.weighting, sent_params, updates, self._server_state)
        params, next_state = method.server.aggregate(sent_params, updates, self._server_state)
        self._server_state |= next_state
        self._trainer.model.load_state_dict({**params, **weighted_mean(stacked, updates.weights)})

    @torch.no_grad()
    def _evaluate(self) -> float:
        model = self._trainer.model.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self._device)
        for batch in torch.split(torch.arange(len(self._test), device=self._device), _TEST_BATCH):
            correct += (self._trainer.logits(model, self._test.inputs(batch)).argmax(1) == self._test.y[batch]).sum()
        return float(correct) / len(self._test)

    def global_model(self) -> Tensors:
        return self._trainer.params()

    def _weights_and_buffers(self) -> Tensors:
        return {name: t.detach().clone() for name, t in self._trainer.model.state_dict().items()}
