"""How a step over static memory is run: launched operation by operation, captured as a CUDA graph, or compiled first.

On a GPU a small network's step is a hundred launches of a few microseconds each. A graph launches them as one.
Compiled, neighbouring operations become one pass over the memory, besides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedskew.engine.data.transfer import stream_for

Memory = dict[str, dict[str, Tensor]]
"""All tensors that a step reads and writes, by kind and name."""

Step = Callable[[Memory], None]

_WARM_UPS = 2
_ONE_CAPTURE_AT_A_TIME = threading.Lock()


def captured(step: Step, memory: Memory, pool: object, purpose: str = "training") -> Callable[[], None]:
    """Replays the step as one CUDA graph; graphs with the same pool share what memory they need in between, and those
    of one purpose never run at the same time.

    The step is run before: libraries allocate on first use. What it wrote must be written anew.
    """
    device = next(iter(memory["params"].values())).device
    with _ONE_CAPTURE_AT_A_TIME, torch.cuda.device(device), torch.no_grad():
        stream = stream_for(f"capturing {purpose}", device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step(memory)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            step(memory)
    replay: Callable[[], None] = graph.replay
    return replay


def compiled(step: Step, memory: Memory, longest_expression: int | None = None) -> Step:
    """The step, forward and backward, as one program that the compiler sees whole.

    It is recorded as the operations that it comes to, so that nothing of a user's Python code is compiled. After
    `longest_expression` operations a value is kept in memory instead of being computed anew for each of its uses.
    """
    leaves, structure = tree_flatten(memory)

    def flat(*tensors: Tensor) -> None:
        step(tree_unflatten(tensors, structure))

    with _ONE_CAPTURE_AT_A_TIME, torch.no_grad():  # fx changes torch's own modules while it records
        recorded = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    _expect_no_copies_from_the_host(recorded, leaves[0].device)
    options: dict[str, Any] = {} if longest_expression is None else {"realize_opcount_threshold": longest_expression}
    program = torch.compile(recorded, dynamic=False, fullgraph=True, options=options or None)

    def run(memory: Memory) -> None:
        with torch.no_grad():
            program(*tree_flatten(memory)[0])

    return run


def _expect_no_copies_from_the_host(recorded: torch.fx.GraphModule, device: torch.device) -> None:
    """A tensor that the step makes from Python numbers lies on the host; a graph would copy from there what has long
    been overwritten."""
    made = [value for value in vars(recorded).values() if isinstance(value, Tensor)]
    made += [*recorded.buffers(), *recorded.parameters()]
    if device.type != "cpu" and any(t.device.type == "cpu" and t.dim() for t in made):
        raise RuntimeError("it makes tensors from numbers on the host at every step")
