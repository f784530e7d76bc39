# mypy: ignore-errors
"""The Triton programs of a depthwise convolution: each computes one block of a client's result.

Memory, all contiguous: images [K, pixels, C], weights [K, taps, C] with taps = KH·KW in row order, gradients of the
weights [splits, K, taps, C]. Numbers in capitals are compiled in; the batch size is not.
"""

import triton
import triton.language as tl


@triton.jit
def forward_program(
    x,
    weight,
    bias,
    y,
    samples,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
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
    """[PIXELS, CHANNELS] of the result."""
    client = tl.program_id(1).to(tl.int64)
    channel_blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // channel_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = pixel < samples * HO * WO
    known = channel < C
    h = pixel // WO % HO * SH - PH
    w = pixel % WO * SW - PW
    base = ((pixel // (HO * WO) * H + h) * W + w) * C
    x += client * samples * (H * W * C)
    weight += client * (KH * KW * C)
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            seen = inside & (h + i >= 0) & (h + i < H) & (w + j >= 0) & (w + j < W)
            at = x + (base + (i * W + j) * C)[:, None] + channel[None, :]
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            factor = tl.load(weight + (i * KW + j) * C + channel, mask=known, other=0.0).to(tl.float32)
            acc += value * factor[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + client * C + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    y += client * samples * (HO * WO * C)
    tl.store(
        y + (pixel * C)[:, None] + channel[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None] & known[None, :]
    )


@triton.jit
def input_gradient_program(
    grad,
    weight,
    grad_x,
    samples,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """[PIXELS, CHANNELS] of the gradient; taps that a stride leaves out load nothing."""
    client = tl.program_id(1).to(tl.int64)
    channel_blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // channel_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    sample = pixel // (H * W)
    inside = sample < samples
    known = channel < C
    h = pixel // W % H + PH
    w = pixel % W + PW
    grad += client * samples * (HO * WO * C)
    weight += client * (KH * KW * C)
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            ho = (h - i) // SH
            wo = (w - j) // SW
            seen = inside & (h - i >= 0) & (ho < HO) & (w - j >= 0) & (wo < WO)
            if SH > 1:
                seen = seen & ((h - i) % SH == 0)
            if SW > 1:
                seen = seen & ((w - j) % SW == 0)
            at = grad + (((sample * HO + ho) * WO + wo) * C)[:, None] + channel[None, :]
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            factor = tl.load(weight + (i * KW + j) * C + channel, mask=known, other=0.0).to(tl.float32)
            acc += value * factor[None, :]
    grad_x += client * samples * (H * W * C)
    at = grad_x + (pixel * C)[:, None] + channel[None, :]
    tl.store(at, acc.to(grad_x.dtype.element_ty), mask=inside[:, None] & known[None, :])


@triton.jit
def weight_gradient_program(
    x,
    grad,
    partial,
    samples,
    chunk,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """[taps, CHANNELS] of one split's gradient: each tap's sum stays in registers while the split's pixels go by."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    pixels = samples * HO * WO
    x += client * samples * (H * W * C)
    grad += client * samples * (HO * WO * C)
    zero = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    sums = (zero,)
    for _ in tl.static_range(1, KH * KW):
        sums = sums + (zero,)  # noqa: RUF005
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, pixels), PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel < pixels
        h = pixel // WO % HO * SH - PH
        w = pixel % WO * SW - PW
        base = ((pixel // (HO * WO) * H + h) * W + w) * C
        at = grad + (pixel * C)[:, None] + channel[None, :]
        slope = tl.load(at, mask=inside[:, None] & known[None, :], other=0.0).to(tl.float32)
        updated = ()
        for tap in tl.static_range(KH * KW):
            i = tap // KW
            j = tap % KW
            seen = inside & (h + i >= 0) & (h + i < H) & (w + j >= 0) & (w + j < W)
            at = x + (base + (i * W + j) * C)[:, None] + channel[None, :]
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            updated = updated + (sums[tap] + value * slope,)  # noqa: RUF005
        sums = updated
    partial += (split * tl.num_programs(1) + client) * (KH * KW * C)
    for tap in tl.static_range(KH * KW):
        tl.store(partial + tap * C + channel, tl.sum(sums[tap], 0), mask=known)
