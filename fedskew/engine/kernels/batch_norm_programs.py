# mypy: ignore-errors
"""The Triton programs of BatchNorm. Each processes one block of a client's channels for one split of its rows.

A row is a pixel of a sample. Images [K, rows, C], partial results [splits, K, 2, C], counts [splits, K] and statistics
[K, C] are contiguous. Weight and bias [K, C] may have any stride between clients: `weight_client` and `bias_client`.
`valid` [K, samples] is 0 for padding. A row is valid if its
sample is not padding.

Both the forward and the backward pass read the images twice, and split them the same way both times. The second time,
each program first combines the results of all splits for its channels, which saves a launch. It then reads the rows in
reverse order, because the last rows of the first time are still in the cache.

Parameters in capitals are compiled in. Sizes are not, because then every layer would need its own compilation. C is
passed as `groups` times ALIGNED (`geometry.alignment`). So the compiler knows that ALIGNED divides C, and one
instruction can load ALIGNED values. Channels at or after C are not `known`. A sample has `pixels` rows, and SHIFTS
means that this number is a power of two. A split has `chunk` rows, or fewer at the end. `spread` is a sum of squared
deviations from a mean.

Triton would compile again for sizes that are 1 or multiples of 16, and for weights that are not aligned to 16 bytes.
`do_not_specialize` and `do_not_specialize_on_alignment` prevent this.
"""

import triton
import triton.language as tl

from fedskew.engine.kernels.division_programs import quotient

_NUMBERS = ("samples", "pixels", "groups", "chunk", "splits", "weight_client", "bias_client")
_UNALIGNED = ("weight", "bias")


@triton.jit
def _counted(valid, row, rows, pixels, SHIFTS: tl.constexpr, HAS_VALID: tl.constexpr):
    """Return the mask of the rows that exist and are valid."""
    counted = row < rows
    if HAS_VALID:
        counted = counted & (tl.load(valid + quotient(row, pixels, SHIFTS), mask=counted, other=0) != 0)
    return counted


@triton.jit
def _per_channel(values, channel, known, EXISTS: tl.constexpr, OTHERWISE: tl.constexpr):
    """Load the values of these channels, or return OTHERWISE for each if the tensor does not exist."""
    found = tl.full(channel.shape, OTHERWISE, dtype=tl.float32)
    if EXISTS:
        found = tl.load(values + channel, mask=known, other=OTHERWISE).to(tl.float32)
    return found


@triton.jit
def _all_statistics(partial, counts, splits, client, channel, known, C):
    """Combine each split's count, mean and spread into the mean and variance (Chan et al.)."""
    clients = tl.num_programs(1)
    count = 0.0
    mean = tl.zeros(channel.shape, dtype=tl.float32)
    spread = tl.zeros(channel.shape, dtype=tl.float32)
    for first in range(0, splits, 16):  # a block of 16 splits at a time
        split = first + tl.arange(0, 16)
        at = partial + ((split * clients + client) * (2 * C))[:, None] + channel[None, :]
        mask = (split < splits)[:, None] & known[None, :]
        split_count = tl.load(counts + split * clients + client, mask=split < splits, other=0.0)
        split_mean = tl.load(at, mask=mask, other=0.0)
        block_count = tl.sum(split_count, 0)
        block_mean = tl.sum(split_mean * split_count[:, None], 0) / tl.maximum(block_count, 1.0)
        deviation = split_mean - block_mean[None, :]
        split_spread = tl.load(at + C, mask=mask, other=0.0)
        block_spread = tl.sum(split_spread + deviation * deviation * split_count[:, None], 0)
        total = tl.maximum(count + block_count, 1.0)
        change = block_mean - mean
        spread += block_spread + change * change * (count * block_count / total)
        mean += change * (block_count / total)
        count += block_count
    return mean, spread / tl.maximum(count, 1.0)


