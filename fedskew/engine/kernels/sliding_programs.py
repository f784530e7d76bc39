# mypy: ignore-errors
"""The Triton programs of a depthwise convolution of stride 1. Each processes some columns of the images, row by row.

For a window of KH × KW taps, a row of an image is loaded KW times, not KH·KW times. It is used for all rows of the
result that it affects. Memory and sizes are as in `depthwise_programs`. A position is a column of one sample's
result.
"""

import triton
import triton.language as tl

_SIZES = ("samples", "h", "w", "ho", "wo", "groups", "chunk", "flipped")


@triton.jit(do_not_specialize=_SIZES)
def convolution_program(
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
    flipped,
    ALIGNED: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute [PIXELS, CHANNELS] of each row of the result. `flipped` flips the window, for the images' gradient."""
    client = tl.program_id(1).to(tl.int64)
    C = groups * ALIGNED
    channel_blocks = (C + CHANNELS - 1) // CHANNELS
    position = tl.program_id(0) // channel_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % channel_blocks * CHANNELS + tl.arange(0, CHANNELS)
    sample = position // wo
    column = position - sample * wo
    inside = sample < samples
    known = channel < C
    x += client * samples * (h * w * C)
    y += client * samples * (ho * wo * C)
    source = x + ((sample * (h * w) + column - PW) * C)[:, None] + channel[None, :]
    target = y + ((sample * (ho * wo) + column) * C)[:, None] + channel[None, :]
    weight += client * (KH * KW * C) + channel
    window = ()
    for tap in tl.static_range(KH * KW):
        place = tl.where(flipped != 0, KH * KW - 1 - tap, tap)
        window = window + (tl.load(weight + place * C, mask=known, other=0.0).to(tl.float32),)  # noqa: RUF005
    start = tl.zeros((CHANNELS,), dtype=tl.float32)
    if HAS_BIAS:
        start = tl.load(bias + client * C + channel, mask=known, other=0.0).to(tl.float32)
    blank = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32) + start[None, :]
    begun = (blank,)  # the rows of the result that need more rows of the images, oldest first
    for _ in tl.static_range(KH - 2):
        begun = begun + (blank,)  # noqa: RUF005
    for row in range(h + PH):
        line = row + tl.zeros_like(column)  # the row, once per position
        rows = (blank,)  # all rows of the result that this row affects, newest first
        for i in tl.static_range(1, KH):
            rows = rows + (begun[KH - 1 - i],)  # noqa: RUF005
        for j in tl.static_range(KW):
            seen = inside & (column + (j - PW) >= 0) & (column + (j - PW) < w) & (line < h)
            at = source + (row * w + j) * C
            value = tl.load(at, mask=seen[:, None] & known[None, :], other=0.0).to(tl.float32)
            more = ()
            for i in tl.static_range(KH):
                more = more + (rows[i] + value * window[i * KW + j][None, :],)  # noqa: RUF005
            rows = more
        present = inside & (line >= KH - 1 - PH) & (line < ho + KH - 1 - PH)
        at = target + (row + (PH - KH + 1)) * (wo * C)
        tl.store(at, rows[KH - 1].to(y.dtype.element_ty), mask=present[:, None] & known[None, :])
        begun = (rows[KH - 2],)
        for i in tl.static_range(1, KH - 1):
            begun = begun + (rows[KH - 2 - i],)  # noqa: RUF005


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
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute [taps, CHANNELS] of the weights' gradient over one split, a range of positions.

    The latest rows of the result's gradient stay in registers.
    """
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    C = groups * ALIGNED
    known = channel < C
    positions = samples * wo
    x += client * samples * (h * w * C)
    grad += client * samples * (ho * wo * C)
    zero = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    sums = (zero,)
    for _ in tl.static_range(1, KH * KW):
        sums = sums + (zero,)  # noqa: RUF005
    for first in range(split * chunk, tl.minimum(split * chunk + chunk, positions), PIXELS):
        position = first + tl.arange(0, PIXELS)
        inside = position < positions
        sample = position // wo
        column = position - sample * wo
        source = x + ((sample * (h * w) + column - PW) * C)[:, None] + channel[None, :]
        slopes = grad + ((sample * (ho * wo) + column) * C)[:, None] + channel[None, :]
        earlier = (zero,)
        for _ in tl.static_range(KH - 2):
            earlier = earlier + (zero,)  # noqa: RUF005
        for row in range(-PH, h):
            line = row + tl.zeros_like(column)  # the row, once per position
            present = inside & (line < ho - PH)
            at = slopes + (row + PH) * (wo * C)
            newest = tl.load(at, mask=present[:, None] & known[None, :], other=0.0).to(tl.float32)
            recent = (newest,) + earlier  # noqa: RUF005
            updated = sums
            for j in tl.static_range(KW):
                seen = inside & (column + (j - PW) >= 0) & (column + (j - PW) < w) & (line >= 0)
                at = source + (row * w + j) * C
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
