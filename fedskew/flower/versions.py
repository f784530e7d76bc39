"""The software versions of the server and of a site, which are compared before anything is trained.

Both must have the same minor version of fedskew, such as 0.3, because a minor version may change what messages mean. A
difference in fedskew's patch version, or in the major or minor version of torch or Flower, is only reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from fedskew import __version__
from fedskew.flower.wire import one_line

Versions = Mapping[str, str]
"""The version of each package."""

_OTHERS = ("torch", "flwr")
"""Packages whose versions are reported, besides fedskew."""


def installed_versions() -> dict[str, str]:
    """The versions that are installed on this machine."""
    return {"fedskew": __version__, **{package: version(package) for package in _OTHERS}}


def read_versions(received: object) -> Versions:
    """Read the versions that another machine reports. Empty if there are none, or if they have another form."""
    if not isinstance(received, dict) or not all(isinstance(value, str) for value in received.values()):
        return {}
    return {package: one_line(received[package]) for package in ("fedskew", *_OTHERS) if package in received}


def version_problem(theirs: str | None, ours: str = __version__) -> str | None:
    """Return the reason why two versions of fedskew cannot work together. None if they can."""
    expected = f"expected {_minor(ours)}, as here ({ours})"
    if theirs is None:
        return f"it does not report its version of fedskew; {expected}"
    return None if _minor(theirs) == _minor(ours) else f"it has fedskew {theirs}; {expected}"


def version_warnings(theirs: Versions, ours: Versions) -> list[str]:
    """Describe differences with which a run is still possible."""
    found = [f"fedskew {theirs['fedskew']}, here {ours['fedskew']}"] if theirs["fedskew"] != ours["fedskew"] else []
    for package in _OTHERS:
        if package in theirs and _minor(theirs[package]) != _minor(ours[package]):
            found.append(f"{package} {theirs[package]}, here {ours[package]}")
    return found


def _minor(version: str) -> str:
    """The first two numbers of a version, without a local part such as `+cpu`."""
    return ".".join(version.partition("+")[0].split(".")[:2])