@triton.jit
def _all_sums(partial, splits, client, channel, known, C):
    """Add up both sums of `gradient_sums_program` over all splits."""
    clients = tl.num_programs(1)
    grad_sum = tl.zeros(channel.shape, dtype=tl.float32)
    product_sum = tl.zeros(channel.shape, dtype=tl.float32)
    for first in range(0, splits, 16):
        split = first + tl.arange(0, 16)
        at = partial + ((split * clients + client) * (2 * C))[:, None] + channel[None, :]
        mask = (split < splits)[:, None] & known[None, :]
        grad_sum += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
        product_sum += tl.sum(tl.load(at + C, mask=mask, other=0.0), 0)
    return grad_sum, product_sum


@triton.jit
def _count(valid, samples, pixels, HAS_VALID: tl.constexpr):
    """Return the number of the client's valid rows, or 1 if there are none."""
    found = samples
    if HAS_VALID:
        found = samples * 0
        for first in range(0, samples, 128):
            sample = first + tl.arange(0, 128)
            found += tl.sum((tl.load(valid + sample, mask=sample < samples, other=0) != 0).to(tl.int32), 0)
    return tl.maximum(found * pixels, 1).to(tl.float32)


@triton.jit
def _slope(grad, normed, scale, bias, ACTIVATION: tl.constexpr):
    """Return the gradient before the activation. It is zero for values at or outside the activation's bounds."""
    before = normed * scale[None, :] + bias[None, :]
    if ACTIVATION == "relu":
        grad = tl.where(before <= 0.0, 0.0, grad)
    if ACTIVATION == "relu6":
        grad = tl.where((before <= 0.0) | (before >= 6.0), 0.0, grad)
    return grad


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_UNALIGNED)
def statistics_program(
    x,
    valid,
    partial,
    counts,
    samples,
    pixels,
    groups,
    chunk,
    ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute count, mean and spread by Welford's recurrence, which is accurate for values far from zero."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    C = groups * ALIGNED
    known = channel < C
    rows = samples * pixels
    x += client * rows * C
    valid += client * samples
    count = tl.zeros((ROWS,), dtype=tl.float32)
    mean = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    spread = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        counted = _counted(valid, row, rows, pixels, SHIFTS, HAS_VALID)
        at = x + (row * C)[:, None] + channel[None, :]
        value = tl.load(at, mask=counted[:, None] & known[None, :], other=0.0).to(tl.float32)
        weight = counted.to(tl.float32)
        count += weight
        share = weight / tl.maximum(count, 1.0)
        change = value - mean
        mean += change * share[:, None]
        spread += change * change * (weight - share)[:, None]
    split_count = tl.sum(count, 0)
    split_mean = tl.sum(mean * count[:, None], 0) / tl.maximum(split_count, 1.0)
    deviation = mean - split_mean[None, :]
    place = split * tl.num_programs(1) + client
    tl.store(counts + place, split_count, mask=tl.program_id(0) == 0)
    partial += place * (2 * C) + channel
    tl.store(partial, split_mean, mask=known)
    tl.store(partial + C, tl.sum(spread + deviation * deviation * count[:, None], 0), mask=known)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_UNALIGNED)
