"""JAX: `vmap` over the clients of a round, `scan` over their steps, and one `jit` around the whole round."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from work import CHANNELS, CLASSES, HIDDEN, KERNEL, LEARNING_RATE, MOMENTUM, SHAPE, RoundTimes, Work, read_task

Params = dict[str, Array]
HIGHEST = "highest"
"""JAX's name for true float32 products. Its default on a GPU is TF32."""


def init(key: Array) -> Params:
    """Draw initial weights with the variance that PyTorch uses."""
    first, second = CHANNELS
    side = ((SHAPE[1] - KERNEL + 1) // 2 - KERNEL + 1) // 2
    shapes = {
        "conv1": (first, SHAPE[0], KERNEL, KERNEL),
        "conv2": (second, first, KERNEL, KERNEL),
        "hidden": (second * side * side, HIDDEN),
        "head": (HIDDEN, CLASSES),
    }
    params = {}
    for name, shape in shapes.items():
        convolution = len(shape) == 4
        inputs = shape[1] * KERNEL * KERNEL if convolution else shape[0]
        key, draw = random.split(key)
        params[name] = random.uniform(draw, shape, minval=-1, maxval=1) / inputs**0.5
        params[f"{name}_bias"] = jnp.zeros(shape[0] if convolution else shape[1])
    return params


def logits(params: Params, x: Array) -> Array:
    for name in ("conv1", "conv2"):
        x = lax.conv_general_dilated(x, params[name], (1, 1), "VALID")
        x = jax.nn.relu(x + params[f"{name}_bias"][:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["hidden"] + params["hidden_bias"])
    return x @ params["head"] + params["head_bias"]


def loss(params: Params, x: Array, y: Array, dtype: Any) -> Array:
    compute = jax.tree.map(lambda p: p.astype(dtype), params)
    log_p = jax.nn.log_softmax(logits(compute, x.astype(dtype)).astype(jnp.float32))
    return -jnp.take_along_axis(log_p, y[:, None], axis=1).mean()


def train_client(params: Params, x: Array, y: Array, key: Array, work: Work, dtype: Any) -> Params:
    def step(state: tuple[Params, Params], batch: Array) -> tuple[tuple[Params, Params], None]:
        params, velocity = state
        images = x[batch].astype(jnp.float32) / 127.5 - 1
        gradient = jax.grad(loss)(params, images, y[batch], dtype)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        return (jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity), velocity), None

    orders = jax.vmap(lambda k: random.permutation(k, work.samples))(random.split(key, work.epochs))
    batches = orders.reshape(-1, work.batch_size)
    (trained, _), _ = lax.scan(step, (params, jax.tree.map(jnp.zeros_like, params)), batches)
    return trained


@partial(jax.jit, static_argnames=("work", "dtype"))
def train_round(params: Params, x: Array, y: Array, key: Array, work: Work, dtype: Any) -> Params:
    draw, train = random.split(key)
    chosen = random.permutation(draw, work.clients)[: work.participants]
    train_one = partial(train_client, work=work, dtype=dtype)
    keys = random.split(train, work.participants)
    trained = jax.vmap(train_one, in_axes=(None, 0, 0, 0))(params, x[chosen], y[chosen], keys)
    return jax.tree.map(lambda p: p.mean(axis=0), trained)


def main() -> None:
    task = read_task("JAX vmap")
    times = RoundTimes()
    jax.config.update("jax_platforms", task.device)
    jax.config.update("jax_default_matmul_precision", HIGHEST if task.precision == "float32" else None)
    dtype = jnp.bfloat16 if task.precision == "bf16" else jnp.float32
    params = init(random.key(0))
    x, y = map(jnp.asarray, task.work.data())
    for key in random.split(random.key(1), task.rounds):
        params = jax.block_until_ready(train_round(params, x, y, key, task.work, dtype))
        times.end_round()
    times.print_json("JAX vmap", jax.__version__, sum(p.size for p in jax.tree.leaves(params)))


if __name__ == "__main__":
    main()
