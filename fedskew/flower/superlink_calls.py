"""The server's calls to the SuperLink: send messages to nodes, and fetch their replies.

A call that fails for a reason that may pass, such as a busy SuperLink, is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import httpx
from flwr.app import ArrayRecord, Message, MessageType
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

from fedskew.flower.wire import Facts, one_line, to_records

_SPARE_SECONDS = 5.0
"""Flower deletes a message this many seconds after the time-out of its reply."""
_BATCH_SIZE = 4
"""Messages per call. Flower limits the time of a call, which would not suffice for many large messages."""
_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between attempts to reach the SuperLink."""
_MESSAGE_TYPES = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}
"""The kinds of requests that have a message type of their own in Flower. All others are sent as queries."""

T = TypeVar("T")


def make_message(
    kind: str, node: int, facts: Facts, tensors: ArrayRecord | None, timeout: float, group: str = ""
) -> Message:
    """Make a request to a node. The server waits for the reply for `timeout` seconds.

    If `facts` have a `kind`, it replaces `kind`. `group` becomes Flower's `group_id` (see `Sites.request`).
    """
    content = to_records({"kind": kind, **facts}, tensors)
    message_type = _MESSAGE_TYPES.get(facts.get("kind", kind), MessageType.QUERY)
    return Message(content, node, message_type, ttl=timeout + _SPARE_SECONDS, group_id=group)


class SuperLinkCalls:
    """Calls to the SuperLink through Flower's Grid."""

    def __init__(self, grid: Grid, log: Callable[[str], None]) -> None:
        self._grid, self._log = grid, log

    def nodes(self) -> dict[int, NodeInfo]:
        """Return the nodes that are connected, by their ids."""
        return {node.node_id: node for node in self._retry(lambda: list(self._grid.get_nodes()))}

    def send(self, make: Callable[[int], Message], receivers: Sequence[int]) -> dict[str, int]:
        """Send each receiver the message that `make` makes for it.

        Return the receivers of the messages that the SuperLink accepted, by the messages' ids. A retry makes new
        messages, as Flower requires.
        """
        sent: dict[str, int] = {}
        for batch in _batches(receivers):
            ids = self._push(make, batch)
            sent |= {message_id: receiver for message_id, receiver in zip(ids, batch, strict=True) if message_id}
        return sent

    def _push(self, make: Callable[[int], Message], receivers: Sequence[int]) -> list[str]:
        return self._retry(lambda: list(self._grid.push_messages([make(receiver) for receiver in receivers])))

    def fetch_replies(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived to these messages."""
        return self._retry(lambda: list(self._grid.pull_messages(list(message_ids))))

    def _retry(self, call: Callable[[], T]) -> T:
        for wait in _RETRY_SECONDS:
            try:
                return call()
            except (httpx.HTTPError, ObjectPushError, ObjectPullError) as error:
                reason = one_line(f"{type(error).__name__}: {error}")
                self._log(f"warning: the SuperLink failed ({reason}); next attempt in {wait:g} s")
                time.sleep(wait)
        return call()


def _batches(receivers: Sequence[int]) -> Iterable[Sequence[int]]:
    return (receivers[first : first + _BATCH_SIZE] for first in range(0, len(receivers), _BATCH_SIZE))
