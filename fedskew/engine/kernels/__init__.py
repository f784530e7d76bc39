"""GPU kernels for layers and SGD steps of many clients, each with its own weights. Most are Triton programs.

PyTorch's own operations are slow for such layers. cuDNN's grouped convolution is designed for a few large
groups, not for one group per client. A BatchNorm that leaves out the padding of short batches reads its images many
times if it is written as tensor operations. Images have their channels last in memory.

Importing this package needs neither Triton nor a GPU. `supported` returns whether the kernels can run.
"""

from __future__ import annotations

from fedskew.engine.kernels.availability import supported
from fedskew.engine.kernels.batch_norm import Activation, stacked_batch_norm
from fedskew.engine.kernels.convolution import stacked_conv2d
from fedskew.engine.kernels.depthwise import stacked_depthwise_conv2d
from fedskew.engine.kernels.linear import stacked_linear
from fedskew.engine.kernels.max_pool import pools_disjoint_windows, stacked_max_pool
from fedskew.engine.kernels.sgd import can_step, stacked_sgd_step

__all__ = [
    "Activation",
    "can_step",
    "pools_disjoint_windows",
    "stacked_batch_norm",
    "stacked_conv2d",
    "stacked_depthwise_conv2d",
    "stacked_linear",
    "stacked_max_pool",
    "stacked_sgd_step",
    "supported",
]
