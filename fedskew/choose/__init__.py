"""Race methods on a federation: `fedskew choose`, or `fedskew.choose(...)` in Python."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from fedskew.choose.choice import Choice, choose

__all__ = ["Choice", "choose"]


class _CallablePackage(ModuleType):
    """Makes the package callable, because `fedskew.choose` is the package, not the function, once it is imported."""

    def __call__(self, *arguments: Any, **options: Any) -> Choice:
        return choose(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
__doc__ = choose.__doc__ or ""  # what `help(fedskew.choose)` and notebooks show
__signature__ = inspect.signature(choose)
