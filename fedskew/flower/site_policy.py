"""Checks a site's policy: requests that the method declares, code that the site allows, tests that it agreed to report.

The server names the method, the model and the requests. The site checks each of them before it replies, with the code
that is installed at the site.
"""

from __future__ import annotations

from fedskew.errors import UserError
from fedskew.experiment.config import Config
from fedskew.flower.app_folder import PACKAGE
from fedskew.flower.site_config import SiteConfig
from fedskew.flower.wire import Facts
from fedskew.methods import Method

DETAILS = ("none", "total", "class")
"""What a site may report of its tests, from the least to the most detailed."""


def require_known_code(config: Config, site: SiteConfig) -> None:
    """Refuse methods and models that are neither fedskew's, nor in the app's package, nor allowed by the site."""
    allowed = (PACKAGE, *site.packages)
    for kind, name in (*(("method", part) for part in config.method.split("+")), ("model", config.model)):
        module, colon, _ = name.strip().partition(":")
        if colon and module.partition(".")[0] not in allowed:
            raise UserError(
                f"the server names the {kind} {name!r}, which this site does not run; expected one of fedskew's, one "
                f"in the app's package {PACKAGE}, or its package listed under 'packages' in site.yaml"
            )


def require_declared(request: str, method: Method) -> None:
    """Refuse to count labels for a method that does not declare that it reveals label counts."""
    if not _reveals_label_counts(method):
        raise UserError(
            f"the server sends a {request}, which reveals label counts; method {method.name!r} does not declare that"
        )


def require_agreed_tests(tests: Facts, method: Method, site: SiteConfig) -> None:
    """Refuse to report more of the site's tests than the site agreed to."""
    detail = tests["detail"]
    if detail not in DETAILS or DETAILS.index(detail) > DETAILS.index(site.metrics):
        raise UserError(
            f"the server requests test results by {detail!r}; this site allows metrics: {site.metrics} (site.yaml)"
        )
    if detail == "total" and tests["labels"] is not None and not _reveals_label_counts(method):
        raise UserError(
            "the server requests test results of some labels, which reveals label counts; "
            f"method {method.name!r} does not declare that"
        )


def _reveals_label_counts(method: Method) -> bool:
    return any("label counts" in part.reveals for part in method.members)
