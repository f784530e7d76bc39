"""Append the configuration keys, with their defaults and help, to the docstrings of Python functions."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from fedskew.experiment.config.keys import Config

Function = TypeVar("Function", bound=Callable[..., object])
_SEPARATE = ("data", "data_params", "data_dir", "method", "method_params", "model", "partition")
"""Keys that are not `**settings` of a documented function. The function has other parameters in their place."""


def documents_settings(*excluded: str) -> Callable[[Function], Function]:
    """Append all settings except `excluded`, with their defaults from `Config`, to a function's docstring."""

    def document(function: Function) -> Function:
        lines = [_describe_key(name) for name in setting_names(*excluded)]
        function.__doc__ = f"{inspect.getdoc(function)}\n\nSettings:\n" + "\n".join(lines) + "\n"
        return function

    return document


def document_config() -> None:
    """Append all keys with their defaults to the docstring of `Config`."""
    described = [spec.name for spec in fields(Config) if "help" in spec.metadata]
    text = "\n".join(map(_describe_key, described))
    Config.__doc__ = (
        f"{inspect.getdoc(Config)}\n\nKeys:\n{text}\n    partition: how the data are split; a PartitionConfig\n"
    )


def setting_names(*excluded: str) -> list[str]:
    """Return the keys of a configuration that are passed as `**settings`."""
    return [spec.name for spec in fields(Config) if spec.name not in (*_SEPARATE, *excluded)]


def _describe_key(name: str) -> str:
    spec = next(spec for spec in fields(Config) if spec.name == name)
    text = f"{name}={getattr(Config(), name)!r}: {spec.metadata['help']}"
    return textwrap.indent(textwrap.fill(text, 96, subsequent_indent="    "), "    ")
