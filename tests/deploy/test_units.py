"""The systemd units in deploy/systemd: their commands exist, and what they start can do little harm."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_lines import parse_fedskew
from deployment_files import DEPLOY, ROOT, read_dockerfile, read_unit
from doc_blocks import blocks

UNITS = ("fedskew-superlink.service", "fedskew-site.service")
ANALYZE = shutil.which("systemd-analyze")
PROTECTED = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "RestrictNamespaces": "yes",
    "SystemCallFilter": "@system-service",
    "UMask": "0077",
    "User": "fedskew",
}


def command(unit: str) -> list[str]:
    (line,) = read_unit(unit)["ExecStart"]
    return shlex.split(line)


def environment(unit: str) -> dict[str, str]:
    return dict(word.split("=", 1) for line in read_unit(unit)["Environment"] for word in line.split())


def test_the_site_s_command_exists_and_is_that_of_its_image() -> None:
    program, *arguments = command("fedskew-site.service")
    assert program == "/opt/fedskew/bin/fedskew"
    parse_fedskew(arguments)
    image = [*read_dockerfile().words("site", "ENTRYPOINT"), *read_dockerfile().words("site", "CMD")]
    assert [word.replace("${SUPERLINK}", "server:9092") for word in arguments] == image[1:]


def test_the_superlink_s_command_is_that_of_its_image_and_of_the_guide() -> None:
    program, *arguments = command("fedskew-superlink.service")
    assert program == "/opt/fedskew/bin/python"
    assert (
        arguments == [*read_dockerfile().words("server", "ENTRYPOINT"), *read_dockerfile().words("server", "CMD")][1:]
    )
    text = next(block.text for block in blocks(ROOT / "docs" / "deploy.md") if "flower.superlink" in block.text)
    assert shlex.split(text.replace("\\\n", " "))[1:] == arguments


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_has_few_rights_and_starts_its_program_again(unit: str) -> None:
    values = read_unit(unit)
    assert {key: values[key][-1] for key in PROTECTED} == PROTECTED
    assert values["ReadWritePaths"] == [{UNITS[0]: "/srv/federation", UNITS[1]: "/srv/site/state"}[unit]]
    assert values["Restart"] == ["always"]
    assert values["StartLimitIntervalSec"] == ["0"]  # it never gives up, also if the server is away for long
    given = environment(unit)
    assert given["PATH"].startswith(str(Path(command(unit)[0]).parent))
    writable = (*values["ReadWritePaths"], f"/run/{values['RuntimeDirectory'][0]}")
    assert all(given[name].startswith(writable) for name in ("FLWR_HOME", "HOME", "XDG_RUNTIME_DIR"))


@pytest.mark.parametrize("unit", UNITS)
def test_flower_reports_nothing_and_installs_nothing(unit: str) -> None:
    pytest.importorskip("flwr")
    from fedskew.flower.processes import QUIET

    assert QUIET.items() <= environment(unit).items()


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_reads_a_unit_and_calls_it_safe(unit: str, tmp_path: Path) -> None:
    for program in ("python", "fedskew"):
        (tmp_path / program).symlink_to(sys.executable)
    text = (DEPLOY / "systemd" / unit).read_text(encoding="utf-8")
    (tmp_path / unit).write_text(text.replace("/opt/fedskew/bin", str(tmp_path)), encoding="utf-8")
    for arguments in (["verify"], ["security", "--offline=true", "--threshold=20"]):  # 20 of 100: the best level
        done = subprocess.run(
            [str(ANALYZE), *arguments, str(tmp_path / unit)], capture_output=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
