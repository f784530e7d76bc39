"""Local optimisers: what torch.optim computes, on every engine, from fresh state in each round."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from method_cases import only
from parallel_engines import pooled, spread
from torch import Tensor
from toy_runs import distance, finished, image_federation, linear, norm_and_dropout, server, trained

from fedskew.data import Dirichlet, federation
from fedskew.engine import PlainEngine, StackedEngine
from fedskew.engine.optimisers import OPTIMISERS, STEPS
from fedskew.errors import UserError
from fedskew.experiment.config import Config, config_hash, with_values
from fedskew.experiment.preparation import prepare
from fedskew.experiment.run import run
from fedskew.methods import METHODS, make_method
from fedskew.methods.parts import Trained

LR, MOMENTUM, DECAY = 0.03, 0.8, 0.02

TORCH: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, LR, momentum=MOMENTUM, weight_decay=DECAY),
    "nesterov": lambda p: torch.optim.SGD(p, LR, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, LR, betas=(MOMENTUM, 0.999), weight_decay=DECAY),
    "adamw": lambda p: torch.optim.AdamW(p, LR, betas=(MOMENTUM, 0.999), weight_decay=DECAY),
}
EACH = pytest.mark.parametrize("name", OPTIMISERS)


def gradients(steps: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(steps, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_torch(name: str, start: Tensor, grads: Tensor) -> Tensor:
    param = start.clone().requires_grad_()
    optimiser = TORCH[name]([param])
    for grad in grads:
        param.grad = grad.clone()
        optimiser.step()
    return param.detach()


def test_every_optimiser_is_compared_with_torch() -> None:
    assert TORCH.keys() == OPTIMISERS.keys()


@EACH
def test_steps_are_those_of_torch(name: str) -> None:
    optimiser, start, grads = OPTIMISERS[name](MOMENTUM, DECAY), torch.ones(3, 4).double(), gradients(7, (3, 4))
    params = [start.clone()]
    state = optimiser.new_state(params)
    for grad in grads:
        optimiser.step(params, [grad.clone()], state, LR)
    torch.testing.assert_close(params[0], by_torch(name, start, grads), rtol=0, atol=1e-12)


@EACH
@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_s_form_of_the_step_is_the_same(name: str, use_kernel: bool, dtype: torch.dtype) -> None:
    """There the learning rate is a tensor, and clients of one stack are at different steps."""
    optimiser, grads = OPTIMISERS[name](MOMENTUM, DECAY), gradients(6, (2, 5))
    stack = [torch.ones(2, 5, dtype=dtype)]
    state = {kind: [torch.zeros(2, 5, dtype=dtype)] for kind in optimiser.shaped_state}
    state[STEPS] = [torch.zeros(2, dtype=torch.float64)]
    for step, grad in enumerate(grads):
        if step == 2:  # another client enters the second slot
            stack[0][1] = 1
            for tensors in state.values():
                tensors[0][1] = 0
        optimiser.step(stack, [grad.to(dtype)], state, torch.tensor(LR, dtype=dtype), use_kernel)
    ones = torch.ones(5, dtype=torch.float64)
    expected = torch.stack([by_torch(name, ones, grads[:, 0]), by_torch(name, ones, grads[2:, 1])])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(stack[0].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "method"),
    only([("sgd", "fedsam"), ("adam", "fedsam"), ("nesterov", "fedvls"), ("adamw", "fedvls")],
         itertools.product(OPTIMISERS, ["fedvls", "fedsam"])),
)  # fmt: skip
def test_the_engines_agree(name: str, method: str) -> None:
    settings = {"optimizer": name, "lr": 0.01}
    plain = trained(image_federation(), method, norm_and_dropout(), **settings)[0]
    stacked = trained(image_federation(), method, norm_and_dropout(), engine="stacked", **settings)[0]
    assert distance(plain, stacked) < 1e-6
    this = server(image_federation(), method, norm_and_dropout(), **settings)
    spread(this, norm_and_dropout(), StackedEngine)
    assert distance(plain, finished(this)[0]) < 1e-6


def test_each_optimiser_goes_its_own_way() -> None:
    states = [trained(image_federation(), "fedavg", linear(), optimizer=name)[0] for name in OPTIMISERS]
    assert all(distance(one, other) > 1e-4 for place, one in enumerate(states) for other in states[:place])


@EACH
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch with a GPU cannot take gradients in a forked process")
def test_worker_processes_are_told_which(name: str) -> None:
    settings = {"optimizer": name, "lr": 0.01, "rounds": 2}
    this = server(image_federation(), "fedavg", norm_and_dropout(), **settings)
    pooled(this, PlainEngine)
    assert distance(trained(image_federation(), "fedavg", norm_and_dropout(), **settings)[0], finished(this)[0]) == 0


@EACH
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("compile_steps", ["never", "always"])
@pytest.mark.parametrize(
    ("method", "precision", "tolerance"), [("fedvls", "float64", 1e-6), ("fedavg", "float32", 1e-3)]
)
def test_the_engines_agree_on_a_gpu(
    name: str, compile_steps: str, method: str, precision: str, tolerance: float
) -> None:
    """FedVLS has gradients that are zero but for rounding. In float32 AdamW makes whole steps of them."""
    settings = {"optimizer": name, "lr": 0.01, "precision": precision}
    plain = trained(image_federation(), method, linear(), **settings)[0]
    on_gpu = {"engine": "stacked", "device": "cuda", "compile": compile_steps}
    assert distance(plain, trained(image_federation(), method, linear(), **on_gpu, **settings)[0]) < tolerance


# -- what goes with which -----------------------------------------------------------------------------------


def test_methods_that_count_steps_of_sgd_refuse_another_optimiser() -> None:
    fed = federation("digits", Dirichlet(clients=3), seed=0)
    for method in METHODS:
        needs_sgd = any(member.needs_sgd for part in make_method(method).parts for member in part.members)
        assert needs_sgd == (method in ("scaffold", "fednova", "mofedsam", "fedcm", "fedgf")), method
        config = with_values(Config(), {"method": method, "optimizer": "adam", "model": "resnet8"})
        if make_method(method).server.needs_server_data:
            config = with_values(config, {"server_data": 0.1})
        if needs_sgd:
            expected = f"method '{method}' requires local SGD, but optimizer is 'adam'; expected sgd or nes"
            with pytest.raises(UserError, match=expected):
                prepare(config, fed)
        else:
            prepare(config, fed)
        prepare(with_values(config, {"optimizer": "nesterov"}), fed)


def test_a_part_of_a_user_s_that_counts_steps_is_told() -> None:
    with pytest.raises(UserError, match=r"effective_steps\(\) needs SGD, not 'adam'"):
        Trained({}, torch.tensor(3.0), LR, MOMENTUM, optimizer="adam").effective_steps()


@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_effective_steps_are_the_way_along_a_constant_gradient(name: str) -> None:
    optimiser, params = OPTIMISERS[name](MOMENTUM, 0.0), [torch.zeros((), dtype=torch.float64)]
    state = optimiser.new_state(params)
    for steps in range(1, 6):
        optimiser.step(params, [torch.ones((), dtype=torch.float64)], state, LR)
        told = Trained({}, torch.tensor(float(steps), dtype=torch.float64), LR, MOMENTUM, optimizer=name)
        assert float(-params[0] / LR) == pytest.approx(float(told.effective_steps()), rel=1e-12)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(UserError, match=r"momentum is 0.0; expected a number above 0 for optimizer nesterov"):
        Config(optimizer="nesterov", momentum=0.0)
    with pytest.raises(UserError, match=r"optimizer is 'adm'; expected one of .*did you mean 'adam'"):
        Config(optimizer="adm")


def test_runs_from_before_the_key_keep_their_name() -> None:
    assert config_hash(Config(precision="float32")) == "8264c10559ee"  # the default then
    assert config_hash(Config(optimizer="adam")) != config_hash(Config())


def test_a_run_records_its_optimiser_and_learns() -> None:
    fed = federation("digits", Dirichlet(beta=0.3, clients=4), seed=0)
    result = run(fed, "fedavg", rounds=3, local_epochs=2, optimizer="adam", lr=0.003)
    assert result.config.optimizer == "adam"
    assert result.accuracy > 0.5
