# mypy: ignore-errors
"""Division by sizes that are known only when a program runs. It is slow, except by powers of two."""

import triton
import triton.language as tl


@triton.jit
def quotient(number, size, SHIFTS: tl.constexpr):
    """Divide numbers ≥ 0. SHIFTS means that the size is a power of two."""
    return number >> (tl.log2(size.to(tl.float32)) + 0.5).to(tl.int32) if SHIFTS else number // size


@triton.jit
def pixel_place(pixel, height, width, SHIFTS: tl.constexpr):
    """Return sample, row and column of pixels that are numbered across all samples."""
    line = quotient(pixel, width, SHIFTS)
    sample = quotient(line, height, SHIFTS)
    return sample, line - sample * height, pixel - line * width
