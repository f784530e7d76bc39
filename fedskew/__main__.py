"""The entry point of `fedskew` and of `python -m fedskew`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line. Ctrl-C ends it quietly even while the commands are still being imported."""
    try:
        from fedskew.cli import main as run
    except KeyboardInterrupt:
        return 130  # fedskew.cli.commands.INTERRUPTED
    return run()


if __name__ == "__main__":
    sys.exit(main())
