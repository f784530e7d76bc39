"""The built wheel and sdist: they have all files, and an installation without the repository works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedskew

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedskew"

SMOKE_TEST = """
import sys
from pathlib import Path
import fedskew
from fedskew.cli import main

assert Path(fedskew.__file__).is_relative_to(sys.prefix), fedskew.__file__

def fedskew_command(*arguments):
    sys.argv = ["fedskew", *arguments]
    try:
        status = main()
    except SystemExit as end:
        status = end.code
    assert status == 0, arguments

small = ["--data", "digits", "--clients", "4", "--rounds", "1", "--local-epochs", "1"]
fedskew_command("demo", "--seeds", "1", "--rounds", "1", "--quiet")
fedskew_command("run", *small, "--method", "fedavg", "--out", "runs/one")
fedskew_command("compare", "--methods", "fedavg,fedrs", *small, "--out", "runs/two")
fedskew_command("report", "--no-features", "runs/two")
fedskew_command("export", "runs/one", "--out", "model")
fedskew_command("diagnose", "counts.csv")
fedskew_command("federate", "init", "app", "--sites", "north,south", "--data", "digits")
for name in ("report.html", "model/model.py", "model/README.md", "runs/demo/demo.png", "app/pyproject.toml"):
    assert Path(name).stat().st_size > 0, name
"""
COUNTS = "site,a,b,c\nnorth,20,0,5\nsouth,1,30,0\neast,0,2,40\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from nothing but the sdist."""
    folder, unpacked = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("unpacked")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    subprocess.run([*build, "-t", "wheel"], cwd=source, check=True)
    return folder


def wheel_in(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def package_files() -> set[str]:
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(wheel_in(built)) as wheel:
        inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == package_files()
    for kind in ("yaml", "js", "css", "html", "typed"):
        assert any(name.endswith(f".{kind}") for name in inside), kind


def test_the_sdist_has_what_a_build_and_the_tests_need(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= inside
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/test_installation.py", "docs/deploy.md"} <= inside


def python_in(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make_environment(folder: Path, *install: str) -> Path:
    """Make an environment in a folder, install into it, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = python_in(folder)
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-compile", *install]
    subprocess.run(pip, check=True)
    return python


def run_smoke_test(python: Path, folder: Path) -> None:
    """Run the smoke test in an empty folder, with no path to the repository."""
    folder.mkdir()
    (folder / "counts.csv").write_text(COUNTS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(str(python), "-c", SMOKE_TEST)
    assert fedskew.__version__ in run(str(python.with_name("fedskew")), "--version")


def test_an_installed_wheel_passes_the_smoke_test_without_the_repository(built: Path, tmp_path: Path) -> None:
    """The environment has the wheel, and borrows the dependencies of this one."""
    python = make_environment(tmp_path / "environment", "--no-deps", "--no-index", str(wheel_in(built)))
    (site,) = (tmp_path / "environment").rglob("site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    run_smoke_test(python, tmp_path / "work")


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_passes_the_smoke_test(built: Path, tmp_path: Path) -> None:
    """It needs the network, or an index that pip knows. The wheel's requirements are installed with it."""
    wheel = f"{wheel_in(built)}[data,report,flower]"
    run_smoke_test(make_environment(tmp_path / "environment", TORCH, wheel), tmp_path / "work")


TORCH = re.findall(r"^TORCH\s*\?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0]


def test_every_extra_for_users_is_documented() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == extras.keys() - {"dev", "docs"}


# -- the lock file ----------------------------------------------------------------------------------------

LOCK = ROOT / "requirements-dev.lock"


def direct_requirements() -> set[str]:
    """The names of all packages that pyproject.toml requires, with all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: Sequence[str] = [line for lines in project["optional-dependencies"].values() for line in lines]
    return {name(line) for line in (*project["dependencies"], *extras)} - {"fedskew"}


def name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_the_lock_file_pins_every_requirement_within_its_bounds() -> None:
    from packaging.requirements import Requirement

    locked = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith(("#", " ")):
            requirement = Requirement(line)
            assert [clause.operator for clause in requirement.specifier] == ["=="], line
            locked.setdefault(name(line), []).append(next(iter(requirement.specifier)).version)
    assert direct_requirements() - locked.keys() == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]
    for requirement in map(Requirement, lines):
        for version in locked.get(name(requirement.name), []):
            assert requirement.specifier.contains(version), f"{requirement}, but the lock file has {version}"


def test_the_lock_file_has_the_torch_of_the_makefile() -> None:
    assert TORCH in LOCK.read_text(encoding="utf-8").splitlines()
    assert f"-P {TORCH} " in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")  # in the command that writes it
