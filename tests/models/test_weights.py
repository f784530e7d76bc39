"""A model that starts from a file of weights: what it takes, what it leaves, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedskew as fs
from fedskew.errors import UserError
from fedskew.models import DataShape, make_model
from fedskew.models.weights import start_from

TEN, FIVE = DataShape((1, 8, 8), 10), DataShape((1, 8, 8), 5)


def test_every_tensor_of_the_same_model_is_taken(tmp_path: Path) -> None:
    source, model = make_model("dnn", TEN, 1), make_model("dnn", TEN, 2)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    started, start = start_from(str(tmp_path / "w.safetensors"), model)
    assert all(torch.equal(t, source.state_dict()[name]) for name, t in started.state_dict().items())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items()), "the given model is not changed"
    assert start.taken == tuple(before)
    assert start.lines()[0].endswith("6 of 6 tensors taken")


def test_a_head_for_other_classes_keeps_its_start(tmp_path: Path) -> None:
    source, model = make_model("dnn", FIVE, 1), make_model("dnn", TEN, 2)
    tensors = {**source.state_dict(), "extra": torch.zeros(2)}
    del tensors["encoder.1.bias"]
    save_file(tensors, tmp_path / "w.safetensors")
    started, start = start_from(str(tmp_path / "w.safetensors"), model)
    assert start.taken == ("encoder.1.weight", "encoder.3.weight", "encoder.3.bias")
    assert start.left == {
        "encoder.1.bias": "missing in the file",
        "head.weight": "shape (5, 200) in the file, (10, 200) in the model",
        "head.bias": "shape (5,) in the file, (10,) in the model",
    }
    assert start.unused == ("extra",)
    assert torch.equal(started.state_dict()["head.weight"], model.state_dict()["head.weight"])
    assert torch.equal(started.state_dict()["encoder.1.weight"], source.state_dict()["encoder.1.weight"])
    assert start.lines()[2:] == [
        "  not taken: encoder.1.bias, missing in the file",
        "  not taken: head.weight, shape (5, 200) in the file, (10, 200) in the model",
        "  not taken: head.bias, shape (5,) in the file, (10,) in the model",
        "  in the file only: extra",
    ]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_dict_of_torch_is_read(tmp_path: Path, wrapped: bool) -> None:
    source = make_model("dnn", TEN, 1)
    named = {f"module.{name}": t for name, t in source.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": named} if wrapped else named, tmp_path / "w.pth")
    started, start = start_from(str(tmp_path / "w.pth"), make_model("dnn", TEN, 2))
    assert len(start.taken) == 6
    assert torch.equal(started.state_dict()["head.weight"], source.state_dict()["head.weight"])


def test_a_tensor_with_nan_is_left_out(tmp_path: Path) -> None:
    tensors = make_model("dnn", TEN, 1).state_dict() | {"head.bias": torch.full((10,), torch.nan)}
    save_file(tensors, tmp_path / "w.safetensors")
    _, start = start_from(str(tmp_path / "w.safetensors"), make_model("dnn", TEN, 2))
    assert start.left == {"head.bias": "NaN or infinite values in the file"}


def test_tensors_that_are_not_plain_numbers_are_left_out(tmp_path: Path) -> None:
    fit = make_model("dnn", TEN, 1).state_dict()
    eight_bits = fit["head.bias"].to(torch.float8_e4m3fn)
    torch.save(fit | {"head.weight": fit["head.weight"].to_sparse(), "head.bias": eight_bits, 0: fit["head.bias"]},
               tmp_path / "w.pt")  # fmt: skip
    started, start = start_from(str(tmp_path / "w.pt"), make_model("dnn", TEN, 2))
    assert start.left == {"head.weight": "sparse, quantised or without values in the file"}
    assert torch.equal(started.state_dict()["head.bias"], eight_bits.float())


def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    model = make_model("dnn", TEN, 0)
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")  # a pickled object, not tensors
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "damaged.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header...")
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    save_file({}, tmp_path / "none.safetensors")
    nans = {name: torch.full_like(t, torch.nan) for name, t in model.state_dict().items()}
    save_file(nans, tmp_path / "nan.safetensors")
    torch.save({name: t.to_sparse() for name, t in model.state_dict().items()}, tmp_path / "sparse.pt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").touch()
    expected = {
        "missing.safetensors": "No such file",
        "notes.txt": "expected a file that ends in .safetensors, .pt, .pth or .bin",
        "run": "did you mean '.*model.safetensors'",
        "module.pt": "holds objects other than tensors, which are not loaded; expected a state dict",
        "list.pt": "has no named tensors",
        "none.safetensors": "has no named tensors",
        "nan.safetensors": "every tensor of init .* that fits Classifier has NaN or infinite values; expected finite",
        "sparse.pt": "every tensor of init .* that fits Classifier is sparse, quantised or without values",
        "empty.pt": "it is damaged, or holds",
        "damaged.safetensors": "is not a safetensors file",
        "other.safetensors": r"no tensor .* fits Classifier .* 'encoder.1.weight' \(200, 64\), and the file 'other'",
    }
    for name, words in expected.items():
        with pytest.raises(UserError, match=words) as caught:
            start_from(str(tmp_path / name), model)
        assert str(caught.value).isprintable(), "one line, without a terminal's codes"
        assert "weights_only" not in str(caught.value), "no advice to load the file unsafely"


def test_a_run_starts_from_the_file_and_records_it(tmp_path: Path) -> None:
    fed = fs.federation("digits", fs.Dirichlet(clients=3))
    settings = {"rounds": 1, "local_epochs": 1, "device": "cpu", "progress": False}
    first = fs.run(fed, "fedavg", out=tmp_path / "first", **settings)
    file = tmp_path / "first" / "model.safetensors"
    second = fs.run(fed, "fedavg", out=tmp_path / "second", init=str(file), **settings)
    assert second.history[0].accuracy == first.accuracy
    assert second.config.init == str(file)
    assert len(second.config.init_sha256 or "") == 64
    assert second.about["init"]["taken"][0] == "encoder.1.weight"
    moved = tmp_path / "moved.safetensors"
    file.rename(moved)
    again = fs.run(fed, "fedavg", out=tmp_path / "second", init=str(moved), **settings)
    assert again.accuracy == second.accuracy, "the same file under another name"
    save_file(make_model("dnn", TEN, 9).state_dict(), moved)
    with pytest.raises(UserError, match="differs in init_sha256"):
        fs.run(fed, "fedavg", out=tmp_path / "second", init=str(moved), **settings)
    with pytest.raises(UserError, match=r"has SHA-256 .*; expected"):
        fs.run(fed, "fedavg", config=second.config, out=tmp_path / "third", init=str(moved), progress=False)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    class StopAfterFirst(fs.Callback):
        def on_round(self, row: object, rounds_ahead: int) -> bool | None:
            raise KeyboardInterrupt

    fed = fs.federation("digits", fs.Dirichlet(clients=3))
    file = tmp_path / "w.safetensors"
    save_file(make_model("dnn", TEN, 5).state_dict(), file)
    settings = {"rounds": 3, "local_epochs": 1, "device": "cpu", "init": str(file), "progress": False}
    whole = fs.run(fed, "fedavg", **settings)
    with pytest.raises(KeyboardInterrupt):
        fs.run(fed, "fedavg", out=tmp_path / "run", callbacks=[StopAfterFirst()], **settings)
    resumed = fs.run(fed, "fedavg", out=tmp_path / "run", **settings)
    assert [row.accuracy for row in resumed.history] == [row.accuracy for row in whole.history]
