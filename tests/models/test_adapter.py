"""Models of other libraries: several outputs, several inputs, and the factories of torchvision and transformers."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedskew as fs
from fedskew.data.dataset import Dataset
from fedskew.errors import UserError
from fedskew.experiment.preparation import prepare
from fedskew.models import DataShape, adapted_model, make_model

DIGITS = DataShape((1, 8, 8), 10)
Aux = namedtuple("Aux", ["logits", "aux_logits"])


class Returning(nn.Module):
    """Returns its logits in a given form, and other tensors of the same shape beside them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear, self.other = form, nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        logits, other = self.linear(x.flatten(1)), self.other(x.flatten(1))
        forms = {
            "tuple": (other, logits),
            "list": [other, logits],
            "only one": (x, logits),
            "none": (x, logits[:, :7]),
            "features first": (x, logits, other),
            "dict": {"other": other, "scores": logits},
            "dict with logits": {"other": other, "logits": logits},
            "named tuple": Aux(logits, other),
            "train mode": Aux(logits, other) if self.training else logits,
        }
        return forms[self.form]


@pytest.mark.parametrize(
    ("form", "output"),
    [
        ("tuple", 1),
        ("list", 1),
        ("only one", None),
        ("dict", "scores"),
        ("dict", 1),
        ("dict with logits", None),
        ("named tuple", None),
        ("named tuple", 0),
        ("train mode", None),
    ],
)
@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_model_with_several_outputs_trains_like_its_logits(form: str, output: int | str | None, engine: str) -> None:
    federation = fs.federation("digits", fs.Dirichlet(clients=3), seed=0)
    settings = {"rounds": 1, "local_epochs": 1, "lr": 0.01, "precision": "float64", "engine": engine}
    model = Returning(form)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    plain[1].load_state_dict(model.linear.state_dict())
    expected = fs.run(federation, "fedavg", plain, **settings)
    result = fs.run(federation, "fedavg", model if output is None else fs.ModelAdapter(model, output), **settings)
    assert result.engine == engine
    assert result.config.model == "Returning"
    torch.testing.assert_close(result.model.model.linear.weight, expected.model[1].weight, rtol=0, atol=1e-12)
    assert result.last.confusion.tolist() == expected.last.confusion.tolist()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Returning("tuple"), r"returns 0: \(2, 10\), 1: \(2, 10\) for a batch of 2; expected one output of shape"),
        (Returning("dict"), r"choose the logits with fedskew.ModelAdapter\(model, output='other'\)"),
        (Returning("features first"), r"choose the logits with fedskew.ModelAdapter\(model, output=1\)"),
        (Returning("none"), r"1: \(2, 7\) for a batch of 2; expected one output of shape \(2, 10\)$"),
        (fs.ModelAdapter(Returning("dict"), "logit"), "'Returning' has no output 'logit'; expected one of 'other', 's"),
        (fs.ModelAdapter(Returning("tuple"), 5), "has no output 5; expected one of 0, 1"),
        (fs.ModelAdapter(Returning("only one"), 0), r"returns \(2, 1, 8, 8\) for a batch of 2; expected \(2, 10\)"),
    ],
)
def test_outputs_that_cannot_be_the_logits_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        adapted_model(model, DIGITS)
    assert "\n" not in str(error.value)


def test_a_model_that_needs_no_adapter_gets_none() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert adapted_model(fs.ModelAdapter(model), DIGITS) is model


# -- factories in the conventions of torchvision and timm ---------------------------------------------------

