# mypy: ignore-errors
"""The Triton programs of a dense convolution: each computes one block of a client's result.

Memory, all contiguous: images [K, pixels, channels], weights [K, O, taps, C] with taps = KH·KW in row order, gradients
of the weights [splits, K, taps·C, O]. Numbers in capitals are compiled in; the batch size is not.
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
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[PIXELS, CHANNELS] of the result; the reduction runs over taps and input channels, flattened, in DEPTHs."""
    client = tl.program_id(1).to(tl.int64)
    out_blocks: tl.constexpr = (O + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // out_blocks * PIXELS + tl.arange(0, PIXELS)
    out = tl.program_id(0) % out_blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = pixel < samples * HO * WO
    h = pixel // WO % HO * SH - PH
    w = pixel % WO * SW - PW
    base = ((pixel // (HO * WO) * H + h) * W + w) * C
    x += client * samples * (H * W * C)
    weight += client * (O * KH * KW * C)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for step in range((KH * KW * C + DEPTH - 1) // DEPTH):
        k = step * DEPTH + depth
        if C % DEPTH == 0:  # the block lies in one tap
            per_tap: tl.constexpr = C // DEPTH
            i = step // per_tap // KW
            j = step // per_tap % KW
            seen = inside & (h + i >= 0) & (h + i < H) & (w + j >= 0) & (w + j < W)
            offset = (i * W + j) * C + step % per_tap * DEPTH + depth
            a = tl.load(x + base[:, None] + offset[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(weight + out[None, :] * (KH * KW * C) + k[:, None], mask=(out < O)[None, :], other=0.0)
        else:
            i = k // C // KW
            j = k // C % KW
            seen = inside[:, None] & (k < KH * KW * C)[None, :]
            seen = seen & (h[:, None] + i[None, :] >= 0) & (h[:, None] + i[None, :] < H)
            seen = seen & (w[:, None] + j[None, :] >= 0) & (w[:, None] + j[None, :] < W)
            offset = (i * W + j) * C + k % C
            a = tl.load(x + base[:, None] + offset[None, :], mask=seen, other=0.0)
            known = (out < O)[None, :] & (k < KH * KW * C)[:, None]
            b = tl.load(weight + out[None, :] * (KH * KW * C) + k[:, None], mask=known, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + client * O + out, mask=out < O, other=0.0).to(tl.float32)[None, :]
    y += client * samples * (HO * WO * O)
    tl.store(
        y + pixel[:, None] * O + out[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None] & (out < O)[None, :]
    )


@triton.jit
def input_gradient_program(
    grad,
    weight,
    grad_x,
    samples,
    weight_out,
    weight_tap,
    weight_in,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[PIXELS, CHANNELS] of the gradient; the reduction runs over taps and output channels.

    With a stride, an input pixel is reached by some taps only: those of its row and column modulo the stride. The
    pixels of one such phase make a program, so that no tap is computed in vain.
    """
    client = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) // SW
    column = tl.program_id(2) % SW
    HQ: tl.constexpr = (H + SH - 1) // SH
    WQ: tl.constexpr = (W + SW - 1) // SW
    in_blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // in_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % in_blocks * CHANNELS + tl.arange(0, CHANNELS)
    sample = pixel // (HQ * WQ)
    h = pixel // WQ % HQ * SH + row
    w = pixel % WQ * SW + column
    inside = (sample < samples) & (h < H) & (w < W)
    first_i = (row + PH) % SH
    first_j = (column + PW) % SW
    rows = (KH - first_i + SH - 1) // SH
    columns = (KW - first_j + SW - 1) // SW
    ho = (h + PH - first_i) // SH
    wo = (w + PW - first_j) // SW
    base = ((sample * HO + ho) * WO + wo) * O
    grad += client * samples * (HO * WO * O)
    weight += client * (O * KH * KW * C)
    out_blocks: tl.constexpr = (O + DEPTH - 1) // DEPTH
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for step in range(rows * columns * out_blocks):
        tap = step // out_blocks
        out = step % out_blocks * DEPTH + tl.arange(0, DEPTH)
        up = tap // columns
        left = tap % columns
        seen = inside & (ho - up >= 0) & (ho - up < HO) & (wo - left >= 0) & (wo - left < WO)
        offset = (up * WO + left) * -O + out
        place = (first_i + up * SH) * KW + first_j + left * SW
        at = weight + place * weight_tap + out[:, None] * weight_out + channel[None, :] * weight_in
        if O % DEPTH == 0:
            a = tl.load(grad + base[:, None] + offset[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(at, mask=(channel < C)[None, :], other=0.0)
        else:
            a = tl.load(grad + base[:, None] + offset[None, :], mask=seen[:, None] & (out < O)[None, :], other=0.0)
            b = tl.load(at, mask=(out < O)[:, None] & (channel < C)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    grad_x += client * samples * (H * W * C)
    target = ((sample * H + h) * W + w) * C
    tl.store(
        grad_x + target[:, None] + channel[None, :],
        acc.to(grad_x.dtype.element_ty),
        mask=inside[:, None] & (channel < C)[None, :],
    )


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
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[DEPTH of taps·C, CHANNELS of O] of one split's gradient; the reduction runs over the split's pixels."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    out_blocks: tl.constexpr = (O + CHANNELS - 1) // CHANNELS
    k = tl.program_id(0) // out_blocks * DEPTH + tl.arange(0, DEPTH)
    out = tl.program_id(0) % out_blocks * CHANNELS + tl.arange(0, CHANNELS)
    i = k // C // KW
    j = k // C % KW
    offset = (i * W + j) * C + k % C
    pixels = samples * HO * WO
    x += client * samples * (H * W * C)
    grad += client * samples * (HO * WO * O)
    acc = tl.zeros((DEPTH, CHANNELS), dtype=tl.float32)
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, pixels), PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        h = pixel // WO % HO * SH - PH
        w = pixel % WO * SW - PW
        base = ((pixel // (HO * WO) * H + h) * W + w) * C
        seen = (pixel < pixels)[:, None] & (k < KH * KW * C)[None, :]
        seen = seen & (h[:, None] + i[None, :] >= 0) & (h[:, None] + i[None, :] < H)
        seen = seen & (w[:, None] + j[None, :] >= 0) & (w[:, None] + j[None, :] < W)
        a = tl.load(x + base[:, None] + offset[None, :], mask=seen, other=0.0)
        known = (pixel < pixels)[:, None] & (out < O)[None, :]
        b = tl.load(grad + pixel[:, None] * O + out[None, :], mask=known, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    partial += (split * tl.num_programs(1) + client) * (KH * KW * C * O)
    tl.store(partial + k[:, None] * O + out[None, :], acc, mask=(k < KH * KW * C)[:, None] & (out < O)[None, :])
