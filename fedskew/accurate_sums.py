"""The number format of sums and statistics, which need more digits than training."""

from __future__ import annotations

import torch

ACCURATE = {"cpu": torch.float64, "cuda": torch.float64, "meta": torch.float64, "mps": torch.float32}
"""The most accurate number format of each kind of device. Apple's GPUs have no float64."""
