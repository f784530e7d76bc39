"""Examine an installation for `fedskew doctor`: versions, devices, extras, data folders, ports and certificates.

A check has one of three statuses. With `ok`, all is well. With `note`, something is absent or will need attention. With
`broken`, something that the user needs cannot be used. The user needs a port only if the command names it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedskew import __version__, platforms
from fedskew.errors import UserError, plural

USUAL_PORTS = (9092, 9093)
"""The ports of nginx and of the SuperLink (Flower's server) in docs/deploy.md."""
_RENEWAL_DAYS = 30
"""A certificate that is valid for fewer days than this gets the status `note`."""
_RENEW = "run `fedskew federate certs` again"
_REPLACE_AUTHORITY = (
    "the server's operator must delete ca.pem, ca.key, server.pem and server.key, run `fedskew federate certs` again "
    "and send the new ca.pem to the sites"
)
"""How to renew the authority. Without the deletion, `fedskew federate certs` keeps the old one."""

Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    detail: str


Report = dict[str, list[Check]]
"""The checks by section."""


def examine(data_dir: str | None = None, keys: str | None = None, ports: Sequence[int] = ()) -> Report:
    """Run all checks. `keys` is a folder of `fedskew federate certs`, `ports` are the ports that the server needs."""
    return {
        "versions": list(_check_versions()),
        "devices": list(_check_devices()),
        "extras": list(_check_extras()),
        "data": list(_check_data(data_dir)),
        "federation": [*_check_ports(ports), *(_check_keys(Path(keys)) if keys else ())],
    }


def is_healthy(report: Report) -> bool:
    return all(check.status != "broken" for checks in report.values() for check in checks)


# -- packages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Requirement:
    package: str
    bounds: str
    """The versions that work with fedskew, such as `>=1.41,<1.42`."""
    extra: str
    """The extra that needs the package. Empty if fedskew itself needs it."""


def _check_versions() -> Iterator[Check]:
    yield Check("fedskew", "ok", f"{__version__} in {Path(__file__).parent}")
    is_supported = sys.version_info >= (3, 11)
    yield Check("Python", "ok" if is_supported else "broken", f"{platform.python_version()} at {sys.executable}")
    yield Check("system", "ok", platform.platform())
    yield _check_bytecode()
    for requirement in _requirements():
        if not requirement.extra:
            yield _check_package(requirement, "broken")


def _check_bytecode() -> Check:
    """Whether Python keeps the compiled form of PyTorch's modules. Without it, each start takes seconds longer."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Check("bytecode", "note", "torch is not installed")
    compiled = Path(importlib.util.cache_from_source(spec.origin))
    if compiled.is_file():
        return Check("bytecode", "ok", "PyTorch is compiled")
    folder = next(parent for parent in compiled.parents if parent.exists())  # Python makes the folders that are missing
    if sys.dont_write_bytecode:
        problem = "PYTHONDONTWRITEBYTECODE or Python's option -B is set; unset it"
    elif not (folder.is_dir() and os.access(folder, os.W_OK)):
        problem = f"Python cannot write to {folder}; set PYTHONPYCACHEPREFIX to a writable folder"
    else:
        return Check("bytecode", "ok", "PyTorch is compiled when it is next imported")
    return Check("bytecode", "note", f"every command compiles PyTorch anew, because {problem}")


def _check_extras() -> Iterator[Check]:
    by_extra: dict[str, list[Check]] = {}
    for requirement in _requirements():
        if requirement.extra:
            by_extra.setdefault(requirement.extra, []).append(_check_package(requirement, "note"))
    for extra, checks in by_extra.items():
        missing = [check for check in checks if check.status != "ok"]
        listed = ", ".join(f"{check.name} {check.detail}" for check in missing or checks)
        advice = f'; pip install "fedskew[{extra}]"' if missing else ""
        yield Check(extra, "note" if missing else "ok", listed + advice)


def _check_package(requirement: _Requirement, if_unusable: Status) -> Check:
    try:
        version = importlib.metadata.version(requirement.package)
    except importlib.metadata.PackageNotFoundError:
        return Check(requirement.package, if_unusable, "is not installed")
    if is_within(version, requirement.bounds):
        return Check(requirement.package, "ok", version)
    return Check(requirement.package, if_unusable, f"{version}, but fedskew needs {requirement.bounds}")


def _requirements() -> list[_Requirement]:
    """The packages that fedskew needs: from pyproject.toml in a checkout, otherwise from the installed metadata."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    try:
        lines = _read_project(project) if project.is_file() else importlib.metadata.requires("fedskew") or []
    except importlib.metadata.PackageNotFoundError:  # a copy of the package without its metadata
        return []
    found = [_parse_requirement(line) for line in lines]
    return [requirement for requirement in found if requirement.package != "fedskew" and requirement.extra != "dev"]


def _read_project(file: Path) -> list[str]:
    """The dependencies and extras in the form of installed metadata."""
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    return [*project["dependencies"], *(f"{line}; extra == '{extra}'" for extra, lines in extras for line in lines)]


def _parse_requirement(line: str) -> _Requirement:
    specifier, _, condition = line.partition(";")
    name = re.match(r"[\w.-]+", specifier.strip())
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", condition)
    package = name[0] if name else specifier.strip()
    bounds = re.sub(r"\[.*?\]|[\s()]", "", specifier.strip()[len(package) :])
    return _Requirement(package, bounds, extra[1] if extra else "")


def is_within(version: str, bounds: str) -> bool:
    """Whether a version satisfies bounds such as `>=1.41,<1.42`."""
    compare = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
    }
    parts = re.findall(r"(>=|<=|==|!=|<|>)([^,]+)", bounds)
    return all(compare[operator](_numbers(version), _numbers(bound)) for operator, bound in parts)


