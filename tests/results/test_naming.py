"""Which runs belong to one setting."""

from __future__ import annotations

from fedskew.experiment.config import Config
from fedskew.results.naming import varied_keys


def test_saved_predictions_do_not_make_another_setting() -> None:
    assert varied_keys([Config(), Config(save_predictions=True)]) == []
    assert varied_keys([Config(lr=0.1), Config(lr=0.2, save_predictions=True)]) == ["lr"]
