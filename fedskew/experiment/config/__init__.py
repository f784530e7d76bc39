"""The configuration of a run: its keys, their checks, and YAML files."""

from fedskew.experiment.config.documentation import document_config
from fedskew.experiment.config.keys import (
    KEYS,
    Config,
    PartitionConfig,
    changed_method_params,
    config_hash,
    differing_keys,
    load_yaml,
    parse_assignments,
    parse_method,
    run_folder,
    run_name,
    with_values,
)

__all__ = [
    "KEYS",
    "Config",
    "PartitionConfig",
    "changed_method_params",
    "config_hash",
    "differing_keys",
    "load_yaml",
    "parse_assignments",
    "parse_method",
    "run_folder",
    "run_name",
    "with_values",
]

# This runs here, after both modules are loaded: `documentation` imports `Config` from `keys`, so `keys` cannot call it.
document_config()
