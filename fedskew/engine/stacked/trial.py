"""Trial steps: can a model and a method be stacked, do they ignore padding, and how much memory do they take?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedskew.accurate_sums import ACCURATE
from fedskew.engine.contract import PassKind, RoundWork
from fedskew.engine.data.batches import padded_targets, plan_batches
from fedskew.engine.data.device import DeviceSamples
from fedskew.engine.data_passes import ClientStack, DataPass, stacked_sums
from fedskew.engine.kernels.launches import compile_ahead
from fedskew.engine.model.network import ModelState, Network
from fedskew.engine.stacked.local_step import Batches, StepResult, compute_step, finish_clients
from fedskew.methods.hook_results import wrong_number, wrong_tally, wrong_tensors
from fedskew.methods.parts import Outputs, Seen, Tensors, same_form
from fedskew.randomness import fold

_CANDIDATES = 64
"""How many samples, spread over the data, are searched for one that differs from the first sample."""
_DATA_PASSES: tuple[PassKind, ...] = ("opening", "closing")


class Trial:
    """Takes steps on a few samples, without side effects."""

    def __init__(self, network: Network, data: DeviceSamples, work: RoundWork) -> None:
        self._network, self._data = network, data
        self._work = replace(work, sent=_copied(work.sent))  # a user's model may write into its tensors
        largest = max(work.assignments, key=lambda a: len(a.samples))
        self._client = replace(largest, samples=largest.samples[:3])
        """The round's largest client, with only a few of its samples."""

    def compile_kernels(self, width: int) -> None:
        """On a CUDA GPU, compile the kernels of all trial steps in parallel, before the first one runs."""
        device, samples = self._data.y.device, self._client.samples

        def take_steps() -> None:
            for rows in (samples, np.concatenate([samples, samples])):
                self._compute_step(1, rows, len(samples))
            for clients in (1, 2):
                self.step(clients, width)

        if device.type == "cuda":
            with suppress(Exception):  # an error of a hook shows again when the step runs
                compile_ahead(take_steps, device)

    def tally_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of the objective's tally.

        Raise an error if the step, the closing pass or the hooks after it cannot be stacked.
        """
        found = self._compute_step(1, self._client.samples, len(self._client.samples))
        self._check_step(found)
        params = {name: p.unsqueeze(0) for name, p in self._work.sent.params.items()}
        steps = torch.ones(1, dtype=next(iter(params.values())).dtype, device=self._data.y.device)
        finish_clients(self._work, params, steps, *self._client_tensors(1), self._closing_sums(params))
        return {name: t.dtype for name, t in found.tally.items()}

    def _check_step(self, found: StepResult) -> None:
        """Raise `UserError` if a hook of one client's step returned something wrong."""
        work, direction = self._work, {name: t[0] for name, t in found.direction.items()}
        if not same_form(direction, work.sent.params):
            raise wrong_tensors(work.solver, "direction", direction, work.sent.params)
        if found.loss.dim() > 1:
            raise wrong_number(work.objective, "loss", found.loss[0])
        if any(count.dim() > 1 for count in found.tally.values()):
            raise wrong_tally(work.objective, {name: t[0] for name, t in found.tally.items()})

    def _closing_sums(self, params: Tensors) -> Tensors:
        """Return the sums of one client's closing pass, or nothing if the work has no such pass."""
        work = self._work
        if not work.needs_pass("closing"):
            return {}
        samples = self._client.samples
        plan = plan_batches(samples, self._client.client, 1, max(len(samples), 1), 1, work.key)
        buffers = {name: b.unsqueeze(0) for name, b in work.sent.buffers.items()}
        stack = ClientStack([plan], params, buffers, *self._client_tensors(1))
        return stacked_sums(self._network, self._data, DataPass(work, "closing"), stack)

    def step(self, clients: int, width: int) -> StepResult:
        """Take a step with this many clients and batches of `width` samples."""
        rows = np.resize(self._client.samples, width)
        return self._compute_step(clients, rows, width)

    def ignores_padding(self) -> bool:
        """Return whether rows of padding have no effect.

        There are three tests. Rows of padding must not move the dropout masks of the samples before them. A whole step
        must have the same direction with other samples in the rows of padding. And the loss, its gradient and the sums
        of data passes must be the same with and without these rows. The last test computes the network's outputs only
        once, because a network rounds differently for another batch shape, and a deep network amplifies the difference.
        """
        samples = self._client.samples
        if not self._network.rows_keep_masks(self._data.some_inputs()):
            return False
        padded, otherwise_padded = (
            self._compute_step(1, np.concatenate([samples, [row] * 3]), len(samples)).direction
            for row in (0, self._other_row())
        )
        are_same = _are_close(padded, otherwise_padded, 10 * self._network.resolution)
        return are_same and self._ignores_padding_length()

    def _other_row(self) -> int:
        """Return the index of a sample whose input differs from the first one's: the last sample, if it does."""
        last = len(self._data) - 1
        # `torch.linspace` would round in float32, and could exceed the last index.
        rows = last - torch.arange(_CANDIDATES, device=self._data.y.device) * last // (_CANDIDATES - 1)
        differs = (self._data.x[rows] != self._data.x[0]).flatten(1).any(dim=1)
        return int(rows[differs.int().argmax()])

    def _compute_step(self, clients: int, rows: npt.NDArray[np.int64], valid_rows: int) -> StepResult:
        """Take a step on these rows of the data. Rows after the first `valid_rows` are padding."""
        work, device = self._work, self._data.y.device
        indices = torch.tensor(rows, dtype=torch.int64, device=device).expand(clients, -1)
        valid = torch.arange(len(rows), device=device).expand(clients, -1) < valid_rows
        keys = torch.arange(clients, device=device)
        label_counts, state = self._client_tensors(clients)
        batches = Batches(
            x=self._data.training_inputs(indices, keys.unsqueeze(-1)),
            y=padded_targets(self._data.y[indices], valid),
            valid=valid,
            keys=fold(keys, 0),
            label_counts=label_counts,
            state=state,
        )
        params = {name: _copies(p, clients) for name, p in work.sent.params.items()}
        buffers = {name: _copies(b, clients) for name, b in work.sent.buffers.items()}
        with torch.no_grad():
            return compute_step(self._network, work, batches, params, buffers, self._data.some_inputs())

    def _client_tensors(self, clients: int) -> tuple[Tensor, Tensors]:
        """Return the client's label counts and state, repeated for this many clients."""
        device = self._data.y.device
        state = {name: _copies(t.to(device), clients) for name, t in self._client.state.items()}
        return _copies(torch.tensor(self._client.label_counts, device=device), clients), state

    def _ignores_padding_length(self) -> bool:
        """Return whether the loss, its gradient and the sums of data passes are the same with and without padding."""
        work, device, samples = self._work, self._data.y.device, len(self._client.samples)
        rows = torch.from_numpy(np.tile(self._client.samples, 2)).to(device)
        x, buffers = self._data.inputs(rows), {name: t.clone() for name, t in work.sent.buffers.items()}
        key = torch.zeros((), dtype=torch.int64, device=device)
        with torch.no_grad():
            # A head may give other logits in train mode than in eval mode, which data passes use.
            train_outputs = self._network.forward(work.sent.params, buffers, x, "train", key).tensors()
            eval_outputs = self._network.forward(work.sent.params, work.sent.buffers, x).tensors()
        y = padded_targets(self._data.y[rows], torch.arange(len(rows), device=device) < samples)
        state = {name: t.to(device) for name, t in self._client.state.items()}
        client = work.client(torch.tensor(self._client.label_counts, device=device), state)

        def results(count: int) -> Tensors:
            leaves = {kind: t[:count].clone().requires_grad_() for kind, t in train_outputs.items()}
            # The frozen models' outputs must differ from the trained model's. Otherwise, a distillation term would be 0
            # with and without padding.
            others = {kind: t[:count].roll(1, dims=-1) for kind, t in train_outputs.items()}
            frozen = {name: Outputs.from_tensors(others) for name in work.objective.companions()}
            loss = work.objective.loss(replace(Outputs.from_tensors(leaves), companions=frozen), y[:count], client)
            grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
            seen = Seen(
                Outputs.from_tensors({kind: t[:count] for kind, t in eval_outputs.items()}),
                y[:count],
                rows[:count],
                work.sent.params,  # in place of the gradient, which has the same names and shapes
            )
            passes = {
                f"{when} {n}": t
                for when in _DATA_PASSES
                if work.needs_pass(when)
                for n, t in DataPass(work, when).batch_sums(seen, client).items()
            }
            gradients = {kind: g[:samples] for kind, g in zip(leaves, grads, strict=True)}
            return {"loss": loss.detach(), **gradients, **passes}

        return _are_close(results(samples), results(2 * samples), 1000 * torch.finfo(eval_outputs["logits"].dtype).eps)


