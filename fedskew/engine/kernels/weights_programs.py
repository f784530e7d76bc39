# mypy: ignore-errors
"""The Triton programs that convert weights to another dtype, rearrange weights of convolutions, and sum gradients.

The weights of a stacked convolution are [K, O, C, taps]. The programs of a convolution read them as [K, O, taps, wide]:
contiguous in the forward pass, and in any memory order for the input's gradient. They write partial gradients of the
weights [splits, K, taps, wide, O]. A split is a part of the pixels. `wide` is C, or more if the images have added
channels of zeros. `weight_client` is the stride from one client's weights to the next's.
"""

import triton
import triton.language as tl


@triton.jit
def convert_program(weight, result, weight_client, size, SIZE: tl.constexpr):
    """Convert SIZE weights of one client to the dtype of `result`."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(weight + client * weight_client + at, mask=at < size)
    tl.store(result + client * size + at, value.to(result.dtype.element_ty), mask=at < size)


@triton.jit
def pack_program(
    weight, packed, weight_client, to_out, to_tap, to_in, outs, C: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr,
    OUTS: tl.constexpr, CHANNELS: tl.constexpr, TAP_SLOTS: tl.constexpr,
):  # fmt: skip
    """Write all taps of a block of one client's weights to `packed`, whose strides are `to_out`, `to_tap` and `to_in`.

    The block has OUTS output channels and CHANNELS input channels, so that it is read and written in runs of memory.
    Added channels become zero. TAP_SLOTS is TAPS rounded up to a power of two.
    """
    client = tl.program_id(1).to(tl.int64)
    channel_blocks: tl.constexpr = (WIDE + CHANNELS - 1) // CHANNELS
    out = tl.program_id(0) // channel_blocks * OUTS + tl.arange(0, OUTS)[:, None, None]
    channel = tl.program_id(0) % channel_blocks * CHANNELS + tl.arange(0, CHANNELS)[None, :, None]
    tap = tl.arange(0, TAP_SLOTS)[None, None, :]
    known = (out < outs) & (channel < WIDE) & (tap < TAPS)
    source = weight + client * weight_client + (out * C + channel) * TAPS + tap
    value = tl.load(source, mask=known & (channel < C), other=0.0)
    at = packed + client * outs * TAPS * WIDE + out * to_out + tap * to_tap + channel * to_in
    tl.store(at, value.to(packed.dtype.element_ty), mask=known)


@triton.jit
def gradient_program(
    partial, grad, clients, splits, outs, C: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr,
    PLACES: tl.constexpr, OUTS: tl.constexpr,
):  # fmt: skip
    """Sum a block of one client's gradients over the splits, in order, and write it to `grad`, [K, O, C, taps].

    The block has PLACES positions of the inner axes [C, taps] and OUTS output channels. It is read and written in runs
    of memory.
    """
    client = tl.program_id(1).to(tl.int64)
    place_blocks: tl.constexpr = (C * TAPS + PLACES - 1) // PLACES
    place = tl.program_id(0) % place_blocks * PLACES + tl.arange(0, PLACES)[:, None]
    out = tl.program_id(0) // place_blocks * OUTS + tl.arange(0, OUTS)[None, :]
    known = (place < C * TAPS) & (out < outs)
    size = TAPS * WIDE * outs
    source = partial + (place % TAPS * WIDE + place // TAPS) * outs + out
    total = tl.zeros((PLACES, OUTS), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(source + (split * clients + client) * size, mask=known, other=0.0)
    tl.store(grad + (client * outs + out) * (C * TAPS) + place, total.to(grad.dtype.element_ty), mask=known)
