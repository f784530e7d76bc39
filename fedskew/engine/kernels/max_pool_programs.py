# mypy: ignore-errors
"""The Triton programs of max-pooling with an optional ReLU before it: images [N, h, w, C], results [N, ho, wo, C].

Windows do not overlap. A program processes a block of windows and channels. It applies the ReLU to the maximum, which
gives the same result as a ReLU before it.
"""

import triton
import triton.language as tl


@triton.jit
def largest(best, at, value, here):
    """Return the larger value and its position. As in PyTorch, the first of equal values counts, and NaN is largest."""
    better = (value > best) | (value != value)
    return tl.where(better, value, best), tl.where(better, here, at)


@triton.jit(do_not_specialize=("images", "h", "w", "ho", "wo"))
def forward_program(
    x, y, images, h, w, ho, wo, C: tl.constexpr, SIDE: tl.constexpr, RELU: tl.constexpr,
    WINDOWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute a block of windows of the result."""
    window = tl.program_id(0).to(tl.int64) * WINDOWS + tl.arange(0, WINDOWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image = window // (ho * wo)
    row = window // wo % ho
    column = window % wo
    inside = (image < images)[:, None] & (channel < C)[None, :]
    base = ((image * h + row * SIDE) * w + column * SIDE) * C
    first = x + base[:, None] + channel[None, :]
    best = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    at = tl.zeros((WINDOWS, CHANNELS), dtype=tl.int32)
    for i in tl.static_range(SIDE):
        for j in tl.static_range(SIDE):
            if i + j > 0:
                value = tl.load(first + (i * w + j) * C, mask=inside, other=0.0).to(tl.float32)
                best, at = largest(best, at, value, i * SIDE + j)
    if RELU:
        best = tl.where(best < 0, 0.0, best)
    tl.store(y + window[:, None] * C + channel[None, :], best.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("images", "h", "w", "ho", "wo"))
def gradient_program(
    x, grad, grad_x, images, h, w, ho, wo, C: tl.constexpr, SIDE: tl.constexpr, RELU: tl.constexpr,
    WINDOWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images in a block of windows. Border pixels that belong to no whole window get 0."""
    high = (h + SIDE - 1) // SIDE
    wide = (w + SIDE - 1) // SIDE
    window = tl.program_id(0).to(tl.int64) * WINDOWS + tl.arange(0, WINDOWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image = window // (high * wide)
    row = window // wide % high
    column = window % wide
    inside = (image < images)[:, None] & (channel < C)[None, :]
    whole = inside & ((row < ho) & (column < wo))[:, None]
    base = ((image * h + row * SIDE) * w + column * SIDE) * C
    place = base[:, None] + channel[None, :]
    best = tl.load(x + place, mask=whole, other=0.0).to(tl.float32)
    at = tl.zeros((WINDOWS, CHANNELS), dtype=tl.int32)
    for i in tl.static_range(SIDE):
        for j in tl.static_range(SIDE):
            if i + j > 0:
                value = tl.load(x + place + (i * w + j) * C, mask=whole, other=0.0).to(tl.float32)
                best, at = largest(best, at, value, i * SIDE + j)
    result = ((image * ho + row) * wo + column) * C
    passed = tl.load(grad + result[:, None] + channel[None, :], mask=whole, other=0.0)
    if RELU:
        passed = tl.where(best <= 0, 0.0, passed)
    for i in tl.static_range(SIDE):
        for j in tl.static_range(SIDE):
            covered = inside & ((row * SIDE + i < h) & (column * SIDE + j < w))[:, None]
            mine = tl.where(at == i * SIDE + j, passed, 0.0)
            tl.store(grad_x + place + (i * w + j) * C, mine.to(grad_x.dtype.element_ty), mask=covered)
