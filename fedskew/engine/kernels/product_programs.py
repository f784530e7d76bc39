# mypy: ignore-errors
"""Matrix products of blocks on tensor cores, which multiply shorter numbers than float32.

A float32 number has 24 significant bits. A sum of two bfloat16 numbers holds 16 of them. The product of two such sums,
without its smallest term, takes three products of bfloat16 and has errors of about 2⁻¹⁷. TF32 has only 11 bits.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Return acc + a·b. PRECISION is `bf16x3` or an `input_precision` of Triton."""
    if PRECISION == "bf16x3":
        a_1 = a.to(tl.bfloat16)
        b_1 = b.to(tl.bfloat16)
        a_2 = (a - a_1.to(tl.float32)).to(tl.bfloat16)
        b_2 = (b - b_1.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(a_2, b_1, acc)
        acc = tl.dot(a_1, b_2, acc)
        acc = tl.dot(a_1, b_1, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
