"""How clients' models become the next global model."""

from __future__ import annotations

import numpy as np
import pytest
from toy_runs import advance, image_federation, norm_and_dropout, plan_round, server


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_the_global_model_is_the_weighted_mean_of_the_clients_own(average: str) -> None:
    federation = image_federation()
    this = server(federation, "fedavg", norm_and_dropout(), average=average, rounds=1)
    state = this.start()
    result = this.engine.train(plan_round(this, state).work)
    after, _ = advance(this, state)
    weights = federation.sizes / federation.sizes.sum() if average == "samples" else np.full(5, 0.2)
    for kind in ("params", "buffers"):
        for name, tensor in getattr(after.model, kind).items():
            stacked = getattr(result.trained, kind)[name]
            mean = np.tensordot(weights, stacked.double().numpy(), axes=1)
            if tensor.is_floating_point():
                np.testing.assert_allclose(tensor.numpy(), mean, rtol=1e-12, atol=1e-14)
            else:
                assert abs(int(tensor) - mean) <= 1
