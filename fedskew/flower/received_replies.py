"""The updates of the round in progress, on the server's disk.

An update is written here before the audit log says that it was received. If the server is killed, or if too few updates
arrive, the round is repeated. The server then requests only the updates that are not here. So a site that has trained a
round need not train it again if the server or another site fails. If the site adds noise, a second update would also
cost privacy.

With secure aggregation, the server has no single updates, so nothing is written here.

The files of the last two rounds are kept, because the sites train round r + 1 before the row of round r is written (see
`loop`). All files are deleted when the run is finished.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from fedskew.experiment.storage.files import reporting_os_errors, write_file
from fedskew.flower.site_replies import Reply
from fedskew.flower.wire import Facts, digest

FOLDER = "received"
_NAME = re.compile(r"round-(\d+)\.(.+)")
"""The name of a reply's file. It has the round and the site."""


class ReceivedReplies:
    """The replies in one run's folder."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER

    def keep(self, round: int, site: str, request: str, samples: int, reply: Reply, tests: Facts | None = None) -> None:
        """Write a site's reply.

        `request` is the request's digest, `tests` are the tests that it also asked for, and `samples` is the site's
        number of samples.
        """
        head = json.dumps({"request": request, "tests": tests, "samples": samples, "facts": reply.facts})
        with reporting_os_errors("write", self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # updates can reveal something about the data
        write_file(self._folder / f"round-{round}.{site}", head.encode() + b"\n" + reply.payload)

    def find(self, round: int, site: str, request: str, tests: Facts | None = None) -> Reply | None:
        """Return a site's reply to the request with this digest. None if there is none.

        With `tests`, the request must have asked for the same tests. Without them, the reply may have results of tests
        that are not needed now. A file whose first line is damaged counts as no reply. The tensors after that line are
        not checked.
        """
        path = self._folder / f"round-{round}.{site}"
        with reporting_os_errors("read", path):
            content = path.read_bytes() if path.exists() else b""
        head, _, payload = content.partition(b"\n")
        try:
            known = json.loads(head)
            is_reply = known["request"] == request and isinstance(known["facts"], dict)
            is_reply &= tests is None or json.dumps(known["tests"], sort_keys=True) == json.dumps(tests, sort_keys=True)
            return Reply(known["facts"], payload) if is_reply else None
        except (ValueError, KeyError, TypeError):
            return None

    def samples(self) -> dict[str, int]:
        """The numbers of samples of the sites whose replies are here."""
        found: dict[str, int] = {}
        for _, site, path in sorted(self._files()):
            try:
                with reporting_os_errors("read", path), path.open("rb") as file:
                    found[site] = int(json.loads(file.readline())["samples"])
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def forget(self, round: int, site: str) -> None:
        """Delete a reply that is not used, so that the site is asked again if the round is repeated."""
        (self._folder / f"round-{round}.{site}").unlink(missing_ok=True)

    def forget_before(self, round: int) -> None:
        """Delete the replies of rounds before this one."""
        for number, _, path in self._files():
            if number < round:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all replies, when the run is finished."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _files(self) -> list[tuple[int, str, Path]]:
        names = [(_NAME.fullmatch(path.name), path) for path in self._folder.glob("round-*")]
        return [(int(match[1]), match[2], path) for match, path in names if match]


def request_digest(facts: Facts, payload: bytes) -> str:
    """A hash that identifies a request for training, apart from its entry `tests`.

    The first request for a round may also ask for the tests of the round before it. If the round is repeated, its
    request may have no tests.
    """
    training = {key: value for key, value in facts.items() if key != "tests"}
    return digest(json.dumps(training, sort_keys=True).encode() + digest(payload).encode())
