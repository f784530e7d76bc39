# mypy: ignore-errors
"""The Triton programs of a depthwise convolution. Each computes one block of a client's result.

Sizes are named as in `Geometry`. All memory is contiguous: images [K, pixels, C], weights [K, taps, C] with
taps = KH·KW in row order, and gradients of the weights [splits, K, taps, C]. A split has `chunk` pixels, or fewer at
the end. One program sums the gradient over one split.

Parameters in capitals are compiled in. Sizes are not, because then every layer would need its own compilation. The
number of channels C is passed as `groups` times ALIGNED (`geometry.alignment`). So the compiler knows that ALIGNED
divides C, and one instruction can load ALIGNED values. `groups` are not the groups of the convolution. SHIFTS means
that all image sizes are powers of two.
"""

import triton
import triton.language as tl

from fedskew.engine.kernels.division_programs import pixel_place

_SIZES = ("samples", "h", "w", "ho", "wo", "groups", "chunk")


@triton.jit(do_not_specialize=_SIZES)
def forward_program(
    x,
    weight,
    bias,
    y,
    samples,
    h,
    w,
    groups,
    ho,
    wo,
    ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute [PIXELS, CHANNELS] of the result."""
    client = tl.program_id(1).to(tl.int64)
    C = groups * ALIGNED
    channel_blocks = (C + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // channel_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = pixel < samples * ho * wo
    known = channel < C
    sample, row, column = pixel_place(pixel, ho, wo, SHIFTS)
    top = row * SH - PH
    left = column * SW - PW
    base = ((sample * h + top) * w + left) * C
    x += client * samples * (h * w * C)
    weight += client * (KH * KW * C)
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            seen = inside & (top + i >= 0) & (top + i < h) & (left + j >= 0) & (left + j < w)
            at = x + (base + (i * w + j) * C)[:, None] + channel[None, :]
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            factor = tl.load(weight + (i * KW + j) * C + channel, mask=known, other=0.0).to(tl.float32)
            acc += value * factor[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + client * C + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    y += client * samples * (ho * wo * C)
    tl.store(
        y + (pixel * C)[:, None] + channel[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None] & known[None, :]
    )


@triton.jit(do_not_specialize=_SIZES)
def input_gradient_program(
    grad,
    weight,
    grad_x,
    samples,
    h,
    w,
    groups,
    ho,
    wo,
    ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute [PIXELS, CHANNELS] of the gradient. Taps that a stride skips load nothing."""
    client = tl.program_id(1).to(tl.int64)
    C = groups * ALIGNED
    channel_blocks = (C + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // channel_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    sample, row, column = pixel_place(pixel, h, w, SHIFTS)
    inside = sample < samples
    known = channel < C
    top = row + PH
    left = column + PW
    grad += client * samples * (ho * wo * C)
    weight += client * (KH * KW * C)
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            out_row = (top - i) // SH
            out_column = (left - j) // SW
            seen = inside & (top - i >= 0) & (out_row < ho) & (left - j >= 0) & (out_column < wo)
            if SH > 1:
                seen = seen & ((top - i) % SH == 0)
            if SW > 1:
                seen = seen & ((left - j) % SW == 0)
            at = grad + (((sample * ho + out_row) * wo + out_column) * C)[:, None] + channel[None, :]
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            factor = tl.load(weight + (i * KW + j) * C + channel, mask=known, other=0.0).to(tl.float32)
            acc += value * factor[None, :]
    grad_x += client * samples * (h * w * C)
    at = grad_x + (pixel * C)[:, None] + channel[None, :]
    tl.store(at, acc.to(grad_x.dtype.element_ty), mask=inside[:, None] & known[None, :])


@triton.jit(do_not_specialize=_SIZES)
def weight_gradient_program(
    x,
    grad,
    partial,
    samples,
    chunk,
    h,
    w,
    groups,
    ho,
    wo,
    ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute [taps, CHANNELS] of one split's gradient. Each tap's sum over the pixels stays in registers."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    C = groups * ALIGNED
    known = channel < C
    pixels = samples * ho * wo
    x += client * samples * (h * w * C)
    grad += client * samples * (ho * wo * C)
    zero = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    sums = (zero,)
    for _ in tl.static_range(1, KH * KW):
        sums = sums + (zero,)  # noqa: RUF005
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, pixels), PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel < pixels
        sample, row, column = pixel_place(pixel, ho, wo, SHIFTS)
        top = row * SH - PH
        left = column * SW - PW
        base = ((sample * h + top) * w + left) * C
        at = grad + (pixel * C)[:, None] + channel[None, :]
        slope = tl.load(at, mask=inside[:, None] & known[None, :], other=0.0).to(tl.float32)
        updated = ()
        for tap in tl.static_range(KH * KW):
            i = tap // KW
            j = tap % KW
            seen = inside & (top + i >= 0) & (top + i < h) & (left + j >= 0) & (left + j < w)
            at = x + (base + (i * w + j) * C)[:, None] + channel[None, :]
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            updated = updated + (sums[tap] + value * slope,)  # noqa: RUF005
        sums = updated
    partial += (split * tl.num_programs(1) + client) * (KH * KW * C)
    for tap in tl.static_range(KH * KW):
        tl.store(partial + tap * C + channel, tl.sum(sums[tap], 0), mask=known)
