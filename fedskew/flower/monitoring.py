"""Health and Prometheus metrics of a long-running command, on 127.0.0.1 only.

    /healthz    200 and `ok`, or 503 and the reason
    /metrics    Prometheus' text format, or 503 and the reason if the files cannot be read

The numbers come from the files of the run or of the site, so a restarted command shows the same ones. Only the state of
a site's connection is not in a file.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from fedskew.errors import UserError

ADDRESS = "127.0.0.1"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True)
class Metric:
    """A metric with one value, or with one value for each value of a label."""

    name: str
    kind: str
    """counter, gauge or summary."""
    help: str
    value: float | dict[str, float]
    """A summary has the values `sum` and `count`."""
    label: str = ""
    """The label's name. Empty if the metric has no label."""


class Monitored(Protocol):
    def problem(self) -> str | None:
        """Describe the component's problem. None if it has none."""

    def metrics(self) -> Iterable[Metric]:
        """Read the current metrics."""


def render_metrics(metrics: Iterable[Metric]) -> str:
    """Return the metrics in Prometheus' text format."""
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric))


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}"
    yield f"# TYPE {metric.name} {metric.kind}"
    if not isinstance(metric.value, dict):
        yield f"{metric.name} {_number(metric.value)}"
    elif metric.kind == "summary":
        yield from (f"{metric.name}_{part} {_number(value)}" for part, value in metric.value.items())
    else:
        for label_value, value in metric.value.items():
            yield f'{metric.name}{{{metric.label}="{label_value.translate(_ESCAPES)}"}} {_number(value)}'


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


@contextlib.contextmanager
def monitored(component: Monitored, port: int | None) -> Iterator[str | None]:
    """Serve health and metrics while the block runs. Yield the address. Without a port, nothing is served."""
    if port is None:
        yield None
        return
    try:
        server = ThreadingHTTPServer((ADDRESS, port), _handler(component))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"metrics cannot be served on {ADDRESS}:{port} ({reason}); expected a free port (--metrics-port)"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{ADDRESS}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(component: Monitored) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()  # the component's files are read by one request at a time

    class Handler(BaseHTTPRequestHandler):
        """Answers only GET requests whose `Host` is this machine.

        Without this check, a web page in a browser on this machine could read the metrics, if its host name is made to
        resolve to 127.0.0.1 (DNS rebinding). Its requests have that name as `Host`.
        """

        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in (ADDRESS, "localhost"):
                self.send_error(403)
            elif self.path in ("/healthz", "/metrics"):
                self._send(*self._read())
            else:
                self.send_error(404)

        def _read(self) -> tuple[int, str]:
            try:
                with lock:
                    if self.path == "/metrics":
                        return 200, render_metrics(component.metrics())
                    problem = component.problem()
            except UserError as error:
                problem = str(error)
            return (200, "ok\n") if problem is None else (503, f"{problem}\n")

        def _send(self, status: int, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", _CONTENT_TYPE)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing. By default, each request would print a line."""

    return Handler
