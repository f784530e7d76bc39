"""What goes to a device and comes back is what was sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.engine import Fetch, on_host
from fedskew.engine.data.device import all_to_device

DEVICES = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)


@DEVICES
def test_arrays_that_travel_together_arrive_as_they_were(device: str) -> None:
    arrays = [np.arange(6).reshape(2, 3), np.array([7]), np.zeros((0, 2), np.int64), np.arange(4)]
    there = all_to_device(arrays, torch.device(device))
    assert [t.device.type for t in there] == [device] * 4
    for array, tensor in zip(arrays, there, strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)
        assert tensor.shape == array.shape


@DEVICES
def test_what_is_fetched_is_what_was_there_when_it_was_asked_for(device: str) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float64, device=device)
    fetches = [Fetch({"a": tensor, "b": tensor[:2]}), Fetch.in_parallel({"a": tensor, "b": tensor[:2]}, tensor.device)]
    expected = torch.arange(1 << 20, dtype=torch.float64)
    for fetch in fetches:
        assert torch.equal(fetch.read()["a"], expected)
        assert fetch.read()["b"].tolist() == [0, 1]


def test_tensors_on_the_host_stay_as_they_are() -> None:
    tensors = {"a": torch.ones(3)}
    assert on_host(tensors)["a"] is tensors["a"]
