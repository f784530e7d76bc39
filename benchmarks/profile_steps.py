"""Show which kernels and calls take the time of one local step of all clients, or of one whole round.

    python benchmarks/profile_steps.py resnet18 --device cuda
    python benchmarks/profile_steps.py dnn --device cuda --rounds

The work is that of `fedskew bench`: 10 clients, FedAvg, in bf16 on a GPU.
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from fedskew.lab.benchmark.cases import Case
from fedskew.lab.benchmark.engines import FedskewEngine
from fedskew.lab.benchmark.plan import SCALING_CLIENTS, default_plan

_WARM_UPS, _CALLS = 5, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", action="store_true", help="whole rounds instead of local steps")
    parser.add_argument("--kernels", type=int, default=25, help="lines of the table")
    flags = parser.parse_args()
    plan = default_plan(flags.device)
    case = Case(
        flags.model,
        SCALING_CLIENTS,
        plan.workload,
        flags.device,
        precision=plan.precisions[0],
        augmented=flags.rounds,
    )
    engine = FedskewEngine(case, "stacked")
    call = engine.round if flags.rounds else engine.bare_steps()[0]
    on_gpu = flags.device.startswith("cuda")
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(_WARM_UPS):
        call()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
        for _ in range(_CALLS):
            call()
        synchronize()
    engine.close()
    for side in ("cuda", "cpu") if on_gpu else ("cpu",):  # a host that is busier than the device bounds small models
        print(f"{_CALLS} {'rounds' if flags.rounds else 'steps'} of {flags.model}, by time on the {side}:")
        order = f"self_{side}_time_total"
        print(profiled.key_averages().table(sort_by=order, row_limit=flags.kernels, max_name_column_width=80))


if __name__ == "__main__":
    main()