def _numbers(version: str) -> tuple[int, ...]:
    """The release as numbers without trailing zeros: `2.13.0+cpu` is (2, 13)."""
    release = re.match(r"\d+(?:\.\d+)*", version.strip())
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# -- devices -----------------------------------------------------------------------------------------------


def _check_devices() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of PyTorch cannot be loaded
        yield Check("torch", "broken", f"cannot be imported: {error}")
        return
    cores = platforms.available_cores()
    threads = torch.get_num_threads()
    yield _try_device("cpu", f"cores: {cores}, threads of PyTorch: {threads}")
    if not torch.cuda.is_available():
        built = (
            f"PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "PyTorch is built without CUDA"
        )
        yield Check("cuda", "note", f"no usable GPU; {built}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        detail = f"{properties.name}, {memory:.0f} GiB, capability {properties.major}.{properties.minor}"
        yield _try_device(f"cuda:{index}", f"{detail}, CUDA {torch.version.cuda}")
    if torch.backends.mps.is_available():
        yield _try_device("mps", "Apple's GPU")


def _try_device(name: str, detail: str) -> Check:
    """Compute something on the device, because a device that is listed may still not work."""
    import torch

    try:
        is_right = float(torch.ones(8, device=name).sum()) == 8
    except RuntimeError as error:
        return Check(name, "broken", f"{detail}; fails: {str(error).splitlines()[0]}")
    return Check(name, "ok" if is_right else "broken", detail if is_right else f"{detail}; computes wrong sums")


# -- data --------------------------------------------------------------------------------------------------


def _check_data(data_dir: str | None) -> Iterator[Check]:
    from fedskew.data.catalogue import DATASETS, find_location
    from fedskew.data.published.file_search import cache_folder, shared_folder

    if given := shared_folder():
        exists = os.path.isdir(given)
        yield Check("FEDSKEW_DATA", "ok" if exists else "broken", f"{given}" if exists else f"{given} is not a folder")
    else:
        yield Check("FEDSKEW_DATA", "note", "is not set; datasets are downloaded to the cache")
    yield _check_writable("cache", cache_folder())
    try:
        found = [name for name, entry in DATASETS.items() if find_location(entry, data_dir)]
    except OSError as error:  # such as a cache in a folder that this user must not open
        yield Check("found", "broken", f"the data folders cannot be searched: {error}")
        return
    missing = [name for name in DATASETS if name not in found]
    yield Check("found", "ok", ", ".join(found))
    yield Check("not found", "note" if missing else "ok", ", ".join(missing) or "none")


def _check_writable(name: str, folder: Path) -> Check:
    # In a folder that this user must not open, `os.path.exists` is False. `Path.exists` raises an error.
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Check(name, "ok", str(folder))
    return Check(name, "broken", f"{folder} is not writable; set XDG_CACHE_HOME to a writable folder")


# -- federation --------------------------------------------------------------------------------------------


def _check_ports(ports: Sequence[int]) -> Iterator[Check]:
    for port in ports or USUAL_PORTS:
        if not 1 <= port <= 65535:
            raise UserError(f"port is {port}; expected 1 to 65535")
        problem = _binding_problem(port)
        if_taken: Status = "broken" if ports else "note"
        detail = f"cannot be bound on 127.0.0.1: {problem}" if problem else "is free on 127.0.0.1"
        yield Check(f"port {port}", if_taken if problem else "ok", detail)


def _binding_problem(port: int) -> str:
    with socket.socket() as trial:
        if os.name == "posix":  # as a server does: a port that was closed a moment ago then counts as free
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _check_keys(folder: Path) -> Iterator[Check]:
    if not folder.is_dir():
        raise UserError(f"keys {str(folder)!r} is not a folder; expected a folder of `fedskew federate certs`")
    try:
        from fedskew.flower import certificates
    except ImportError:
        raise UserError('certificates need the extra flower; run: pip install "fedskew[flower]"') from None
    authority = _read(folder / "ca.pem")
    if authority is None:
        yield Check("ca.pem", "broken", f"is not in {folder}")
        return
    yield _check_certificate("ca.pem", lambda: certificates.days_left(authority), _REPLACE_AUTHORITY)
    server, key = _read(folder / "server.pem"), folder / "server.key"
    if server is not None and key.is_file():
        yield _check_certificate("server.pem", lambda: certificates.server_days_left(server, key, authority), _RENEW)
    elif server is not None or key.is_file():
        yield Check("server.pem", "broken", "server.pem and server.key belong together, and one of them is missing")
    private = [path for path in (folder / "ca.key", folder / "server.key", *folder.rglob("node.key")) if path.is_file()]
    yield from _check_private(folder, private)


def _check_certificate(name: str, days_left: Callable[[], float], renewal: str) -> Check:
    """Whether a certificate is valid, and for how long. `renewal` says how to get a new one."""
    try:
        days = days_left()
    except UserError as error:
        return Check(name, "broken", str(error))
    except ValueError as error:
        return Check(name, "broken", f"is damaged or does not match the other files ({error})")
    if days < 0:
        return Check(name, "broken", f"expired {plural(round(-days), 'day')} ago; {renewal}")
    advice = f"; to renew it, {renewal}" if days < _RENEWAL_DAYS else ""
    return Check(name, "note" if advice else "ok", f"is valid for {plural(round(days), 'more day')}{advice}")


def _check_private(folder: Path, files: Iterable[Path]) -> Iterator[Check]:
    """Private keys must not be readable by other users. Windows has no such permissions."""
    for path in files:
        if os.name == "posix":
            mode = path.stat().st_mode & 0o777
            name, is_private = str(path.relative_to(folder)), not mode & 0o077
            detail = f"permissions {mode:o}" if is_private else f"permissions {mode:o}; expected 600: chmod 600 {path}"
            yield Check(name, "ok" if is_private else "broken", detail)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
