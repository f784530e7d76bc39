"""TensorBoard: `tensorboard --logdir runs` finds every run's `tensorboard` folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.preparation import Prepared
from fedskew.experiment.result import Result
from fedskew.tracking.tracker import FolderOf, Tracker, flat


class TensorBoard(Tracker):
    def __init__(self, folder_of: FolderOf) -> None:
        super().__init__(folder_of)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("--log tensorboard needs tensorboard: install fedskew[tracking]") from error
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def begin(self, prepared: Prepared, folder: Path, round: int) -> None:
        self._writer = self._make(str(folder / "tensorboard"), purge_step=round + 1 if round else None)
        text = "\n".join(f"| {key} | {value} |" for key, value in flat(prepared).items())
        self._writer.add_text("configuration", f"| key | value |\n|---|---|\n{text}")

    def tell(self, numbers: dict[str, float], round: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)

    def end(self, result: Result) -> None:  # noqa: ARG002
        self._writer.close()
