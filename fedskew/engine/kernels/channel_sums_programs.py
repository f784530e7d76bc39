# mypy: ignore-errors
"""The Triton program that sums the images of K clients, [K, rows, C], to [splits, K, C].

A row is a pixel of a sample. A split has `chunk` rows, or fewer at the end. Channels at or after C are not `known`.
"""

import triton
import triton.language as tl


@triton.jit
def sums_program(images, partial, rows, chunk, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sum one block of channels over one split of the rows."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    images += client * rows * C
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        at = images + (row * C)[:, None] + channel[None, :]
        total += tl.load(at, mask=(row < rows)[:, None] & known[None, :], other=0.0).to(tl.float32)
    partial += (split * tl.num_programs(1) + client) * C
    tl.store(partial + channel, tl.sum(total, 0), mask=known)
