"""Which runs belong to one setting."""

from __future__ import annotations

from fedskew.experiment.config import Config, config_hash, with_values
from fedskew.results.naming import setting_label, to_key, varied_keys


def test_saved_predictions_do_not_make_another_setting() -> None:
    assert varied_keys([Config(), Config(save_predictions=True)]) == []
    assert varied_keys([Config(lr=0.1), Config(lr=0.2, save_predictions=True)]) == ["lr"]


def test_the_same_weights_at_another_path_do_not_make_another_setting() -> None:
    here, there = (Config(init=f"{folder}/w.pt", init_sha256="0f" * 32) for folder in ("here", "there"))
    assert varied_keys([here, there]) == []
    assert varied_keys([Config(init="here/w.pt"), Config(init="there/w.pt")]) == ["init"]  # before a run has read them


def test_other_weights_at_the_same_path_make_another_setting_that_names_path_and_digest() -> None:
    first, second = (Config(init="w.pt", init_sha256=digest * 32) for digest in ("0f", "a1"))
    assert varied_keys([first, second, Config()]) == ["init"]
    assert setting_label(first, ["init"]) == "init=w.pt (sha256:0f0f0f0f0f0f)"
    assert setting_label(Config(), ["init"]) == "init=None"


def test_a_whole_number_is_the_same_value_with_and_without_a_decimal_point() -> None:
    whole, decimal = (with_values(Config(), {"partition": "dirichlet", "partition.beta": beta}) for beta in (1, 1.0))
    assert config_hash(whole) == config_hash(decimal)
    assert varied_keys([whole, decimal]) == []
    assert to_key({"a": [1, (2,)]}) == to_key({"a": [1.0, [2.0]]}) != to_key({"a": [1, [2.5]]})
