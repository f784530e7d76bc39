"""A class without test samples: the server that tests the model says so. At a site, a lacking class is normal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from in_process import case
from test_sites_equal_simulation import settings

from fedskew.data import IID, federation
from fedskew.flower.server_app import run_federation

LINE = "warning: federation: class '2' has no test samples, so no metric says how well it is predicted"


@pytest.mark.parametrize("evaluation", ["server", "sites"])
def test_only_the_server_warns_about_a_class_without_test_samples(
    evaluation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    y = np.repeat([0, 1, 2], [30, 30, 6])
    x = np.random.default_rng(0).normal(size=(len(y), 4)).astype(np.float32)
    tested = y < 2
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x[tested], y_test=y[tested])
    split = federation(str(path), IID(clients=2), seed=0)
    own = {} if evaluation == "server" else {"evaluation": "sites", "site_metrics": "class", "test_data": None}
    here = case(tmp_path, split, path, settings("fedavg", rounds=1), **own)
    run_federation(here.grid, here.context)
    printed = caplog.text
    assert printed.count("no test samples") == (1 if evaluation == "server" else 0)
    assert (LINE in printed) == (evaluation == "server")
