"""Tensor files: bit-exact, readable by others, and never mistaken for whole when they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedskew.experiment.storage.files import _DTYPES, Unreadable, read_tensors, write_tensors


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(read: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(read[name]) == bits(tensor)


def small() -> dict[str, Tensor]:
    return {"w": torch.tensor([1.5, -0.0, float("nan")]), "n": torch.tensor(7), "b": torch.ones(2).bfloat16()}


@pytest.mark.parametrize("name", _DTYPES)
def test_every_number_type_returns_bit_by_bit(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (3, 5, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {"many": raw.view(dtype), "scalar": raw.view(dtype)[0, 0, 0], "none": raw.view(dtype)[:0]}
    write_tensors(tmp_path / "t", tensors, {})
    assert_same(read_tensors(tmp_path / "t")[0], tensors)


def test_views_shared_memory_and_parameters(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    tensors = {"base": base, "view": base[1:], "turned": base.t(), "spread": base[:1].expand(5, 4), "p": parameter}
    write_tensors(tmp_path / "t", tensors, {})
    assert_same(read_tensors(tmp_path / "t")[0], {name: tensor.detach() for name, tensor in tensors.items()})


def test_meta_and_odd_names(tmp_path: Path) -> None:
    meta = {"λ": [1, 2.5, None, True], "nested": {"a": 0.1 + 0.2}}
    write_tensors(tmp_path / "t", {'clients/3/größe "x"': torch.ones(1)}, meta)
    tensors, read = read_tensors(tmp_path / "t")
    assert (list(tensors), read) == (['clients/3/größe "x"'], meta)
    write_tensors(tmp_path / "t", {}, {})
    assert read_tensors(tmp_path / "t") == ({}, {})


def test_others_can_read_the_file(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", small(), {"round": 3})
    assert_same(load_file(tmp_path / "t"), small())


def test_an_absent_file_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="it cannot be read"):
        read_tensors(tmp_path / "absent")


def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'z' has dtype torch\.complex128"):
        write_tensors(tmp_path / "t", {"z": torch.zeros(1, dtype=torch.complex128)}, {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_tensors(tmp_path / "t", small(), {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_at_any_length_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tensors(path, small(), {"round": 3})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(Unreadable):
            read_tensors(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_changed_bytes_never_change_what_is_read(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t"
    write_tensors(path, small(), {"round": 3})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        tensors, meta = read_tensors(path)
    except Unreadable:
        return
    assert_same(tensors, small())
    assert meta == {"round": 3}


def test_every_single_bit_of_the_tensors_counts(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tensors(path, small(), {"round": 3})
    content = path.read_bytes()
    size = sum(tensor.nbytes for tensor in small().values())
    for place in range(len(content) - size, len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :])
            with pytest.raises(Unreadable, match="digest"):
                read_tensors(path)


def test_a_file_of_someone_else_is_told_apart(tmp_path: Path) -> None:
    save_file(small(), tmp_path / "t")
    with pytest.raises(Unreadable, match="not written by fedskew"):
        read_tensors(tmp_path / "t")
