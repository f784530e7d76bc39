"""Layers of many clients, each with its own weights, as Triton programs in channels-last memory.

cuDNN's grouped convolution is the other way to say a convolution, but is made for few and large groups; BatchNorm over
valid rows, as a formula, reads its images many times over. Importing this package needs neither Triton nor a
GPU; `supported` says whether it can be used.
"""

from __future__ import annotations

from fedskew.engine.kernels.availability import supported
from fedskew.engine.kernels.batch_norm import Activation, stacked_batch_norm
from fedskew.engine.kernels.convolution import stacked_conv2d
from fedskew.engine.kernels.depthwise import stacked_depthwise_conv2d

__all__ = ["Activation", "stacked_batch_norm", "stacked_conv2d", "stacked_depthwise_conv2d", "supported"]