def _copied(model: ModelState) -> ModelState:
    params, buffers = ({name: t.clone() for name, t in part.items()} for part in (model.params, model.buffers))
    return ModelState(params, buffers)


def _copies(tensor: Tensor, clients: int) -> Tensor:
    return tensor.expand(clients, *tensor.shape).clone()


def _are_close(a: Tensors, b: Tensors, tolerance: float) -> bool:
    """Return whether tensors differ only by rounding. Infinities must agree, and NaN counts as zero."""
    infinities_agree = all(torch.equal(_infinities(a[name]), _infinities(b[name])) for name in a)
    difference = _norm({name: _finite(a[name]) - _finite(b[name]) for name in a})
    return infinities_agree and difference <= tolerance * _norm({n: _finite(t) for n, t in a.items()}) + 1e-20


def _infinities(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isinf(), tensor, 0)


def _finite(tensor: Tensor) -> Tensor:
    return tensor.to(ACCURATE[tensor.device.type]).nan_to_num(nan=0, posinf=0, neginf=0)


def _norm(tensors: Tensors) -> float:
    return float(torch.stack([t.square().sum() for t in tensors.values()]).sum().sqrt())


_USABLE_SHARE = {"cpu": 0.5, "cuda": 0.8, "mps": 0.5}
"""The share of the free memory that stacked clients may take. Evaluation and the server need the rest.

Apple's GPUs use the host's memory."""


