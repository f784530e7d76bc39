"""Whole rounds of the plain loop: every client trained in turn from the global model, averaged, tested."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedskew.data.augmentation.augment import make_augmentation
from fedskew.engine import DeviceSamples
from fedskew.lab.benchmark.arithmetic import fastest_arithmetic
from fedskew.lab.benchmark.cases import Case
from fedskew.lab.benchmark.loop import Trainer, told
from fedskew.methods import Client, Tensors, Trained, Updates
from fedskew.methods.parts import weighted_mean
from fedskew.randomness import fold

_TEST_BATCH = 1000


@dataclass(frozen=True)
class _Finished:
    """A client at the end of its round."""

    model: Tensors
    uplink: Tensors


class LoopRounds:
    """A server and its clients; data are gathered, augmented and normalised on the device, as in fedskew's runs."""

    def __init__(self, case: Case, tuned: bool = False) -> None:
        self._case, self._config, self._trainer = case, case.config("plain"), Trainer(case, tuned)
        self._device, self._federation = self._trainer.device, case.federation()
        dataset, augment = self._federation.dataset, self._config.augment
        augmentation = make_augmentation(augment, dataset.input_shape) if augment else None
        self._train = DeviceSamples(dataset, dataset.train, self._device, augmentation=augmentation)
        self._test = DeviceSamples(dataset, dataset.test, self._device)
        self._key = torch.zeros((), dtype=torch.int64, device=self._device)
        self._server = told(self._trainer.method, lambda part: part.server_state(self._trainer.params()))
        self._states: dict[int, Tensors] = {}
        self.samples = int(self._federation.sizes[: case.clients].sum()) * self._config.local_epochs
        """Of one call."""
        self.accuracy = 0.0
        """After the last round."""

    def __call__(self) -> None:
        with fastest_arithmetic(self._case.precision):
            sent = self._tensors()
            ends = [self._trained(client, sent) for client in range(self._case.clients)]
            self._aggregate(sent, ends)
            self.accuracy = self._tested()

    def _trained(self, client: int, sent: Tensors) -> _Finished:
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
        self._states[client] = told(self._trainer.method, lambda part: part.next_state(trained, participant))
        return _Finished(self._tensors(), told(self._trainer.method, lambda part: part.uplink(trained, participant)))

    def _participant(self, client: int) -> Client:
        received = self._trainer.params()
        counts = torch.tensor(self._federation.label_counts[client], device=self._device)
        state = self._states.get(client) or told(self._trainer.method, lambda part: part.client_state(received))
        return Client(counts, received, told(self._trainer.method, lambda part: part.downlink(self._server)), state)

    @torch.no_grad()
    def _aggregate(self, sent: Tensors, ends: list[_Finished]) -> None:
        sizes = torch.from_numpy(self._federation.sizes[: len(ends)].copy()).to(self._device, torch.float64)
        weights = sizes / sizes.sum()
        stacked = {name: torch.stack([end.model[name] for end in ends]) for name in sent}
        uplink = {name: torch.stack([end.uplink[name] for end in ends]) for name in ends[0].uplink}
        names = [name for name, _ in self._trainer.model.named_parameters()]
        updates = Updates({name: stacked.pop(name) for name in names}, weights, uplink, self._config.lr, 1.0)
        rule = self._trainer.method.server
        params, server = rule.aggregate({name: sent[name] for name in names}, updates, self._server)
        self._server |= server
        self._trainer.model.load_state_dict({**params, **weighted_mean(stacked, weights)})

    @torch.no_grad()
    def _tested(self) -> float:
        model = self._trainer.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self._device)
        for batch in torch.split(torch.arange(len(self._test), device=self._device), _TEST_BATCH):
            right += (self._trainer.logits(model, self._test.inputs(batch)).argmax(1) == self._test.y[batch]).sum()
        return float(right) / len(self._test)

    def global_model(self) -> Tensors:
        return self._trainer.params()

    def _tensors(self) -> Tensors:
        return {name: t.detach().clone() for name, t in self._trainer.model.state_dict().items()}
