"""State that a site keeps between rounds. It is on disk, because Flower loses a node's state when the node restarts.

`RUN/MODEL.round-17.safetensors` is the site's state after round 17 of that model. In a request that needs the
state, the server names the last round in which it used the site's update. The site then uses its state after that
round. So the state fits the server's model, even if a reply was lost or discarded, or if the server resumed from an
older checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from fedskew.errors import UserError, expect
from fedskew.experiment.config import config_hash
from fedskew.experiment.storage.files import Unreadable, read_tensors, reporting_os_errors, write_file, write_tensors
from fedskew.experiment.storage.run_folder import RunFolder
from fedskew.methods.parts import Tensors

_RUN = re.compile(r"[A-Za-z0-9]+")
"""The form of a run's name. The name becomes a folder's name, so it must not have other characters."""
_CONTRACT = "contract.sha256"
"""The file with the hash of the contract that the run began with."""
_ROUND = re.compile(r".*\.round-(\d+)\.safetensors")


class StateUnusable(UserError):
    """The site's state cannot be read or written. The text names files of the site, so it must not leave the site."""


class SiteState:
    """The states of one run at one site."""

    def __init__(self, folder: Path, run: str) -> None:
        expect(bool(_RUN.fullmatch(run)), "the server's name of the run", run, "letters and digits")
        self._folder = folder / run

    def bind(self, contract: str) -> None:
        """Record the hash of the run's contract. Refuse states that were made under another contract.

        The run's name is the hash of the configuration, which does not include the contract.
        """
        path = self._folder / _CONTRACT
        try:
            with reporting_os_errors("write", self._folder):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the states are made from the site's data
                known = path.read_text(encoding="utf-8").strip() if path.exists() else None
            if known is None:
                write_file(path, contract + "\n")
        except UserError as error:
            raise StateUnusable(str(error)) from error
        if known not in (None, contract):
            raise UserError(
                f"the run {self._folder.name} has another contract at this site; expected the contract with which it "
                "began, or another run, for example with another seed"
            )

    def read(self, model: str, round: int) -> Tensors | None:
        """Read the state after a round. None if the site does not have this state."""
        path = self._path(model, round)
        if not path.exists():
            return None
        try:
            with reporting_os_errors("read", path):
                return read_tensors(path)[0]
        except Unreadable as error:
            raise StateUnusable(
                f"cannot use {path}: {error}; delete it, and the site uses the state of another round, if it has one"
            ) from error
        except UserError as error:
            raise StateUnusable(str(error)) from error

    def read_nearest(self, model: str, round: int, log: Callable[[str], object]) -> Tensors | None:
        """Read the state after a round, or the nearest one. None if the site has no state of this model.

        The nearest state is the last earlier one, or the first later one if there is no earlier one. A server that was
        restored from an old backup may request a state that the site has removed.
        """
        if not self._path(model, round).exists() and (rounds := self._rounds(model)):
            before = [number for number in rounds if number <= round]
            found = max(before) if before else min(rounds)
            log(
                f"warning: the server continues after round {round}, but this site has no state of it and uses that of "
                f"round {found}"
            )
            round = found
        return self.read(model, round)

    def write(self, model: str, round: int, state: Tensors, kept: int | None, oldest: int) -> None:
        """Write the state after a round. Remove the states that the server will not request again.

        The site trained from the state of round `kept`, or from the initial state if `kept` is None. The server did not
        use the site's updates of the rounds between `kept` and this round, so the states of these rounds are removed.

        The server may resume after round `oldest` or any later one. From there, it requests the site's last state up to
        that round. So the last state up to `oldest` and all later ones remain.
        """
        try:
            with reporting_os_errors("write", self._folder):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_tensors(self._path(model, round), state, {"model": model, "round": round})
        except UserError as error:
            raise StateUnusable(str(error)) from error
        lost = [number for number in self._rounds(model) if (kept or 0) < number < round]
        received = sorted(set(self._rounds(model)) - set(lost))
        outdated = [number for number, newer in pairwise(received) if newer <= oldest]
        for number in (*lost, *outdated):
            self._path(model, number).unlink(missing_ok=True)

    def newest(self, model: str) -> Tensors | None:
        """Read the last state of this model. None if the site has none."""
        rounds = self._rounds(model)
        return self.read(model, max(rounds)) if rounds else None

    def _rounds(self, model: str) -> list[int]:
        names = (path.name for path in self._folder.glob(f"{quote(model, safe='')}.round-*.safetensors"))
        return [int(match[1]) for match in map(_ROUND.fullmatch, names) if match]

    def _path(self, model: str, round: int) -> Path:
        return self._folder / f"{quote(model, safe='')}.round-{round}.safetensors"


def read_final_state(folder: Path, run: str | Path) -> Tensors:
    """Read the site's last state of a finished run. `run` is the run's folder, as the server's operator shared it."""
    kept = SiteState(folder, config_hash(RunFolder(run).config)).newest("global")
    if kept is None:
        raise UserError(
            f"{folder} has no state of the run in {run}; expected a run in which this site took part, with a method "
            "that keeps tensors at the sites"
        )
    return kept
