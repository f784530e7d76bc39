"""A user's own code, named `package.module:attribute` in a configuration or on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from fedskew.errors import UserError


def user_module(kind: str, name: str, attribute_is: str) -> tuple[ModuleType, str]:
    """The module that `name` names, imported, and the attribute; `kind` and `attribute_is` word the errors."""
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith(".") or not attribute.replace("-", "_").isidentifier():
        raise UserError(f"{kind} {name!r} is not a {attribute_is}'s name; expected package.module:{attribute_is}")
    importlib.invalidate_caches()
    try:
        with current_directory_importable():
            return importlib.import_module(module_name), attribute
    except Exception as error:
        raise UserError(f"{kind} {name!r}: cannot import {module_name!r}: {brief(error)}") from error


@contextmanager
def current_directory_importable() -> Iterator[None]:
    """As `python -m` does; a console script's own folder is first on the path instead."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def brief(error: Exception) -> str:
    """What went wrong in the user's code, for a line of ours."""
    return f"{type(error).__name__}: {error}"
