"""The entry point of `fedskew` and of `python -m fedskew`."""

from __future__ import annotations

import signal
import sys
from types import FrameType

_INTERRUPTED = 130
"""The exit status after Ctrl-C. It equals `fedskew.cli.commands.INTERRUPTED`, which is not imported yet."""


def main() -> int:
    """Run the command line. Ctrl-C ends it quietly, even while modules are still being imported."""
    was_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if the parent process chose to ignore Ctrl-C
        signal.signal(signal.SIGINT, interrupt)
    try:
        from fedskew.cli import main as run

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception:
        if was_interrupted:  # an interrupted import may raise another error: numpy's raises AttributeError
            return _INTERRUPTED
        raise
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
