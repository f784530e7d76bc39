"""A SuperNode's connection to a server that comes and goes."""

from __future__ import annotations

import httpx
import pytest
from flwr.supercore.retry import make_simple_http_retry_invoker

from fedskew.flower.node import patient_retry_invoker

CUT = httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)")
WRONG = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired")


class Server:
    """Fails some times, with an error of Flower's HTTP client, and then answers."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def answer(self) -> str:
        if self._errors:
            raise self._errors.pop(0)
        return "here"


def test_a_connection_that_is_cut_during_the_handshake_is_tried_again() -> None:
    """Flower itself gives up, so a site would be lost whenever the SuperLink restarts."""
    with pytest.raises(httpx.ConnectError):
        make_simple_http_retry_invoker().invoke(Server(CUT).answer)
    invoker = patient_retry_invoker()
    invoker.wait_function = lambda _: None
    assert invoker.invoke(Server(CUT, CUT, httpx.ReadTimeout("")).answer) == "here"


def test_a_certificate_that_is_refused_is_final() -> None:
    with pytest.raises(httpx.ConnectError, match="certificate has expired"):
        patient_retry_invoker().invoke(Server(WRONG).answer)
