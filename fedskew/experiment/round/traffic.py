"""What a round moves between the server and its clients, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fedskew.engine import ModelState, RoundResult, RoundWork


def traffic(work: RoundWork, result: RoundResult, frozen: Sequence[str] = ()) -> dict[str, int]:
    """Bytes that all participants receive (`down`) and send (`up`); `frozen` are the models whose encoders stand in the
    one that is trained.

    A model that an earlier stage left (PKD's experts, FedConcat's encoders) is sent with every round: the server cannot
    know what a client has kept. Label counts and sample numbers, some bytes, are not counted.
    """
    asked = [name for name in work.objective.companions() if name in work.companions]
    earlier = [work.companions[name] for name in (*asked, *frozen)]
    received = sum(map(_size, (work.sent, *earlier))) + _bytes(work.downlink.values())
    return {
        "down": len(work.assignments) * received,
        "up": _size(result.trained) + _bytes(result.uplink.values()),
    }


def _size(model: ModelState) -> int:
    return _bytes(model.params.values()) + _bytes(model.buffers.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