FACTORIES = """
from torch import nn

def in_torchvision(*, weights=None, progress=True, **kwargs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, kwargs.get("num_classes", 1000)))

def in_timm(pretrained=False, **kwargs):
    return in_torchvision(**kwargs)

def by_name(num_classes=1000):
    return in_torchvision(num_classes=num_classes)

def unrelated(**kwargs):
    assert not kwargs
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "zoo.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("zoo", None)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("factory", ["in_torchvision", "in_timm", "by_name", "unrelated"])
def test_a_factory_gets_the_number_of_classes(factory: str) -> None:
    assert make_model(f"zoo:{factory}", DIGITS)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "googlenet"])
def test_torchvision_models_by_name(name: str) -> None:
    pytest.importorskip("torchvision")
    model = make_model(f"torchvision.models:{name}", DataShape((3, 64, 64), 7))
    assert model.train()(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_timm_models_by_name() -> None:
    pytest.importorskip("timm")
    assert make_model("timm.models:resnet10t", DataShape((3, 64, 64), 7))(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


# -- transformers, with token ids and an attention mask -----------------------------------------------------

LENGTH, WORDS = 12, 40


def tokens(samples: int) -> tuple[dict[str, Tensor], Tensor]:
    """Texts of different lengths, of low or of high words. The label is which of them."""
    random = torch.Generator().manual_seed(0)
    label = torch.arange(samples) % 2
    ids = torch.randint(2, WORDS // 2, (samples, LENGTH), generator=random) + WORDS // 2 * label.unsqueeze(1)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (samples, 1), generator=random)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}, label


def bert(inputs: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=inputs.vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH, num_labels=inputs.classes, hidden_dropout_prob=0.1,
        initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.BertForSequenceClassification(config)


def text_federation() -> fs.Federation:
    return fs.federation(tokens(120), fs.Dirichlet(clients=3, beta=1.0), classes=["low", "high"], vocabulary=WORDS)


def test_a_dictionary_of_inputs_becomes_one_row_per_sample() -> None:
    x, y = tokens(50)
    dataset = fs.load((x, y), classes=["low", "high"], test_fraction=0.2)
    assert dataset.input_shape == (2 * LENGTH,)
    assert dataset.fields == (("input_ids", (LENGTH,), True), ("attention_mask", (LENGTH,), True))
    assert len(dataset.train) + len(dataset.test) == 50
    inputs = shape_for(dataset)
    adapter = fs.ModelAdapter(nn.Identity(), fields=inputs.fields)
    restored = adapter.split(torch.tensor(np.concatenate([dataset.train.x, dataset.test.x])))
    for name, values in x.items():
        rows = sorted(map(tuple, values.tolist()))
        assert sorted(map(tuple, restored[name].tolist())) == rows


def shape_for(dataset: Dataset) -> DataShape:
    from fedskew.experiment.preparation import data_shape

    return data_shape(dataset)


def test_a_transformer_trains_on_token_ids_and_mask(tmp_path: Path) -> None:
    federation = text_federation()
    model = bert(shape_for(federation.dataset))
    settings = {"rounds": 6, "local_epochs": 4, "lr": 0.01, "optimizer": "adam", "batch_size": 16, "engine": "plain"}
    result = fs.run(federation, "fedavg", model, out=tmp_path / "run", **settings)
    assert result.last.accuracy > 0.8
    x, _ = tokens(120)
    trained = result.model.model.eval()
    with torch.no_grad():
        masked = trained(**x).logits
        adapter = result.model(torch.cat([x["input_ids"], x["attention_mask"]], dim=1))
    torch.testing.assert_close(adapter, masked)
    again = fs.load_run(tmp_path / "run", model=bert(shape_for(federation.dataset))).model
    torch.testing.assert_close(again(torch.cat([x["input_ids"], x["attention_mask"]], dim=1)), masked)


def test_the_mask_reaches_the_transformer() -> None:
    inputs = shape_for(text_federation().dataset)
    adapter, (x, _) = adapted_model(bert(inputs), inputs).eval(), tokens(20)
    with torch.no_grad():
        logits = adapter(torch.cat([x["input_ids"], x["attention_mask"]], dim=1))
        without = adapter(torch.cat([x["input_ids"], torch.ones_like(x["attention_mask"])], dim=1))
    full = x["attention_mask"].bool().all(dim=1)
    torch.testing.assert_close(logits[full], without[full])
    assert ((logits[~full] - without[~full]).abs().max(dim=1).values > 1e-3).all()


def test_a_transformer_is_the_same_on_both_engines() -> None:
    federation = text_federation()
    model = bert(shape_for(federation.dataset))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    settings = {"rounds": 1, "local_epochs": 1, "batch_size": 16, "precision": "float64"}
    plain, stacked = (fs.run(federation, "fedprox", model, engine=e, **settings) for e in ("plain", "stacked"))
    ours, theirs = plain.model.state_dict(), stacked.model.state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-9, atol=1e-11)


def test_a_transformer_picks_the_engine_by_its_size() -> None:
    federation = text_federation()
    config = fs.Config(data="x", device="cpu", rounds=1)
    small = bert(shape_for(federation.dataset))
    assert prepare(config, federation, "fedavg", small).config.engine == "stacked"
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    large = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=WORDS, num_labels=2, **sizes))
    assert prepare(config, federation, "fedavg", large).config.engine == "plain"


@pytest.mark.parametrize("engine", ["plain", "stacked"])
def test_a_model_that_takes_one_dictionary(engine: str) -> None:
    class Table(nn.Module):
        """Whole numbers and floating-point numbers of one patient."""

        def __init__(self) -> None:
            super().__init__()
            self.ward, self.linear = nn.Embedding(4, 3), nn.Linear(5, 2)

        def forward(self, patient: dict[str, Tensor]) -> dict[str, Tensor]:
            joined = torch.cat([self.ward(patient["ward"].squeeze(-1)), patient["values"]], dim=-1)
            return {"logits": self.linear(joined)}

    random = np.random.default_rng(0)
    x = {"ward": random.integers(0, 4, 60), "values": random.normal(size=(60, 2)).astype(np.float32)}
    federation = fs.federation((x, (x["values"][:, 0] > 0).astype(int)), fs.IID(clients=2))
    assert federation.dataset.fields == (("ward", (1,), True), ("values", (2,), False))
    result = fs.run(federation, "fedavg", Table(), rounds=8, local_epochs=3, lr=0.5, engine=engine)
    assert result.engine == engine
    assert result.last.accuracy > 0.8


def test_a_tokenised_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    x, y = tokens(40)
    columns = {"text": ["…"] * 40, "label": y.tolist(), **{name: values.tolist() for name, values in x.items()}}
    data = datasets.Dataset.from_dict(columns)
    data.save_to_disk(str(tmp_path / "tokenised"))
    for source in (data, str(tmp_path / "tokenised")):
        dataset = fs.load(source)
        assert [name for name, _, _ in dataset.fields] == ["input_ids", "attention_mask"]
        assert dataset.classes == ("0", "1")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"input_ids": [[1, 2], [3]]}, r"x\['input_ids'\]: rows of unequal length; expected equal ones"),
        ({"input_ids": np.array([[1, 2], [3]], object)}, "rows of unequal length"),
        ({"input_ids": np.array([1, None], object)}, "values of type object; expected numbers"),
        ({"input_ids": [["a"], ["b"]]}, "values of type <U1; expected numbers"),
        ({"a": [1, 2], "b": [1, 2, 3]}, r"different numbers of samples \(a 2, b 3\)"),
        ({}, "x is an empty mapping"),
        ({"a": 5}, r"x\['a'\] is a single number; expected one value or row per sample"),
        ({"input_ids": [[-1], [3]]}, "x holds the number -1; expected token ids and other whole"),
        ({"a": [[np.nan], [1.0]]}, r"x\['a'\]: NaN or infinite value"),
        ({"a": [[1.5], [1.0]], "b": [1 << 25, 1]}, "33554432 is too large to store with floating-point inputs"),
    ],
)
def test_bad_dictionaries_are_one_line(x: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        fs.load((x, [0, 1]), test=(x, [0, 1]))
    assert "\n" not in str(error.value)


def test_a_bad_value_of_the_test_part_is_not_blamed_on_the_training_part() -> None:
    x = {"a": [[0.5], [1.0]]}
    with pytest.raises(UserError, match=r"^test x\['a'\]: NaN or infinite value"):
        fs.load((x, [0, 1]), test=({"a": [[np.nan], [1.0]]}, [0, 1]))


def test_the_catalogues_models_refuse_several_inputs_by_name() -> None:
    with pytest.raises(
        UserError, match=r"model 'fasttext' takes one tensor, but a sample has input_ids and attention_"
    ):
        fs.run(text_federation(), "fedavg", rounds=1)
    with pytest.raises(UserError, match="vocabulary is 3, but x has the token id 39; expected at least 40"):
        fs.load(tokens(120), vocabulary=3)
