"""The log that the long-running commands of a federation write to stderr: one line per message, as text or JSON.

Each line has a time, except for text on a terminal. Results go to stdout.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer

from fedskew.cli.commands import USAGE_ERROR, option
from fedskew.errors import UserError, unknown

LOGGING = "Logs and metrics"
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

LogFormat = Annotated[str, option("--log-format", "text|json", "form of the log on stderr (default: text)", LOGGING)]
LogLevel = Annotated[
    str,
    option("--log-level", "LEVEL", "print messages of this level and above: debug, info, warning or error "
           "(default: info)", LOGGING),
]  # fmt: skip
MetricsPort = Annotated[
    int | None,
    option("--metrics-port", "PORT", "serve /healthz and Prometheus' /metrics on 127.0.0.1 (default: off)", LOGGING),
]

_PREFIX = re.compile(r"(warning|error): ")
_ERRORS = ("failed: ", "stopped: ")
"""The first words of the ServerApp's lines that say why a run ended."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FLOWER = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) *: *(.*)")
_OURS = "fedskew: "
"""The start of fedskew's own lines in the output of Flower's processes."""


@dataclass(frozen=True)
class CommandLog:
    """The log of one command."""

    component: str
    """server, site or trial."""
    format: str = "text"
    level: str = "info"

    def __post_init__(self) -> None:
        for name, value, known in (("log format", self.format, FORMATS), ("log level", self.level, LEVELS)):
            if value not in known:
                raise unknown(name, value, known)

    def write(self, line: str) -> None:
        """Write a line of fedskew. The line's first word may give its level.

        A line that starts with `warning: ` or `error: ` has that level. A line that says why a run ended (`_ERRORS`)
        has the level `error`. All other lines have the level `info`.
        """
        if prefix := _PREFIX.match(line):
            self._write(prefix[1], line[prefix.end() :])
        else:
            self._write("error" if line.startswith(_ERRORS) else "info", line)

    def write_output(self, output: str) -> None:
        """Write a line that one of Flower's processes printed. A line without a level gets `info`."""
        line = _COLOUR.sub("", output).rstrip()
        if line.startswith(_OURS):
            self.write(line.removeprefix(_OURS))
        elif found := _FLOWER.fullmatch(line):
            level = "error" if found[1] == "CRITICAL" else found[1].lower()
            self._write(level, found[2], "flower")
        else:
            self._write("info", line, "flower")

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Write a UserError as the last line of the log, as text or JSON like all other lines. Then exit."""
        try:
            yield
        except UserError as error:
            self._write("error", str(error))
            raise typer.Exit(USAGE_ERROR) from error

    def _write(self, level: str, message: str, source: str = "fedskew") -> None:
        if LEVELS.index(level) < LEVELS.index(self.level) or not message.strip():
            return
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        if self.format == "json":
            entry = {"time": time, "level": level, "component": self.component, "source": source, "message": message}
            line = json.dumps(entry, ensure_ascii=False)
        else:
            words = message if level == "info" else f"{level}: {message}"
            line = words if sys.stderr.isatty() else f"{time} {words}"
        print(line, file=sys.stderr, flush=True)
