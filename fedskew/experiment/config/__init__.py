"""The configuration of a run: its keys, their checks, and YAML files."""

from fedskew.experiment.config.documentation import document_config
from fedskew.experiment.config.keys import (
    KEYS,
    Config,
    PartitionConfig,
    changed_settings,
    config_hash,
    differing_keys,
    load_yaml,
    parse_assignments,
    parse_method,
    run_folder,
    run_name,
    with_overrides,
    with_values,
)

__all__ = [
    "KEYS",
    "Config",
    "PartitionConfig",
    "changed_settings",
    "config_hash",
    "differing_keys",
    "load_yaml",
    "parse_assignments",
    "parse_method",
    "run_folder",
    "run_name",
    "with_overrides",
    "with_values",
]

document_config()
