"""Convolutions of many clients, each with its own weights, as Triton programs in channels-last memory.

cuDNN's grouped convolution, the other way to say this, is several times slower than one model on a batch of the same
total size. Importing this package needs neither Triton nor a GPU; `supported` says whether it can be used.
"""

from __future__ import annotations

from fedskew.engine.kernels.availability import supported
from fedskew.engine.kernels.convolution import stacked_conv2d
from fedskew.engine.kernels.depthwise import stacked_depthwise_conv2d

__all__ = ["stacked_conv2d", "stacked_depthwise_conv2d", "supported"]
