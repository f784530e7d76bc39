"""Export a finished run's model for people who have neither the run nor fedskew."""

from __future__ import annotations

from fedskew.export.folder import Exported, export_run

__all__ = ["Exported", "export_run"]
