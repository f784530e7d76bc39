"""The configuration of a run: its keys, their checks, YAML."""

from fedskew.experiment.config.keys import (
    KEYS,
    RESUMABLE,
    Config,
    PartitionConfig,
    assigned,
    config_hash,
    differing_keys,
    load_yaml,
    run_name,
    with_overrides,
    with_values,
)

__all__ = [
    "KEYS",
    "RESUMABLE",
    "Config",
    "PartitionConfig",
    "assigned",
    "config_hash",
    "differing_keys",
    "load_yaml",
    "run_name",
    "with_overrides",
    "with_values",
]