def normalisation_program(
    x,
    weight,
    bias,
    partial,
    counts,
    y,
    batch_mean,
    batch_var,
    samples,
    pixels,
    groups,
    chunk,
    splits,
    weight_client,
    bias_client,
    eps,
    low,
    high,
    ALIGNED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Normalise and activate the images. The programs of the first split store the statistics."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    C = groups * ALIGNED
    known = channel < C
    rows = samples * pixels
    mean, var = _all_statistics(partial, counts, splits, client, channel, known, C)
    if split == 0:
        tl.store(batch_mean + client * C + channel, mean, mask=known)
        tl.store(batch_var + client * C + channel, var, mask=known)
    factor = _per_channel(weight + client * weight_client, channel, known, HAS_WEIGHT, 1.0) / tl.sqrt(var + eps)
    shift = _per_channel(bias + client * bias_client, channel, known, HAS_BIAS, 0.0)
    x += client * rows * C
    y += client * rows * C
    length = tl.minimum(chunk, rows - split * chunk)
    end = split * chunk + (length + ROWS - 1) // ROWS * ROWS
    for back in range(0, length, ROWS):
        row = end - ROWS - back + tl.arange(0, ROWS)
        offset = (row * C)[:, None] + channel[None, :]
        mask = (row < rows)[:, None] & known[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * factor[None, :] + shift[None, :]
        value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
        value = tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + offset, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_UNALIGNED)
def gradient_sums_program(
    grad,
    x,
    weight,
    bias,
    valid,
    batch_mean,
    batch_var,
    partial,
    samples,
    pixels,
    groups,
    chunk,
    weight_client,
    bias_client,
    eps,
    ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sum the gradient, and its product with the normalised images, over the valid rows."""
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    C = groups * ALIGNED
    known = channel < C
    rows = samples * pixels
    mean = tl.load(batch_mean + client * C + channel, mask=known, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.load(batch_var + client * C + channel, mask=known, other=0.0) + eps)
    scale = _per_channel(weight + client * weight_client, channel, known, HAS_WEIGHT, 1.0)
    shift = _per_channel(bias + client * bias_client, channel, known, HAS_BIAS, 0.0)
    grad += client * rows * C
    x += client * rows * C
    valid += client * samples
    grad_sum = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    product_sum = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        counted = _counted(valid, row, rows, pixels, SHIFTS, HAS_VALID)
        offset = (row * C)[:, None] + channel[None, :]
        mask = counted[:, None] & known[None, :]
        normed = (tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        slope = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        slope = _slope(slope, normed, scale, shift, ACTIVATION)
        grad_sum += slope
        product_sum += slope * normed
    partial += (split * tl.num_programs(1) + client) * (2 * C) + channel
    tl.store(partial, tl.sum(grad_sum, 0), mask=known)
    tl.store(partial + C, tl.sum(product_sum, 0), mask=known)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_UNALIGNED)
def input_gradient_program(
    grad,
    x,
    weight,
    bias,
    valid,
    batch_mean,
    batch_var,
    partial,
    grad_x,
    grad_weight,
    grad_bias,
    samples,
    pixels,
    groups,
    chunk,
    splits,
    weight_client,
    bias_client,
    eps,
    ALIGNED: tl.constexpr,
    SHIFTS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute the gradient of the images. The programs of the first split store the gradients of weight and bias.

    Let n be the normalised images, and s the gradient with respect to n·weight + bias. Then the gradient of a valid row
    is (s − mean(s) − n·mean(s·n))·weight/√(var + eps), where the means are over the valid rows. Other rows have the
    gradient s·weight/√(var + eps).
    """
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    C = groups * ALIGNED
    known = channel < C
    rows = samples * pixels
    valid += client * samples
    grad_sum, product_sum = _all_sums(partial, splits, client, channel, known, C)
    if split == 0:
        tl.store(grad_bias + client * C + channel, grad_sum, mask=known)
        tl.store(grad_weight + client * C + channel, product_sum, mask=known)
    count = _count(valid, samples, pixels, HAS_VALID)
    grad_mean = grad_sum / count
    product_mean = product_sum / count
    mean = tl.load(batch_mean + client * C + channel, mask=known, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.load(batch_var + client * C + channel, mask=known, other=0.0) + eps)
    scale = _per_channel(weight + client * weight_client, channel, known, HAS_WEIGHT, 1.0)
    shift = _per_channel(bias + client * bias_client, channel, known, HAS_BIAS, 0.0)
    grad += client * rows * C
    x += client * rows * C
    grad_x += client * rows * C
    length = tl.minimum(chunk, rows - split * chunk)
    end = split * chunk + (length + ROWS - 1) // ROWS * ROWS
    for back in range(0, length, ROWS):
        row = end - ROWS - back + tl.arange(0, ROWS)
        offset = (row * C)[:, None] + channel[None, :]
        mask = (row < rows)[:, None] & known[None, :]
        normed = (tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        slope = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        slope = _slope(slope, normed, scale, shift, ACTIVATION)
        common = grad_mean[None, :] + normed * product_mean[None, :]
        if HAS_VALID:
            counted = _counted(valid, row, rows, pixels, SHIFTS, HAS_VALID)
            common = tl.where(counted[:, None], common, 0.0)
        value = (slope - common) * (scale * inverse)[None, :]
        tl.store(grad_x + offset, value.to(grad_x.dtype.element_ty), mask=mask)
