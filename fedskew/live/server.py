"""The web server of the live page. It listens on loopback only, and other web pages cannot read its answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedskew.live.state import LiveState
from fedskew.report.page.render import plotly_program
from fedskew.results.ranking import DEFAULT_METRIC

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 8765
GRACE = 5.0
"""Seconds that a browser has to fetch the last state after the runs have ended."""
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from other hosts, and other pages cannot show it in a frame."""


class LiveServer:
    """Serves the page of some run folders until it is closed."""

    def __init__(self, paths: Sequence[str | Path], port: int | None = None, rank_by: str = DEFAULT_METRIC) -> None:
        plotly_program()  # raises a UserError early if Plotly is not installed
        self.state = LiveState(paths, rank_by)
        self.ended = threading.Event()
        """Set when the runs have ended. A browser then fetches the state once more, and stops."""
        self._browser_waits = threading.Event()
        """Set when a browser fetches a state, and cleared when a browser fetches the last state."""
        self._server = _listen(port, _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self._server.server_address[1]}/"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def state_since(self, after: int) -> dict[str, Any]:
        """Return the state to send to a browser that has version `after`."""
        ended = self.ended.is_set()
        state = self.state.current(after, ended) | {"finished": ended}
        if ended:
            self._browser_waits.clear()
        else:
            self._browser_waits.set()
        return state

    def finish(self) -> None:
        """Mark the runs as ended. If a browser has fetched a state, give it `GRACE` seconds to fetch the last one."""
        self.ended.set()
        deadline = time.monotonic() + GRACE
        while self._browser_waits.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)


def _listen(port: int | None, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """Listen on the given port. Without one, use the default port or, if that is taken, any free one."""
    if port is not None:
        return ThreadingHTTPServer((ADDRESS, port), handler)
    try:
        return ThreadingHTTPServer((ADDRESS, DEFAULT_PORT), handler)
    except OSError:
        return ThreadingHTTPServer((ADDRESS, 0), handler)


def _handler(live: LiveServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET requests to a loopback host name only, so that no other web page can read the state."""

        def handle(self) -> None:
            with suppress(ConnectionError):  # a browser may close the page before it has received everything
                super().handle()

        def do_GET(self) -> None:
            if _host(self.headers.get("Host", "")) not in (ADDRESS, "localhost"):
                self.send_error(403)
                return
            url = urlsplit(self.path)
            if url.path == "/":
                self._send("text/html", live.state.page())
            elif url.path == "/plotly.js":
                self._send("text/javascript", plotly_program())
            elif url.path == "/state.json":
                version = parse_qs(url.query).get("after", ["0"])[0]
                self._send("application/json", json.dumps(live.state_since(int(version) if version.isdecimal() else 0)))
            else:
                self.send_error(404)

        def _send(self, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", _CONTENT_POLICY)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing. By default, each request would print a line."""

    return Handler


def _host(header: str) -> str:
    return header.rpartition(":")[0] if ":" in header else header
