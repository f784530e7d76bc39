"""Check the sites' updates of a round, and combine them into the result that an engine would return."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedskew.engine import RoundResult, RoundWork
from fedskew.flower.model_message import model_tensors, read_model
from fedskew.flower.site_replies import Failure, Reply
from fedskew.flower.tensors import forms, from_bytes, require_like
from fedskew.flower.wire import MAX_SAMPLES, Garbled, is_count
from fedskew.methods.parts import Tensors, unpack

VERSION = "version"
"""A site's state stays at the site. In its place, the server keeps one number under this key: for how many rounds the
model had been trained when the site saved the state."""


@dataclass(frozen=True)
class Update:
    """A site's update in the expected form. If it is not finite, `tensors` is empty and `loss` is NaN."""

    tensors: Tensors
    loss: float
    visits: int
    """Samples trained on. A sample counts once per epoch."""


@dataclass(frozen=True)
class SizeCheck:
    """The updates of a round that are too large, and the norms that they were compared with."""

    discarded: dict[int, str]
    """The reason why an update is discarded, by client."""
    medians: dict[str, float]
    """The round's median norms of the model's `change` and of the method's other tensors (`uplink`). A round with fewer
    than two finite updates keeps the medians of the previous round."""


def check_update(answer: Reply | Failure, work: RoundWork) -> Update:
    """Read the update in a site's reply.

    Raise `Garbled` with the reason if there is no reply, or if it does not have the form that the server expects.
    """
    if isinstance(answer, Failure):
        raise Garbled(answer.reason)
    facts, model_round = answer.facts, work.key.round
    if facts.get("round") != model_round:
        raise Garbled(f"it was trained after round {facts.get('round')!r} of the model; expected round {model_round}")
    visits = facts.get("visits")
    if not is_count(visits):
        raise Garbled(f"it reports {visits!r} sample visits; expected a whole number from 0 to {MAX_SAMPLES}")
    expected = {name: t.cpu() for name, t in model_tensors("trained", work.exchanged).items()}
    sent_buffers = {name: t for name, t in expected.items() if name.startswith("trained:buffers/")}
    tensors = sent_buffers | from_bytes(answer.payload)  # a site leaves out the buffers that training did not change
    require_like({name: t for name, t in tensors.items() if name.startswith("trained:")}, expected)
    if foreign := [name for name in tensors if not name.startswith(("trained:", "uplink/", "tally/"))]:
        raise Garbled(f"it has an unexpected tensor {foreign[0]!r}")
    _require_declared(tensors, work)
    loss = facts.get("loss", 0.0)  # a loss that is not shared counts as 0; the round's row then has no loss
    if not facts.get("finite") or not _is_finite(loss) or not _are_finite(tensors, sent_buffers):
        return Update({}, float("nan"), visits)
    return Update(tensors, float(loss), visits)


def _require_declared(tensors: Tensors, work: RoundWork) -> None:
    """Refuse extra tensors (uplink) of a method that declares none, and counts (tally) that are not scalars."""
    declares_uplink = any(part.sends for part in work.members)
    for name, tensor in tensors.items():
        if name.startswith("uplink/") and not declares_uplink:
            raise Garbled(f"it sends {name!r}, which the method does not declare")
        if name.startswith("tally/") and tensor.dim() > 0:
            raise Garbled(f"its {name!r} has shape {list(tensor.shape)}; expected a single number")


def _is_finite(number: object) -> bool:
    """Whether a value from JSON is a finite number. JSON has integers that are too large for a float."""
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:
        return False


def _are_finite(tensors: Tensors, sent_buffers: Tensors) -> bool:
    """Whether all numbers are finite. A buffer may have infinities that the server sent."""
    for name, tensor in tensors.items():
        allowed = tensor.isfinite()
        if name in sent_buffers:
            allowed = allowed | (tensor == sent_buffers[name])
        if not bool(allowed.all()):
            return False
    return True


def find_different_extras(updates: Mapping[int, Update]) -> list[int]:
    """Find the clients whose tensors besides the model do not have the most common form.

    If several forms are equally common, the first of them counts as the most common one.
    """
    found = {
        client: forms({n: t for n, t in update.tensors.items() if not n.startswith("trained:")})
        for client, update in updates.items()
        if update.tensors
    }
    if not found:
        return []
    usual = Counter(found.values()).most_common(1)[0][0]
    return [client for client, form in found.items() if form != usual]


_SIZED = {"change": "its change", "uplink": "what it sends besides the model"}
"""How the reason for a discarded update names the keys of `SizeCheck.medians`."""


def check_sizes(updates: Mapping[int, Update], work: RoundWork, limit: float, usual: Mapping[str, float]) -> SizeCheck:
    """Find the clients whose update is more than `limit` times as large as the round's median.

    One large update ruins the mean, even if all its numbers are finite. For an even number of updates, the lower median
    is used, so that the larger of two updates does not set the standard. A single update is compared with `usual`, the
    medians of the previous round. A median of 0 sets no limit, because every change would be above it.
    """
    norms = {client: _norms(update.tensors, work) for client, update in updates.items() if update.tensors}
    medians = dict(usual)
    if len(norms) > 1:
        kinds = {kind for found in norms.values() for kind in found}
        for kind in kinds:
            medians[kind] = sorted(found.get(kind, 0.0) for found in norms.values())[(len(norms) - 1) // 2]
    discarded = {
        client: f"{_SIZED[kind]} has norm {norm:.3g}, more than {limit:g} times the usual {medians[kind]:.3g}"
        for client, found in norms.items()
        for kind, norm in found.items()
        if 0 < medians.get(kind, 0.0) * limit < norm
    }
    return SizeCheck(discarded, medians)


def _norms(tensors: Tensors, work: RoundWork) -> dict[str, float]:
    """Compute the norms of the change of the model's parameters and of the method's other tensors (`uplink`)."""
    sent = {f"trained:params/{name}": t.cpu().double() for name, t in work.exchanged.params.items()}
    change = [tensors[name].double() - t for name, t in sent.items()]
    extras = [t.double() for name, t in tensors.items() if name.startswith("uplink/") and t.is_floating_point()]
    return {"change": _norm(change), **({"uplink": _norm(extras)} if extras else {})}


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def combine_updates(work: RoundWork, updates: Mapping[int, Update]) -> RoundResult:
    """Stack the updates, with one row per participant.

    A participant whose update is missing, discarded or not finite has a loss of NaN. Its row has the model that was
    sent, and zeros for the other tensors.
    """
    rows = [updates.get(a.client, Update({}, float("nan"), 0)) for a in work.assignments]
    defaults = {name: t.cpu() for name, t in model_tensors("trained", work.exchanged).items()}  # in the model's order
    defaults |= {n: torch.zeros_like(t) for row in rows for n, t in row.tensors.items() if n not in defaults}
    device = next(iter(work.sent.params.values())).device
    stacked = {name: _stack(rows, name, default).to(device) for name, default in defaults.items()}
    version = torch.full((len(rows),), work.key.round + 1)
    return RoundResult(
        trained=read_model("trained", stacked),
        uplink=unpack("uplink", stacked),
        states={VERSION: version} if any(a.state for a in work.assignments) else {},
        loss=torch.tensor([row.loss for row in rows], dtype=torch.float64, device=device),
        tally=unpack("tally", stacked),
        visits=np.array([row.visits for row in rows], np.int64),
    )


def _stack(rows: Sequence[Update], name: str, default: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.tensors.get(name, default) for row in rows])
