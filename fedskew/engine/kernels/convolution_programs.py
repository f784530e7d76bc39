# mypy: ignore-errors
"""The Triton programs of a dense convolution. Each computes one block of a client's result.

Sizes are named as in `Geometry`. Images [K, pixels, channels], weights [K, O, taps, C] with taps = KH·KW in row order,
and gradients of the weights [splits, K, taps·C, O] are contiguous. A split is a `chunk` of the pixels. Only the input's
gradient takes each client's weights in any memory order.

Parameters in capitals are compiled in. Sizes are not, because then every layer would need its own compilation. The
`fixed` programs, for narrow layers, are an exception: their loops are short, and compiled sizes make them faster. C is
`groups` times ALIGNED, and O is `out_groups` times OUT_ALIGNED. So the compiler knows numbers that divide C and O, and
can load that many channels with one instruction. `groups` are not the groups of a grouped convolution. SHIFTS means
that all image sizes are powers of two.
"""

from types import FunctionType

import triton
import triton.language as tl

from fedskew.engine.kernels.division_programs import pixel_place
from fedskew.engine.kernels.product_programs import product

_SIZES = ("h", "w", "groups", "ho", "wo", "out_groups")
_NUMBERS = ("samples", "chunk", *_SIZES)


@triton.jit(do_not_specialize=_NUMBERS)
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
    out_groups,
    ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    FEW: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute [PIXELS, CHANNELS] of the result, reduced over flattened taps and input channels in blocks of DEPTH.

    If DEPTH does not divide C, a block may span several taps, and FEW is C. Otherwise, FEW is 0.
    """
    client = tl.program_id(1).to(tl.int64)
    C = FEW if FEW else groups * ALIGNED
    O = out_groups * OUT_ALIGNED  # noqa: E741
    out_blocks = (O + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // out_blocks * PIXELS + tl.arange(0, PIXELS)
    out = tl.program_id(0) % out_blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = pixel < samples * ho * wo
    sample, row, column = pixel_place(pixel, ho, wo, SHIFTS)
    top = row * SH - PH
    left = column * SW - PW
    base = ((sample * h + top) * w + left) * C
    x += client * samples * (h * w * C)
    weight += client * (O * KH * KW * C)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    i = 0
    j = 0
    first = 0
    for step in range((KH * KW * C + DEPTH - 1) // DEPTH):
        k = step * DEPTH + depth
        if FEW:
            tap_i = k // C // KW
            tap_j = k // C % KW
            seen = inside[:, None] & (k < KH * KW * C)[None, :]
            seen = seen & (top[:, None] + tap_i[None, :] >= 0) & (top[:, None] + tap_i[None, :] < h)
            seen = seen & (left[:, None] + tap_j[None, :] >= 0) & (left[:, None] + tap_j[None, :] < w)
            offset = (tap_i * w + tap_j) * C + k % C
            a = tl.load(x + base[:, None] + offset[None, :], mask=seen, other=0.0)
            known = (out < O)[None, :] & (k < KH * KW * C)[:, None]
            b = tl.load(weight + out[None, :] * (KH * KW * C) + k[:, None], mask=known, other=0.0)
        else:  # the block lies inside one tap
            seen = inside & (top + i >= 0) & (top + i < h) & (left + j >= 0) & (left + j < w)
            offset = (i * w + j) * C + first + depth
            a = tl.load(x + base[:, None] + offset[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(weight + out[None, :] * (KH * KW * C) + k[:, None], mask=(out < O)[None, :], other=0.0)
            first += DEPTH
            j = tl.where(first == C, j + 1, j)
            first = tl.where(first == C, 0, first)
            i = tl.where(j == KW, i + 1, i)
            j = tl.where(j == KW, 0, j)
        acc = product(a, b, acc, PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + client * O + out, mask=out < O, other=0.0).to(tl.float32)[None, :]
    y += client * samples * (ho * wo * O)
    tl.store(
        y + pixel[:, None] * O + out[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None] & (out < O)[None, :]
    )


@triton.jit(do_not_specialize=_NUMBERS)
def input_gradient_program(
    grad,
    weight,
    grad_x,
    samples,
    weight_out,
    weight_tap,
    weight_in,
    h,
    w,
    groups,
    ho,
    wo,
    out_groups,
    ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute [PIXELS, CHANNELS] of the gradient, reduced over taps and output channels.

    With a stride, only some taps reach an input pixel. Which ones depends on the pixel's phase: its row and column
    modulo the stride. A program processes the pixels of one phase, and only the taps that reach them. WHOLE means that
    no block of output channels is padded. `weight_out`, `weight_tap` and `weight_in` are the strides of the weights.
    """
    client = tl.program_id(1).to(tl.int64)
    phase_row = tl.program_id(2) // SW
    phase_column = tl.program_id(2) % SW
    C = groups * ALIGNED
    O = out_groups * OUT_ALIGNED  # noqa: E741
    in_blocks = (C + CHANNELS - 1) // CHANNELS
    pixel = tl.program_id(0) // in_blocks * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(0) % in_blocks * CHANNELS + tl.arange(0, CHANNELS)
    phase_rows = (h + SH - 1) // SH
    phase_columns = (w + SW - 1) // SW
    sample = pixel // (phase_rows * phase_columns)
    image_row = pixel // phase_columns % phase_rows * SH + phase_row
    image_column = pixel % phase_columns * SW + phase_column
    inside = (sample < samples) & (image_row < h) & (image_column < w)
    first_i = (phase_row + PH) % SH
    first_j = (phase_column + PW) % SW
    rows = (KH - first_i + SH - 1) // SH
    columns = (KW - first_j + SW - 1) // SW
    out_row = (image_row + PH - first_i) // SH
    out_column = (image_column + PW - first_j) // SW
    base = ((sample * ho + out_row) * wo + out_column) * O
    grad += client * samples * (ho * wo * O)
    weight += client * (O * KH * KW * C)
    out_blocks = (O + DEPTH - 1) // DEPTH
    acc = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for step in range(rows * columns * out_blocks):
        tap = step // out_blocks
        out = step % out_blocks * DEPTH + tl.arange(0, DEPTH)
        tap_row = tap // columns
        tap_column = tap % columns
        seen = inside & (out_row - tap_row >= 0) & (out_row - tap_row < ho)
        seen = seen & (out_column - tap_column >= 0) & (out_column - tap_column < wo)
        offset = (tap_row * wo + tap_column) * -O + out
        tap_place = (first_i + tap_row * SH) * KW + first_j + tap_column * SW
        at = weight + tap_place * weight_tap + out[:, None] * weight_out + channel[None, :] * weight_in
        if WHOLE:
            a = tl.load(grad + base[:, None] + offset[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(at, mask=(channel < C)[None, :], other=0.0)
        else:
            a = tl.load(grad + base[:, None] + offset[None, :], mask=seen[:, None] & (out < O)[None, :], other=0.0)
            b = tl.load(at, mask=(out < O)[:, None] & (channel < C)[None, :], other=0.0)
        acc = product(a, b, acc, PRECISION)
    grad_x += client * samples * (h * w * C)
    target = ((sample * h + image_row) * w + image_column) * C
    tl.store(
        grad_x + target[:, None] + channel[None, :],
        acc.to(grad_x.dtype.element_ty),
        mask=inside[:, None] & (channel < C)[None, :],
    )


@triton.jit(do_not_specialize=_NUMBERS)
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
    out_groups,
    ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
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
    """Compute [DEPTH of taps·C, CHANNELS of O] of one split's gradient, reduced over the split's pixels."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    C = groups * ALIGNED
    O = out_groups * OUT_ALIGNED  # noqa: E741
    out_blocks = (O + CHANNELS - 1) // CHANNELS
    k = tl.program_id(0) // out_blocks * DEPTH + tl.arange(0, DEPTH)
    out = tl.program_id(0) % out_blocks * CHANNELS + tl.arange(0, CHANNELS)
    i = k // C // KW
    j = k // C % KW
    offset = (i * w + j) * C + k % C
    pixels = samples * ho * wo
    x += client * samples * (h * w * C)
    grad += client * samples * (ho * wo * O)
    acc = tl.zeros((DEPTH, CHANNELS), dtype=tl.float32)
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, pixels), PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        sample, row, column = pixel_place(pixel, ho, wo, SHIFTS)
        top = row * SH - PH
        left = column * SW - PW
        base = ((sample * h + top) * w + left) * C
        seen = (pixel < pixels)[:, None] & (k < KH * KW * C)[None, :]
        seen = seen & (top[:, None] + i[None, :] >= 0) & (top[:, None] + i[None, :] < h)
        seen = seen & (left[:, None] + j[None, :] >= 0) & (left[:, None] + j[None, :] < w)
        a = tl.load(x + base[:, None] + offset[None, :], mask=seen, other=0.0)
        known = (pixel < pixels)[:, None] & (out < O)[None, :]
        b = tl.load(grad + pixel[:, None] * O + out[None, :], mask=known, other=0.0)
        acc = product(tl.trans(a), b, acc, PRECISION)
    partial += (split * tl.num_programs(1) + client) * (KH * KW * C * O)
    tl.store(partial + k[:, None] * O + out[None, :], acc, mask=(k < KH * KW * C)[:, None] & (out < O)[None, :])


def _fixed(program):
    """Return the same program with the sizes compiled in."""
    written = program.fn
    function = FunctionType(written.__code__, written.__globals__, written.__name__, written.__defaults__)
    function.__annotations__ = {**written.__annotations__, **dict.fromkeys(_SIZES, tl.constexpr)}
    return triton.jit(function, do_not_specialize=("samples", "chunk"))


fixed_forward_program = _fixed(forward_program)
fixed_input_gradient_program = _fixed(input_gradient_program)
fixed_weight_gradient_program = _fixed(weight_gradient_program)
