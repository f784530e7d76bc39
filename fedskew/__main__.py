"""Run the command line with `python -m fedskew`."""

from __future__ import annotations

import sys

from fedskew.cli import main

sys.exit(main())
