"""Augmentation: what a key decides, how often things happen, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedskew.data.augmentation import image_operations as ops
from fedskew.data.augmentation.augment import AUGMENTATIONS, Augmentation, make_augmentation
from fedskew.data.augmentation.autoaugment import POLICY, AutoAugment
from fedskew.errors import UserError

CIFAR = (3, 32, 32)
NAMES = list(AUGMENTATIONS)
CHAINS = [[name] for name in NAMES] + [["crop", "flip", "cutout"], ["crop-reflect", "flip", "autoaugment"]]


def keys_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(2**32, (count,), generator=torch.Generator().manual_seed(seed))


def images_of(count: int, shape: tuple[int, ...] = CIFAR, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, *shape), generator=random, dtype=torch.uint8)


def augmented(augmentation: Augmentation, images: Tensor, keys: Tensor) -> Tensor:
    raw = augmentation.augment_raw(images, keys)
    assert raw.dtype == torch.uint8
    assert raw.shape == images.shape
    return augmentation.augment_normalised(raw.float() / 255 - 0.5, keys)


@pytest.mark.parametrize("shape", [CIFAR, (1, 28, 28), (3, 64, 64), (1, 20, 33)])
@pytest.mark.parametrize("names", CHAINS, ids="+".join)
def test_a_sample_depends_on_its_key_and_not_on_its_batch(names: list[str], shape: tuple[int, ...]) -> None:
    augmentation = make_augmentation(names, shape)
    images, keys = images_of(12, shape), keys_of(12)
    whole = augmented(augmentation, images, keys)
    alone = torch.cat([augmented(augmentation, images[n : n + 1], keys[n : n + 1]) for n in range(12)])
    assert torch.equal(whole, alone)
    subset = torch.tensor([7, 2, 11, 2])
    assert torch.equal(augmented(augmentation, images[subset], keys[subset]), whole[subset])
    assert not torch.equal(augmented(augmentation, images, keys_of(12, seed=1)), whole)


@given(st.permutations(range(6)))
def test_order_in_the_batch_does_not_matter(order: list[int]) -> None:
    augmentation = make_augmentation(["crop", "flip", "autoaugment", "cutout"], CIFAR)
    images, keys = images_of(6), keys_of(6)
    whole = augmented(augmentation, images, keys)
    assert torch.equal(augmented(augmentation, images[order], keys[order]), whole[order])


def test_an_empty_batch_and_no_augmentation() -> None:
    images, keys = images_of(3), keys_of(3)
    assert torch.equal(make_augmentation([], CIFAR).augment_raw(images, keys), images)
    assert make_augmentation([], (7,)) == Augmentation()
    for name in NAMES:
        assert augmented(make_augmentation([name], CIFAR), images[:0], keys[:0]).shape == (0, *CIFAR)


@pytest.mark.parametrize("names", CHAINS, ids="+".join)
def test_nothing_is_read_back_from_the_device(names: list[str]) -> None:
    """Tensors without values: reading one, or a shape that depends on one, would raise."""
    augmentation = make_augmentation(names, CIFAR)
    out = augmented(augmentation, images_of(4).to("meta"), keys_of(4).to("meta"))
    assert out.shape == (4, *CIFAR)
    assert out.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("names", CHAINS, ids="+".join)
def test_cuda_gives_the_same_images_without_waiting(names: list[str]) -> None:
    augmentation = make_augmentation(names, CIFAR)
    images, keys = images_of(500), keys_of(500)
    there = images.cuda(), keys.cuda()
    augmented(augmentation, *there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = augmented(augmentation, *there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out.cpu(), augmented(augmentation, images, keys))


def test_workers_can_be_sent_an_augmentation() -> None:
    augmentation = make_augmentation(NAMES[1:], CIFAR)
    assert pickle.loads(pickle.dumps(augmentation)) == augmentation


def offsets(crops: Tensor, shape: tuple[int, ...], padding: int) -> Tensor:
    """Where each crop of the image of pixel numbers came from, found at the image's centre."""
    _, height, width = shape
    y, x = height // 2, width // 2
    number = crops[:, 0, y, x].long()
    return torch.stack([number // width - y, number % width - x], dim=1) + padding


@pytest.mark.parametrize("name", ["crop", "crop-reflect"])
def test_all_81_crops_occur_equally_often_and_are_crops(name: str) -> None:
    shape = (1, 14, 16)
    image = torch.arange(14 * 16, dtype=torch.uint8).view(1, *shape)
    count = 8100
    crops = make_augmentation([name], shape).augment_raw(image.expand(count, *shape), keys_of(count))
    found = offsets(crops, shape, padding=4)
    seen = torch.bincount(found[:, 0] * 9 + found[:, 1], minlength=81)
    assert len(seen) == 81
    assert seen.min() > 60
    assert seen.max() < 140
    mode = "constant" if name == "crop" else "reflect"
    padded = np.pad(image[0, 0].numpy(), 4, mode=mode)
    for crop, (y, x) in zip(crops[:300, 0].numpy(), found[:300].tolist(), strict=True):
        np.testing.assert_array_equal(crop, padded[y : y + 14, x : x + 16])


def test_reflection_is_twice_as_wide_on_tiny_imagenet() -> None:
    ramp = torch.arange(64, dtype=torch.uint8).expand(1, 3, 64, 64)
    crops = make_augmentation(["crop-reflect"], (3, 64, 64)).augment_raw(ramp.expand(900, 3, 64, 64), keys_of(900))
    assert set((crops[:, 0, 32, 32].int() - 32).tolist()) == set(range(-8, 9))


def test_half_of_the_images_are_mirrored() -> None:
    images = images_of(2000, (1, 2, 6))
    flipped = make_augmentation(["flip"], (1, 2, 6)).augment_raw(images, keys_of(2000))
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    untouched = (flipped == images).flatten(1).all(1)
    assert (mirrored | untouched).all()
    assert 0.45 < mirrored.float().mean() < 0.55


def test_flip_and_crop_are_drawn_independently() -> None:
    ramp = torch.arange(16, dtype=torch.uint8).expand(4000, 1, 16, 16)
    keys = keys_of(4000)
    flipped = make_augmentation(["flip"], (1, 16, 16)).augment_raw(ramp, keys)[:, 0, 0, 0] > 0
    column = make_augmentation(["crop"], (1, 16, 16)).augment_raw(ramp, keys)[:, 0, 8, 8].float()
    correlation = torch.corrcoef(torch.stack([flipped.float(), column]))[0, 1]
    assert abs(correlation) < 0.06


def test_cutout_erases_a_16_square_clipped_at_the_border() -> None:
    count = 4000
    augmentation = make_augmentation(["cutout"], CIFAR)
    images = torch.ones(count, *CIFAR)
    assert torch.equal(augmentation.augment_raw(images_of(2), keys_of(2)), images_of(2))
    erased = augmentation.augment_normalised(images, keys_of(count)) == 0
    assert (erased == erased[:, :1]).all()
    rows, columns = erased[:, 0].any(2), erased[:, 0].any(1)
    assert torch.equal(erased[:, 0], rows.unsqueeze(2) & columns.unsqueeze(1))
    # A centre p covers [p - 8, p + 8): 8 to 16 of 32 positions.
    lengths = [min(p + 8, 32) - max(p - 8, 0) for p in range(32)]
    assert set(rows.sum(1).tolist()) == set(columns.sum(1).tolist()) == set(lengths)
    assert rows.sum(1).float().mean().item() == pytest.approx(np.mean(lengths), rel=0.02)
    assert torch.equal(augmentation.augment_normalised(images * 0 + 5, keys_of(count)) == 0, erased)


def test_autoaugment_follows_its_policy() -> None:
    count = 50_000
    (first, strength), (second, _) = AutoAugment(first_draw=5).choices(keys_of(count))
    for position, chosen in ((0, first), (1, second)):
        shares = torch.bincount(chosen, minlength=15).double() / count
        expected = torch.zeros(15, dtype=torch.float64)
        for pair in POLICY:
            operation, probability, _ = pair[position]
            expected[operation] += probability / 25
        expected[ops.IDENTITY] = 1 - expected.sum()
        assert (shares - expected).abs().max() < 0.01
    rotations = strength[first == ops.ROTATE]
    assert rotations.min() >= -18  # bin 2 of 10 between -30 and 30 degrees
    assert rotations.max() <= -12
    assert rotations.max() - rotations.min() > 5.8


def test_autoaugment_has_the_25_sub_policies() -> None:
    assert len(POLICY) == 25
    assert sum(probability for pair in POLICY for _, probability, _ in pair) == pytest.approx(26.5)


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (["crop", "flop"], CIFAR, "unknown augmentation 'flop'; did you mean 'flip'"),
        (["flip"], (100,), r"'flip'.*\(100,\).*expected images"),
        (["cutout"], (1, 8, 8), r"'cutout'.*\(1, 8, 8\).*at least 17×17"),
        (["crop-reflect"], (1, 4, 4), "at least 5×5"),
        (["autoaugment"], (4, 32, 32), "expected 1 or 3 channels"),
        (["flip", "flip"], CIFAR, "each at most once"),
        (["crop", "crop-reflect"], CIFAR, "at most one crop"),
    ],
)
def test_mistakes_are_one_line(names: list[str], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_augmentation(names, shape)
