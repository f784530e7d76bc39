# mypy: ignore-errors
"""The Triton programs of a depthwise convolution of stride 1: each goes down some columns of the images, row by row.

A row is loaded once per column of the window, not once per tap, and serves all the result's rows that it touches.
Memory as in `depthwise_programs`. A position is a column of a sample.
"""

import triton
import triton.language as tl


@triton.jit
def convolution_program(
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
    PH: tl.constexpr,
    PW: tl.constexpr,
    FLIPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """[PIXELS, CHANNELS] of all rows of the result; with the window flipped, this is the gradient of the images."""
    client = tl.program_id(1).to(tl.int64)
    channel_blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    position = tl.program_id(0) // channel_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    sample = position // WO
    column = position % WO
    inside = sample < samples
    known = channel < C
    x += client * samples * (H * W * C)
    y += client * samples * (HO * WO * C)
    source = x + ((sample * (H * W) + column - PW) * C)[:, None] + channel[None, :]
    target = y + ((sample * (HO * WO) + column) * C)[:, None] + channel[None, :]
    weight += client * (KH * KW * C) + channel
    window = ()
    for tap in tl.static_range(KH * KW):
        place = KH * KW - 1 - tap if FLIPPED else tap
        window = window + (tl.load(weight + place * C, mask=known, other=0.0).to(tl.float32),)  # noqa: RUF005
    start = tl.zeros((CHANNELS,), dtype=tl.float32)
    if HAS_BIAS:
        start = tl.load(bias + client * C + channel, mask=known, other=0.0).to(tl.float32)
    blank = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32) + start[None, :]
    begun = (blank,)
    for _ in tl.static_range(KH - 2):
        begun = begun + (blank,)  # noqa: RUF005
    for row in range(H + PH):
        line = row + tl.zeros_like(column)
        rows = (blank,)
        for i in tl.static_range(1, KH):
            rows = rows + (begun[KH - 1 - i],)  # noqa: RUF005
        for j in tl.static_range(KW):
            seen = inside & (column + (j - PW) >= 0) & (column + (j - PW) < W) & (line < H)
            at = source + (row * W + j) * C
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            more = ()
            for i in tl.static_range(KH):
                more = more + (rows[i] + value * window[i * KW + j][None, :],)  # noqa: RUF005
            rows = more
        present = inside & (line >= KH - 1 - PH) & (line < HO + KH - 1 - PH)
        at = target + (row + (PH - KH + 1)) * (WO * C)
        tl.store(at, rows[KH - 1].to(y.dtype.element_ty), mask=present[:, None] & known[None, :])
        begun = (rows[KH - 2],)
        for i in tl.static_range(1, KH - 1):
            begun = begun + (rows[KH - 2 - i],)  # noqa: RUF005


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
    PH: tl.constexpr,
    PW: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """[taps, CHANNELS] of one split's gradient; the last rows of the result's gradient stay in registers."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    positions = samples * WO
    x += client * samples * (H * W * C)
    grad += client * samples * (HO * WO * C)
    zero = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    sums = (zero,)
    for _ in tl.static_range(1, KH * KW):
        sums = sums + (zero,)  # noqa: RUF005
    for first in range(split * chunk, tl.minimum(split * chunk + chunk, positions), PIXELS):
        position = first + tl.arange(0, PIXELS)
        inside = position < positions
        sample = position // WO
        column = position % WO
        source = x + ((sample * (H * W) + column - PW) * C)[:, None] + channel[None, :]
        slopes = grad + ((sample * (HO * WO) + column) * C)[:, None] + channel[None, :]
        earlier = (zero,)
        for _ in tl.static_range(KH - 2):
            earlier = earlier + (zero,)  # noqa: RUF005
        for row in range(-PH, H):
            line = row + tl.zeros_like(column)
            present = inside & (line < HO - PH)
            at = slopes + (row + PH) * (WO * C)
            newest = tl.load(at, mask=present[:, None] & known[None, :], other=0.0).to(tl.float32)
            recent = (newest,) + earlier  # noqa: RUF005
            updated = sums
            for j in tl.static_range(KW):
                seen = inside & (column + (j - PW) >= 0) & (column + (j - PW) < W) & (line >= 0)
                at = source + (row * W + j) * C
                value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
                more = ()
                for tap in tl.static_range(KH * KW):
                    if tap % KW == j:
                        more = more + (updated[tap] + value * recent[tap // KW],)  # noqa: RUF005
                    else:
                        more = more + (updated[tap],)  # noqa: RUF005
                updated = more
            sums = updated
            earlier = (newest,)
            for i in tl.static_range(1, KH - 1):
                earlier = earlier + (recent[i],)  # noqa: RUF005
    partial += (split * tl.num_programs(1) + client) * (KH * KW * C)
    for tap in tl.static_range(KH * KW):
        tl.store(partial + tap * C + channel, tl.sum(sums[tap], 0), mask=known)
