"""Measured speeds of engines, remembered in a small JSON file of the user's cache.

The file is a convenience: one that cannot be read or written is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedskew.data.published.places import cache_folder
from fedskew.engine.contract import RoundWork
from fedskew.engine.model.network import Network
from fedskew.engine.parallel.pool import usable_cores

Rates = dict[str, float]
"""Samples per second by the engine's name."""


class RatesFile:
    """The file in FEDSKEW_CACHE, or else in the user's cache folder."""

    def __init__(self) -> None:
        self.path = Path(os.environ.get("FEDSKEW_CACHE") or cache_folder()) / "engine-rates.json"

    def get(self, key: str) -> Rates | None:
        return self._read().get(key)

    def put(self, key: str, rates: Rates) -> Rates:
        """Remember what was measured; another process may have been faster, then what it measured counts."""
        entries = self._read()
        kept = entries.setdefault(key, rates)
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
            draft.replace(self.path)
        return kept

    def _read(self) -> dict[str, Rates]:
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        entries = content if isinstance(content, dict) else {}
        return {key: rates for key, rates in entries.items() if _are_rates(rates)}


def _are_rates(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in value.values())
    )


def rates_key(network: Network, inputs: Sequence[int], work: RoundWork, engines: Sequence[str]) -> str:
    """What the speeds depend on: model, shape of its inputs, the method's parts, size of the work, machine."""
    state = network.state()
    about: Mapping[str, object] = {
        "engines": list(engines),
        "model": re.sub(r"0x[0-9a-f]+", "", repr(network.module(state))),
        "tensors": {name: [str(p.dtype), *p.shape] for name, p in {**state.params, **state.buffers}.items()},
        "resolution": network.resolution,
        "inputs": list(inputs),
        "method": [f"{type(part).__module__}.{type(part).__qualname__}" for part in work.parts],
        "batch size": work.local.batch_size,
        "clients": len(work.assignments),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "processor": _processor(),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
