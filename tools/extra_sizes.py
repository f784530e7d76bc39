"""Print what each extra adds to an installation: packages and megabytes.

    python tools/extra_sizes.py

It measures the installed packages, so run it in the environment of `make test`. What fedskew needs without extras is
not counted. A package that several extras need is counted for each of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
NOT_FOR_USERS = {"dev", "docs"}


def needed_for(lines: Iterable[str]) -> dict[str, Distribution]:
    """All installed packages that these requirements need, and those that these need in turn."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(line) for line in lines]
    seen: set[tuple[str, str]] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:  # another system needs it
                continue
            further = map(Requirement, found[name].requires or ())
            waiting += [one for one in further if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def megabytes(packages: Iterable[Distribution]) -> float:
    """Size of the installed files, without compiled bytecode."""
    files = (Path(str(one.locate_file(file))) for one in packages for file in one.files or ())
    return sum(path.stat().st_size for path in files if path.suffix != ".pyc" and path.is_file()) / 1e6


def main() -> None:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    base = needed_for(project["dependencies"])
    without_torch = {name: one for name, one in base.items() if name not in needed_for(["torch"])}
    print(f"fedskew beside torch: {len(without_torch)} packages, {megabytes(without_torch.values()):.0f} MB")
    for extra, lines in project["optional-dependencies"].items():
        if extra not in NOT_FOR_USERS:
            added = {name: one for name, one in needed_for(lines).items() if name not in base}
            print(f"{extra}: {len(added)} packages, {megabytes(added.values()):.0f} MB")


if __name__ == "__main__":
    main()
