"""What `fedskew doctor` finds: real sockets, real certificates, real packages."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fedskew.doctor import Check, Report, _check_data, _check_devices, examine, is_healthy, is_within
from fedskew.errors import UserError


def find(report: Report, section: str, name: str) -> Check:
    return next(check for check in report[section] if check.name == name)


def test_this_installation_is_healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path))
    report = examine()
    assert is_healthy(report), report
    assert find(report, "versions", "torch").status == "ok"
    assert find(report, "devices", "cpu").status == "ok"
    assert {"data", "flower", "report"} <= {check.name for check in report["extras"]}
    assert "digits" in find(report, "data", "found").detail


def test_an_installation_that_cannot_keep_bytecode_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # an empty cache, so PyTorch is not compiled in it
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert find(examine(), "versions", "bytecode").status == "ok"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    check = find(examine(), "versions", "bytecode")
    assert check.status == "note"
    assert "because PYTHONDONTWRITEBYTECODE or Python's option -B is set" in check.detail
    assert is_healthy({"versions": [check]})


def test_bytecode_may_go_to_a_new_folder_but_not_below_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "new" / "folder"))
    assert find(examine(), "versions", "bytecode").status == "ok"
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "file"))
    check = find(examine(), "versions", "bytecode")
    assert check.status == "note"
    assert f"because Python cannot write to {tmp_path / 'file'}; set PYTHONPYCACHEPREFIX" in check.detail


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.5.1", ">=2.6", False),
        ("1.41.0", ">=1.41,<1.42", True),
        ("1.42", ">=1.41,<1.42", False),
        ("8.0", "==8", True),
        ("1.10", ">=1.9", True),
        ("3.0", "", True),
    ],
)
def test_bounds_of_versions(version: str, bounds: str, expected: bool) -> None:
    assert is_within(version, bounds) is expected


def test_a_data_folder_that_does_not_exist_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "absent"))
    report = examine()
    assert find(report, "data", "FEDSKEW_DATA").detail.endswith("absent is not a folder")
    assert not is_healthy(report)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSKEW_DATA", str(tmp_path / "file"))
    assert find(examine(), "data", "FEDSKEW_DATA").detail.endswith("file is not a folder")


def test_a_data_folder_in_the_home_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDSKEW_DATA", "~/data")
    assert find(examine(), "data", "FEDSKEW_DATA") == Check("FEDSKEW_DATA", "ok", str(tmp_path / "data"))


def test_a_cache_that_this_user_must_not_open_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed, stat = tmp_path / "closed", Path.stat

    def stat_as_another_user(path: Path, **options: Any) -> Any:
        if closed in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    closed.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr(Path, "stat", stat_as_another_user)
    checks = [*_check_data(None)]
    assert [(check.name, check.status) for check in checks] == [
        ("FEDSKEW_DATA", "note"), ("cache", "broken"), ("found", "broken")
    ]  # fmt: skip
    assert "Permission denied" in checks[-1].detail


def test_a_pytorch_whose_library_is_missing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch":
                raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Loader(), *sys.meta_path])
    (check,) = _check_devices()
    assert (check.name, check.status) == ("torch", "broken")
    assert check.detail == "cannot be imported: libcudart.so.12: cannot open shared object file"


def test_datasets_that_are_not_found_are_noted_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedskew.data.catalogue.find_location", lambda entry, _: entry.name != "mnist")
    assert find(examine(), "data", "not found") == Check("not found", "note", "mnist")
    monkeypatch.setattr("fedskew.data.catalogue.find_location", lambda *_: True)
    assert find(examine(), "data", "not found") == Check("not found", "ok", "none")


def test_a_port_that_is_in_use_is_broken_if_it_is_needed() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert find(examine(ports=[port]), "federation", f"port {port}").status == "broken"
    assert find(examine(ports=[port]), "federation", f"port {port}").status == "ok"


def test_a_port_that_cannot_exist_is_refused() -> None:
    with pytest.raises(UserError, match="port is 70000; expected 1 to 65535"):
        examine(ports=[70000])


def test_keys_are_valid_expiring_expired_foreign_or_readable_by_others(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from expired_certificates import expire_certificate, write_certificate

    from fedskew.flower.credentials import make_credentials

    keys = make_credentials(tmp_path / "keys", ["north"])
    folder = str(keys.folder)
    report = examine(keys=folder)
    assert is_healthy(report)
    assert find(report, "federation", "server.pem").detail == "is valid for 365 more days"
    assert find(report, "federation", "sites/north/node.key").status == "ok"
    assert is_healthy(examine(keys=str(keys.node("north").folder)))

    write_certificate(keys, timedelta(days=10, minutes=1))
    expiring = find(examine(keys=folder), "federation", "server.pem")
    assert (expiring.status, expiring.detail.partition(";")[0]) == ("note", "is valid for 10 more days")
    write_certificate(keys, timedelta(days=1, minutes=1))
    assert find(examine(keys=folder), "federation", "server.pem").detail.startswith("is valid for 1 more day;")

    expire_certificate(keys)
    expired = find(examine(keys=folder), "federation", "server.pem")
    assert (expired.status, expired.detail.partition(";")[0]) == ("broken", "expired 2 days ago")

    other = make_credentials(tmp_path / "other", ["north"])
    keys.authority.write_bytes(other.authority.read_bytes())
    assert find(examine(keys=folder), "federation", "server.pem").status == "broken"

    other.key.chmod(0o644)
    readable = find(examine(keys=str(other.folder)), "federation", "server.key")
    assert (readable.status, "chmod 600" in readable.detail) == ("broken", True)


def test_an_authority_that_expires_soon_is_replaced_as_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from fedskew.flower import certificates
    from fedskew.flower.credentials import make_credentials

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_AUTHORITY_DAYS", 10)
        keys = make_credentials(tmp_path / "keys", ["north"])
    site_key = keys.node("north").private.read_bytes()
    make_credentials(keys.folder, ["north"])  # keeps the authority
    check = find(examine(keys=str(keys.folder)), "federation", "ca.pem")
    assert check.status == "note"
    advised = "delete ca.pem, ca.key, server.pem and server.key, run `fedskew federate certs` again"
    assert advised in check.detail

    for name in ("ca.pem", "ca.key", "server.pem", "server.key"):
        (keys.folder / name).unlink()
    make_credentials(keys.folder, ["north"])
    report = examine(keys=str(keys.folder))
    assert is_healthy(report)
    assert find(report, "federation", "ca.pem").status == "ok"
    assert keys.node("north").private.read_bytes() == site_key


def test_a_server_key_with_a_passphrase_is_broken(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from encrypted_keys import encrypt

    from fedskew.flower.credentials import make_credentials

    keys = make_credentials(tmp_path / "keys", ["north"])
    encrypt(keys.key)
    check = find(examine(keys=str(keys.folder)), "federation", "server.pem")
    assert check.status == "broken"
    assert check.detail.startswith(f"{keys.key} needs a passphrase; expected a private key without one: run `openssl ")


def test_a_keys_folder_without_files_is_broken_and_an_absent_one_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    assert find(examine(keys=str(tmp_path)), "federation", "ca.pem").status == "broken"
    with pytest.raises(UserError, match=r"keys '.*absent' is not a folder"):
        examine(keys=str(tmp_path / "absent"))