def spare_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that stacked clients may take, or None if unknown."""
    free = _free_cuda_bytes(device) if device.type == "cuda" else _free_host_bytes()
    return None if free is None else int(free * _USABLE_SHARE[device.type])


def _free_cuda_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _free_host_bytes() -> int | None:
    free = [bytes_ for bytes_ in (_available_bytes(), _bytes_left_to_container()) if bytes_ is not None]
    return min(free, default=None)


def _available_bytes() -> int | None:
    lines = _read(Path("/proc/meminfo")).splitlines()
    entries = dict(line.split(":", 1) for line in lines)
    return int(entries["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in entries else None


def _bytes_left_to_container(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left under a container's limit (cgroup v2), or None if there is no such limit."""
    limit, used = (_read(group / name).strip() for name in ("memory.max", "memory.current"))
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def bytes_taken(function: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a call of `function`.

    On a CUDA GPU, it is measured. Elsewhere, it is estimated as twice the memory that autograd saves for the backward
    pass, because gradients take about as much.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    with _saved_by_autograd() as kept:
        function()
    return 2 * sum(kept.values())


@contextmanager
def _saved_by_autograd() -> Iterator[dict[int, int]]:
    """Yield a dictionary that collects what autograd saves inside the `with` block: bytes of storages, by address."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
