"""Export a finished run's model, so that it can be used without the run and without fedskew."""

from __future__ import annotations

from fedskew.export.folder import Exported, export_run
from fedskew.export.hub import upload

__all__ = ["Exported", "export_run", "upload"]
