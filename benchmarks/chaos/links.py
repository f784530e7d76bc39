"""Links between sites and the SuperLink that can be slow, stall or break. TLS passes through them unread.

Each link is a small TCP proxy on 127.0.0.1. All of them run in one thread, with asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

_CHUNK = 16384
_END_SECONDS = 5.0


class Link:
    """The link of one site. Its methods may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: Callable[[], int]) -> None:
        """`target` returns the port that the link leads to."""
        self._loop, self._target = loop, target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._delay, self._is_broken = 0.0, False
        self.bytes = 0
        """Bytes that passed, in both directions."""

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def slow_down(self, seconds: float) -> None:
        """Delay every chunk of bytes by this time. 0 ends the delay."""
        self._delay = seconds

    def break_off(self) -> None:
        """Reset all connections, in the middle of what they transfer, and refuse new ones."""
        self._is_broken = True
        self._loop.call_soon_threadsafe(self._reset_all)

    def mend(self) -> None:
        self._delay, self._is_broken = 0.0, False

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._reset_all()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_broken:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target())
        except OSError:  # the SuperLink is down
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(chunk)
                await writer.drain()
                self.bytes += len(chunk)
            if writer.can_write_eof():
                writer.write_eof()


class Links:
    """The links of all sites. They end with the `with` block."""

    def __init__(self, sites: list[str], target: Callable[[], int]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.by_site = {site: Link(self._loop, target) for site in sites}

    def __enter__(self) -> Self:
        self._thread.start()
        for link in self.by_site.values():
            self._run(link.open())
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.by_site.values():
            self._run(link.close())
        self._run(self._end_connections())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_connections(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_END_SECONDS)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
