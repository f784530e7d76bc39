"""Keyed randomness: the generators themselves, batches, dropout, and independence of who else takes part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from toy_runs import image_federation, norm_and_dropout, plan_round, server

from fedskew.engine import Network
from fedskew.engine.data.batches import BatchPlan, RoundKey, plan_batches
from fedskew.randomness import fold, generator, integer_key, permutation, uniform

small = st.integers(0, 40)
keys = st.integers(0, 2**32 - 1)


@given(n=small, seed=st.integers(0, 2**63 - 1), key=st.lists(keys, max_size=4))
def test_a_permutation_has_every_number_once_and_is_a_function_of_its_key(n: int, seed: int, key: list[int]) -> None:
    drawn = permutation(n, seed, "shuffle", *key)
    assert sorted(drawn) == list(range(n))
    assert np.array_equal(drawn, permutation(n, seed, "shuffle", *key))


def test_purposes_seeds_and_keys_are_streams_of_their_own() -> None:
    drawn = {
        tuple(generator(seed, purpose, a, b).integers(0, 2**62, 2))
        for seed in (0, 1, 2**40)
        for purpose in ("clients", "shuffle")
        for a in range(4)
        for b in range(4)
    }
    assert len(drawn) == 3 * 2 * 16
    assert len({integer_key(seed, p, a) for seed in (0, 1) for p in ("x", "y") for a in range(50)}) == 200


def test_the_streams_are_the_same_on_every_machine() -> None:
    """A change of these numbers would change every published run."""
    assert permutation(6, 0, "shuffle", 1, 2).tolist() == [1, 2, 3, 4, 5, 0]
    assert integer_key(0, "dropout", 0, 0, 0) == 1628635022
    assert uniform(torch.tensor(7), torch.arange(3)).mul(2**24).tolist() == [10227131, 447975, 16067155]


def test_all_orders_are_equally_likely() -> None:
    orders = [tuple(permutation(3, 0, "shuffle", k)) for k in range(6000)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-6


@given(key=keys, draw=st.integers(0, 2**32 - 1))
def test_uniform_lies_in_the_unit_interval(key: int, draw: int) -> None:
    value = float(uniform(torch.tensor(key), draw))
    assert 0 <= value < 1
    assert 0 <= int(fold(torch.tensor(key), draw)) < 2**32


@pytest.mark.parametrize("axis", ["draws", "keys", "folded keys"])
def test_uniform_is_uniform_and_uncorrelated(axis: str) -> None:
    n = 1 << 16
    if axis == "draws":
        values = uniform(torch.tensor(12345), torch.arange(n))
    elif axis == "keys":
        values = uniform(torch.arange(n), 3)
    else:
        values = uniform(fold(torch.tensor(9), torch.arange(n)), 0)
    counts = np.histogram(values.numpy(), bins=64, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-6
    pairs = np.histogram2d(values[:-1].numpy(), values[1:].numpy(), bins=16, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-6


@given(st.lists(keys, min_size=1, max_size=6), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6))
def test_a_draw_is_the_same_in_any_shape(key: list[int], draw: list[int]) -> None:
    k, d = torch.tensor(key), torch.tensor(draw)
    table = uniform(k.unsqueeze(1), d)
    for i in range(len(key)):
        for j in range(len(draw)):
            assert table[i, j] == uniform(k[i], d[j]) == uniform(k[i], draw[j])
    assert torch.equal(torch.func.vmap(uniform, in_dims=(0, None))(k, d), table)


# -- batches --------------------------------------------------------------------------------------------------


def plan(
    n: int = 10,
    client: int = 0,
    epochs: int = 3,
    batch_size: int = 4,
    smallest: int = 1,
    key: tuple[int, int, int] = (0, 0, 0),
) -> BatchPlan:
    return plan_batches(100 + np.arange(n), client, epochs, batch_size, smallest, RoundKey(*key))


@given(n=st.integers(1, 30), epochs=st.integers(1, 3), batch_size=st.integers(2, 12), smallest=st.integers(1, 2))
def test_each_epoch_visits_each_sample_once(n: int, epochs: int, batch_size: int, smallest: int) -> None:
    made = plan(n, epochs=epochs, batch_size=batch_size, smallest=smallest)
    left_out = n % batch_size if n % batch_size < smallest else 0
    per_epoch = -(-(n - left_out) // batch_size)
    assert made.indices.shape == (epochs * per_epoch, batch_size)
    assert made.visits == epochs * (n - left_out)
    assert made.epoch_keys.shape == (made.steps,)
    lengths = (made.indices >= 0).sum(axis=1)
    assert (lengths >= smallest).all()
    for epoch in made.indices.reshape(epochs, -1):
        seen = epoch[epoch >= 0]
        assert len(np.unique(seen)) == len(seen) == n - left_out
        assert set(seen) <= set(range(100, 100 + n))
    for row, length in zip(made.indices, lengths, strict=True):
        assert (row[:length] >= 0).all()
        assert (row[length:] == -1).all()


def test_epochs_clients_rounds_models_and_seeds_are_shuffled_apart() -> None:
    reference = plan(30, epochs=2, batch_size=30)
    assert np.array_equal(reference.indices, plan(30, epochs=2, batch_size=30).indices)
    assert not np.array_equal(reference.indices[0], reference.indices[1])
    assert reference.epoch_keys[0] != reference.epoch_keys[1]
    others = [plan(30, 1, 2, 30), *(plan(30, 0, 2, 30, 1, k) for k in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))]
    for other in others:
        assert not np.array_equal(reference.indices[0], other.indices[0])
        assert not set(reference.epoch_keys) & set(other.epoch_keys)
        assert reference.client_key != other.client_key


def test_a_client_s_update_does_not_depend_on_who_else_takes_part() -> None:
    federation = image_federation()
    this = server(federation, "fedvls", norm_and_dropout())
    work = plan_round(this, this.start()).work
    together = this.engine.train(work)
    for i, assignment in enumerate(work.assignments):
        alone = this.engine.train(type(work)(**{**vars(work), "assignments": [assignment]}))
        for name, tensor in alone.trained.params.items():
            assert torch.equal(tensor[0], together.trained.params[name][i])
        assert torch.equal(alone.loss[0], together.loss[i])
    backwards = this.engine.train(type(work)(**{**vars(work), "assignments": work.assignments[::-1]}))
    for name, tensor in together.trained.params.items():
        assert torch.equal(tensor.flip(0), backwards.trained.params[name])


# -- dropout --------------------------------------------------------------------------------------------------


def dropped(layer: nn.Module, shape: tuple[int, ...], key: int) -> torch.Tensor:
    network = Network(nn.Sequential(layer, nn.Flatten()))
    ones = torch.ones(shape)
    return network.forward({}, {}, ones, "train", torch.tensor(key)).logits.view(shape)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_its_mean(p: float) -> None:
    out = dropped(nn.Dropout(p), (100, 200), 5)
    kept = out != 0
    assert float(kept.float().mean()) == pytest.approx(1 - p, abs=0.02)
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))


def test_dropout_of_channels_drops_whole_channels() -> None:
    out = dropped(nn.Dropout2d(0.5), (50, 8, 3, 3), 1)
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out))
    assert 0.4 < float((out != 0).float().mean()) < 0.6


def test_dropout_depends_on_the_key_and_on_the_layer() -> None:
    assert torch.equal(dropped(nn.Dropout(0.5), (20, 20), 1), dropped(nn.Dropout(0.5), (20, 20), 1))
    assert not torch.equal(dropped(nn.Dropout(0.5), (20, 20), 1), dropped(nn.Dropout(0.5), (20, 20), 2))
    twice = dropped(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), (100, 100), 1)
    assert float((twice != 0).float().mean()) == pytest.approx(0.25, abs=0.03)


def test_a_dropout_layer_called_twice_draws_two_masks() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(self.dropout(x))

    assert float((dropped(Twice(), (100, 100), 1) != 0).float().mean()) == pytest.approx(0.25, abs=0.03)


def test_dropout_is_idle_in_eval_mode() -> None:
    network = Network(nn.Sequential(nn.Dropout(0.5), nn.Flatten()))
    assert torch.equal(network.forward({}, {}, torch.ones(3, 5)).logits, torch.ones(3, 5))
    assert torch.equal(dropped(nn.Dropout(1.0), (3, 5), 0), torch.zeros(3, 5))
