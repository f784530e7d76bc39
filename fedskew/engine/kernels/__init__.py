"""Layers of many clients, each with its own weights, as Triton programs in channels-last memory.

cuDNN's grouped convolution, the other way to say a convolution, is several times slower than one model on a batch of
the same total size; BatchNorm over valid rows, as a formula, reads its images a dozen times. Importing this package
needs neither Triton nor a GPU; `supported` says whether it can be used.
"""

from __future__ import annotations

from fedskew.engine.kernels.availability import supported
from fedskew.engine.kernels.batch_norm import stacked_batch_norm
from fedskew.engine.kernels.convolution import stacked_conv2d
from fedskew.engine.kernels.depthwise import stacked_depthwise_conv2d

__all__ = ["stacked_batch_norm", "stacked_conv2d", "stacked_depthwise_conv2d", "supported"]
