"""Ways to run a step in static memory: as a CUDA graph, and compiled.

Static memory is a set of tensors that stay at the same addresses, so a step can be repeated on their new values.
On a GPU, a small network's step takes about a hundred launches of a few microseconds each. A graph launches all of them
at once. Compiling also fuses neighbouring operations into one pass over memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedskew.engine.data.device import stream_for
from fedskew.engine.kernels.launches import compile_ahead

Memory = dict[str, dict[str, Tensor]]
"""All tensors that a step reads and writes, by kind and name."""

StaticStep = Callable[[Memory], None]
"""A step that reads and writes static memory only."""

_WARM_UPS = 2
"""How many times a step runs before it is captured."""
_ONE_CAPTURE_AT_A_TIME = threading.Lock()


def captured(
    step: StaticStep, memory: Memory, pool: object, purpose: str = "training", *, has_kernels: bool = False
) -> Callable[[], None]:
    """Capture the step as one CUDA graph, and return a function that replays it.

    With `has_kernels`, the Triton kernels that the step launches are first compiled in parallel.

    Graphs with the same pool or the same purpose share temporary memory, so they must not run at the same time. The
    step runs a few times before it is captured, because libraries allocate memory on first use. The caller must reset
    what these runs wrote.
    """
    device = next(iter(memory["params"].values())).device
    with _ONE_CAPTURE_AT_A_TIME, torch.cuda.device(device), torch.no_grad():
        stream = stream_for(f"capturing {purpose}", device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if has_kernels:
                compile_ahead(lambda: step(memory), device)
            for _ in range(_WARM_UPS):
                step(memory)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            step(memory)
    replay: Callable[[], None] = graph.replay
    return replay


def compiled(step: StaticStep, memory: Memory, longest_expression: int | None = None) -> StaticStep:
    """Compile the step, forward and backward, as one program.

    The step is first recorded as tensor operations, so that none of the user's Python code is compiled. A value that
    takes more than `longest_expression` operations is stored in memory, not computed again for each use.
    """
    leaves, structure = tree_flatten(memory)

    def flat(*tensors: Tensor) -> None:
        step(tree_unflatten(tensors, structure))

    with _ONE_CAPTURE_AT_A_TIME, torch.no_grad():  # fx patches torch's modules while it records
        recorded = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    _expect_no_copies_from_the_host(recorded, leaves[0].device)
    options: dict[str, Any] = {} if longest_expression is None else {"realize_opcount_threshold": longest_expression}
    program = torch.compile(recorded, dynamic=False, fullgraph=True, options=options or None)

    def run(memory: Memory) -> None:
        with torch.no_grad():
            program(*tree_flatten(memory)[0])

    return run


def _expect_no_copies_from_the_host(recorded: torch.fx.GraphModule, device: torch.device) -> None:
    """Raise an error if a step on a GPU makes arrays from Python numbers.

    Such arrays are in host memory. A replayed graph would copy from where they were during the capture, although that
    memory may have been freed.
    """
    made = [value for value in vars(recorded).values() if isinstance(value, Tensor)]
    made += [*recorded.buffers(), *recorded.parameters()]
    if device.type != "cpu" and any(t.device.type == "cpu" and t.dim() for t in made):
        raise RuntimeError("it makes tensors from numbers on the host at every step")
