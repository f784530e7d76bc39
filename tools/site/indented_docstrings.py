"""A griffe extension: indented lines of a docstring stay lines, as `help()` shows them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class IndentedDocstrings(griffe.Extension):
    """Put an empty line before an indented block, which makes it a code block in Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^(\S.*)\n(?= {4}\S)", r"\1\n\n", obj.docstring.value)
