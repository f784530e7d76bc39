"""Answers that a site computes only once. They are on disk before they leave, so a restart does not forget them.

A server that asks about the same data again and again learns more with each answer. So the site records its test
results, sums and counts. A repeated request gets the recorded answer, even if the data have changed since. Otherwise,
the difference of two answers would show the rows that changed. The site also limits how many different requests for the
same thing it answers.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedskew.errors import UserError
from fedskew.experiment.storage.files import reporting_os_errors, write_file
from fedskew.flower.site_state import StateUnusable
from fedskew.flower.wire import Facts, digest
from fedskew.locks import exclusive

Answer = tuple[Facts, bytes]
"""The JSON part of a reply, and its tensors as bytes."""

FOLDER = "answers"


class AlreadyAnswered(UserError):
    """The site has answered other requests for the same thing. The text names no file, so it may leave the site."""


class SiteAnswers:
    """The recorded answers of one site."""

    def __init__(self, state_folder: Path, name: str = FOLDER) -> None:
        self._folder = state_folder / name

    def is_allowed(self, question: str, request: Facts, most: int) -> bool:
        """Return whether this request has a recorded answer, or fewer than `most` requests have been answered."""
        answers = _read(self._path(question))
        return len(answers) < most or any(known["request"] == _key(request) for known in answers)

    def recorded(self, question: str, request: Facts) -> Answer | None:
        """Return the recorded answer to a request. None if there is none."""
        for known in _read(self._path(question)):
            if known["request"] == _key(request):
                return known["facts"], base64.b64decode(known["tensors"])
        return None

    def answer_once(self, question: str, request: Facts, compute: Callable[[], Answer], most: int = 1) -> Answer:
        """Return the recorded answer to a request, or compute and record it.

        `question` names what is asked, such as the test of a round. `request` has everything that may differ between
        requests with the same question, such as the digest of the tested model. At most `most` different requests per
        question are answered.
        """
        path, asked = self._path(question), _key(request)
        with _raising_state_unusable(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(self._folder / ".lock"):
            if (known := self.recorded(question, request)) is not None:
                return known
            answers = _read(path)
            if len(answers) >= most:
                requests = "another request" if len(answers) == 1 else f"{len(answers)} other requests"
                limit = "which is its limit" if len(answers) == most else f"and its limit is {most}"
                raise AlreadyAnswered(f"this site has answered {requests} for {question}, {limit}")
            facts, payload = compute()
            entry = {"request": asked, "facts": facts, "tensors": base64.b64encode(payload).decode()}
            with _raising_state_unusable(self._folder):
                write_file(path, json.dumps({"question": question, "answers": [*answers, entry]}) + "\n")
            return facts, payload

    def _path(self, question: str) -> Path:
        return self._folder / f"{digest(question.encode())[:32]}.json"


def _key(request: Facts) -> str:
    return digest(json.dumps(request, sort_keys=True).encode())


@contextlib.contextmanager
def _raising_state_unusable(folder: Path) -> Iterator[None]:
    """Turn a problem with the site's files into `StateUnusable`, whose text must not leave the site."""
    try:
        with reporting_os_errors("write", folder):
            yield
    except UserError as error:
        raise StateUnusable(str(error)) from error


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["answers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateUnusable(f"{path} cannot be read ({error}); restore it") from error
