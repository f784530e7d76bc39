"""Import users' code, named `package.module:attribute` in a configuration or on the command line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from fedskew.errors import UserError


def import_user_module(kind: str, name: str, attribute_kind: str) -> tuple[ModuleType, str]:
    """Import the module in `name` and return it with the attribute's name.

    `kind` (such as `model`) and `attribute_kind` (such as `factory`) appear in the error messages.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith(".") or not attribute.replace("-", "_").isidentifier():
        settings = " without settings" if "=" in attribute else ""
        raise UserError(f"{kind} {name!r} is not a valid name; expected package.module:{attribute_kind}{settings}")
    importlib.invalidate_caches()
    try:
        with importing_from_current_folder():
            return importlib.import_module(module_name), attribute
    except (Exception, SystemExit) as error:  # a script may end with sys.exit()
        raise UserError(f"{kind} {name!r}: cannot import {module_name!r}: {describe(error)}") from error


@contextmanager
def importing_from_current_folder() -> Iterator[None]:
    """Put the current folder first on the import path, as `python -m` does and a console script does not."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def describe(error: BaseException) -> str:
    """Return the error's type and message."""
    return f"{type(error).__name__}: {error}"
