"""What one process sends is what the other receives, to the last bit."""

from __future__ import annotations

import os
import socket
import sys
import threading
from multiprocessing import Pipe

import pytest
import torch

from fedskew.engine.parallel.messages import Parcel, PortableParcel, receive, receive_bytes, send

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is Linux's")

TENSORS = {
    "a/weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "b": torch.arange(7),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
}


@linux_only
def test_tensors_of_every_kind_arrive() -> None:
    here, there = socket.socketpair()
    with here, there:
        send(here, {"round": 3, "names": ["x", "ä"]}, TENSORS)
        message = receive(there)
    assert message is not None
    facts, tensors = message
    assert facts == {"round": 3, "names": ["x", "ä"]}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


@linux_only
def test_a_list_arrives_as_one_tensor_and_one_parcel_goes_to_many() -> None:
    parcel = Parcel({"rows": [torch.full((2,), float(i)) for i in range(4)]})
    for number in range(2):
        here, there = socket.socketpair()
        with here, there:
            parcel.send(here, {"to": number})
            message = receive(there)
        assert message is not None
        assert message[0] == {"to": number}
        assert message[1]["rows"].tolist() == [[float(i)] * 2 for i in range(4)]
        message[1]["rows"].zero_()  # the receiver's own
    parcel.close()


@linux_only
def test_facts_larger_than_a_socket_holds() -> None:
    here, there = socket.socketpair()
    facts = {"clients": list(range(200_000))}
    with here, there:
        sender = threading.Thread(target=send, args=(here, facts, {}))
        sender.start()
        message = receive(there)
        sender.join()
    assert message == (facts, {})


@linux_only
def test_a_sender_that_is_gone_gives_none() -> None:
    here, there = socket.socketpair()
    here.close()
    with there:
        assert receive(there) is None


@linux_only
def test_no_descriptor_is_left_open() -> None:
    here, there = socket.socketpair()
    with here, there:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            send(here, {}, TENSORS)
            assert receive(there) is not None
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_portable_parcel_arrives_as_bytes_and_goes_to_many() -> None:
    rows = [torch.full((2,), float(i)) for i in range(4)]
    parcel = PortableParcel({**TENSORS, "rows": rows})
    for number in range(2):
        here, there = Pipe()
        with here, there:
            parcel.send(here, {"to": number})
            message = receive_bytes(there)
        assert message is not None
        facts, tensors = message
        assert facts == {"to": number}
        assert torch.equal(tensors.pop("rows"), torch.stack(rows))
        assert tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor)
            tensors[name].zero_()  # the receiver's own


def test_a_portable_parcel_s_sender_that_is_gone_gives_none() -> None:
    here, there = Pipe()
    here.close()
    with there:
        assert receive_bytes(there) is None
