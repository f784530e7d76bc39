"""Ask a component for its health and metrics, as a monitoring system would."""

from __future__ import annotations

import contextlib
import http.client
import re

_SAMPLE = re.compile(r'([a-z_]+)(?:\{([a-z]+)="((?:[^"\\\n]|\\["\\n])*)"\})? (\+Inf|-?[0-9.e+-]+)')


def get(port: int, path: str, host: str = "127.0.0.1", header: str | None = None) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=30)) as connection:
        connection.request("GET", path, headers={} if header is None else {"Host": header})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def health(port: int) -> tuple[int, str]:
    """The status and the text of /healthz. Status 0 if nothing answers."""
    try:
        return get(port, "/healthz")
    except OSError:
        return 0, ""


def values(text: str) -> dict[str, float]:
    """Read Prometheus' text format. Every sample follows the help and the type of its metric."""
    found, name = {}, ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line.split()[2:] in ([name, "counter"], [name, "gauge"], [name, "summary"])
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] in (name, f"{name}_sum", f"{name}_count")
            found[f"{match[1]} {match[3]}" if match[3] is not None else match[1]] = float(match[4])
    assert text.endswith("\n")
    return found
