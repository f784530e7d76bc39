# mypy: ignore-errors
"""The Triton programs that rearrange the weights of stacked convolutions [K, O, C, taps], and sum their gradients.

The convolution reads weights [K, O, taps, wide], in any memory order, and writes partial gradients
[splits, K, taps, wide, O]. `wide` is C, or more if the images have added channels of zeros.
"""

import triton
import triton.language as tl


@triton.jit
def pack_program(
    weight, packed, row, to_out, to_tap, to_in, outs, C: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write SIZE weights of one client to `packed`, whose strides are `to_out`, `to_tap` and `to_in`.

    `row` is the stride from one client's weights to the next's in `weight`. Added channels become zero.
    """
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    out = place // (TAPS * WIDE)
    tap = place // WIDE % TAPS
    channel = place % WIDE
    known = out < outs
    value = tl.load(weight + client * row + (out * C + channel) * TAPS + tap, mask=known & (channel < C), other=0.0)
    at = packed + client * outs * TAPS * WIDE + out * to_out + tap * to_tap + channel * to_in
    tl.store(at, value.to(packed.dtype.element_ty), mask=known)


@triton.jit
def gradient_program(
    partial, grad, clients, splits, outs, C: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr
):
    """Sum SIZE gradients of one client over the splits, in order, and write them to `grad`, [K, O, C, taps]."""
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    out = place % outs
    channel = place // outs % WIDE
    tap = place // outs // WIDE
    known = (tap < TAPS) & (channel < C)
    size = TAPS * WIDE * outs
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * clients + client) * size + place, mask=known, other=0.0)
    at = grad + client * outs * C * TAPS + (out * C + channel) * TAPS + tap
    tl.store(at, total.to(grad.dtype.element_ty), mask=known)
