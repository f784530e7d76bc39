"""The named tensors of messages: the models that a site receives, and the update that it sends back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedskew.engine import ModelState, RoundResult, RoundWork
from fedskew.methods.parts import Tensors, pack, unpack


def model_tensors(name: str, model: ModelState) -> Tensors:
    """Return a model's tensors. Their names begin with `name`: `sent`, `trained` or `companion:` and a model's name."""
    return pack(f"{name}:params", model.params) | pack(f"{name}:buffers", model.buffers)


def read_model(name: str, tensors: Mapping[str, Tensor]) -> ModelState:
    """Return the model that `model_tensors` wrote under this name."""
    return ModelState(unpack(f"{name}:params", tensors), unpack(f"{name}:buffers", tensors))


def single_model(stacked: ModelState) -> ModelState:
    """Return the only client's model. The tensors of `stacked` have a leading client axis."""
    first = ({name: t[0] for name, t in tensors.items()} for tensors in (stacked.params, stacked.buffers))
    return ModelState(*first)


def needed_companions(work: RoundWork) -> list[str]:
    """List the names of the models of earlier stages that the objective uses."""
    return [name for name in work.objective.companions() if name in work.companions]


def companion_tensors(models: Mapping[str, ModelState]) -> Tensors:
    """Return the tensors of models of earlier stages."""
    tensors: Tensors = {}
    for name, model in models.items():
        tensors |= model_tensors(f"companion:{name}", model)
    return tensors


def work_tensors(work: RoundWork, frozen: Sequence[str]) -> Tensors:
    """Return the tensors that every site receives for a round.

    `frozen` names the models whose encoders are parts of the trained model.
    """
    others = {name: work.companions[name] for name in (*needed_companions(work), *frozen)}
    return model_tensors("sent", work.exchanged) | pack("downlink", work.downlink) | companion_tensors(others)


def result_tensors(result: RoundResult, received: ModelState, shares_tally: bool) -> Tensors:
    """Return the tensors of a site's reply, without the site's state and without buffers that did not change.

    `result` has one client. Its tensors have a leading client axis, and the reply's have none.
    """
    buffers = {name: b for name, b in result.trained.buffers.items() if not torch.equal(b[0], received.buffers[name])}
    tensors = {
        **pack("trained:params", result.trained.params),
        **pack("trained:buffers", buffers),
        **pack("uplink", result.uplink),
        **(pack("tally", result.tally) if shares_tally else {}),
    }
    return {name: t[0] for name, t in tensors.items()}
