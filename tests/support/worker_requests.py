"""What the worker processes of tests run. It imports nothing heavy, so that they start at once."""

from __future__ import annotations

import os
import time

from fedskew.errors import UserError
from fedskew.workers import Message, Report


def work(request: Message, report: Report) -> Message:
    """Answer a request, or fail as it says."""
    report({"seen": request})
    if request.get("fail") == "user":
        raise UserError("a wrong value; expected another")
    if request.get("fail") == "bug":
        raise KeyError("missing")
    if request.get("fail") == "die":
        os.kill(os.getpid(), 9)
    time.sleep(request.get("seconds", 0.0))
    return {"pid": os.getpid(), "twice": 2 * request.get("number", 0)}
