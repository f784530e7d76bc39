"""deploy/compose.yaml: its commands exist, volumes and networks separate the sites, and services have few rights."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations

import pytest
from command_lines import parse_fedskew
from deployment_files import DEPLOY, read_compose, read_dockerfile, shell_commands

CONTENT, SERVICES = read_compose()
SITES = ("north", "south", "east")
SERVER = ("superlink", "proxy", "register")


def test_every_command_exists() -> None:
    programs = set()
    for service in SERVICES.values():
        program, *arguments = service.command
        programs.add(program)
        if program == "fedskew":
            parse_fedskew(arguments)
        elif program == "sh":
            assert (DEPLOY / "trial" / "prepare.sh").name in arguments[0]
    assert programs == {"fedskew", "python", "nginx", "sh", "chown", "sleep"}
    assert SERVICES["superlink"].command[:3] == ["python", "-m", "fedskew.flower.superlink"]
    assert SERVICES["register"].command[:4] == ["python", "-m", "fedskew.flower.registration", "federation"]
    scripted = shell_commands(DEPLOY / "trial" / "prepare.sh", "fedskew")
    assert [arguments[1] for arguments in scripted] == ["certs", "--data", "init", "approve"]
    for arguments in scripted:
        parse_fedskew(arguments)


def test_the_operator_s_command_exists() -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (given,) = re.findall(r"exec superlink fedskew (.*)$", text, re.MULTILINE)
    assert parse_fedskew(given.split())["app"] == "app"


def test_every_volume_and_folder_is_declared() -> None:
    named = {
        source for service in SERVICES.values() for source in service.mounts.values() if not source.startswith(".")
    }
    assert named == CONTENT["volumes"].keys()
    for service in SERVICES.values():
        for source in service.mounts.values():
            assert not source.startswith(".") or (DEPLOY / source).is_dir()
        if service.once:
            continue
        directory = read_dockerfile().setting(service.target, "WORKDIR") or ""
        declared = {directory, *read_dockerfile().words(service.target, "VOLUME")}
        assert service.mounts.keys() <= declared, service.name


def test_sites_share_no_network_and_no_volume() -> None:
    for one, other in combinations(SITES, 2):
        assert not set(SERVICES[one].values["networks"]) & set(SERVICES[other].values["networks"])
        assert not set(SERVICES[one].mounts.values()) & set(SERVICES[other].mounts.values())
    assert all(network == {"internal": True} for network in CONTENT["networks"].values())
    for name in SITES:
        assert SERVICES[name].values["volumes"] == [f"{name}:/srv/site:ro", f"{name}-state:/srv/site/state"]


def test_only_the_proxy_s_port_leaves_the_server() -> None:
    """The SuperLink, nginx and the operator share a network stack, in which the SuperLink listens on 127.0.0.1."""
    assert all(SERVICES[name].values["network_mode"] == "service:server" for name in SERVER)
    assert not any("ports" in service.values for service in SERVICES.values())
    command = SERVICES["superlink"].command
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_the_authority_s_key_is_with_no_service_that_stays() -> None:
    with_authority = [service for service in SERVICES.values() if "authority" in service.mounts.values()]
    assert [service.name for service in with_authority] == ["volumes", "prepare"]
    for service in with_authority:
        assert service.once
        assert service.values["network_mode"] == "none"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    values = SERVICES[name].values
    assert values["read_only"]
    assert values["cap_drop"] == ["ALL"]
    assert values["security_opt"] == ["no-new-privileges:true"]
    assert values["init"]
    assert (values.get("user"), values.get("cap_add")) == (("root", ["CHOWN"]) if name == "volumes" else (None, None))


def test_services_wait_for_services_that_can_meet_the_condition() -> None:
    for service in SERVICES.values():
        for name, condition in service.needs.items():
            needed = SERVICES[name]
            assert needed.once == (condition == "service_completed_successfully")
            if condition == "service_healthy":
                assert read_dockerfile().words(needed.target, "HEALTHCHECK")


def test_compose_reads_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose")
    command = [docker, "compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
