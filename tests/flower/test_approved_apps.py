"""A site runs only the apps that it has approved, with the settings that it has approved."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from in_process import case, small_data
from real_federation import NAMES, Real, processes

from fedskew.cli import main
from fedskew.data import Dirichlet, Federation, federation
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower import node
from fedskew.flower.app_folder import PACKAGE
from fedskew.flower.app_review import build_archive, make_approval
from fedskew.flower.approved_apps import NAME, Approval, add_approval, file_hashes, read_approvals, refusal
from fedskew.flower.contract import Contract
from fedskew.flower.planning import resolve_config
from fedskew.flower.request_checks import approved_settings, require_approved
from fedskew.flower.server_app import run_federation
from fedskew.flower.settings import read_settings
from fedskew.flower.site_config import load_site
from fedskew.flower.site_state import StateUnusable


@pytest.fixture
def site(tmp_path: Path) -> Path:
    small_data(tmp_path)
    (tmp_path / "site.yaml").write_text("name: north\ndata: digits.npz\n")
    data = str(tmp_path / "digits.npz")
    assert main(["federate", "init", str(tmp_path / "app"), "--sites", "north,south", "--data", data]) == 0
    return tmp_path


def approve(site: Path, *options: str) -> int:
    return main(["federate", "approve", str(site / "app"), str(site / "site.yaml"), *options])


def test_the_supernode_installs_and_loads_only_an_approved_app(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays at the door is never unpacked, so none of its code can run."""
    installed: list[bytes] = []
    monkeypatch.setattr(node.runtime, "install_from_fab", lambda archive, **_: installed.append(archive))
    monkeypatch.setattr(node.runtime, "get_load_client_app_fn", lambda **_: "the app's loader")
    node._allow_only_approved_app(site / "site.yaml")
    assert approve(site, "--by", "Ada", "--yes") == 0
    approved = build_archive(site / "app")
    (site / "app" / PACKAGE / "client_app.py").write_text("print('other code')\n")
    node.runtime.install_from_fab(build_archive(site / "app"))
    assert installed == []
    assert node.runtime.get_load_client_app_fn() != "the app's loader"
    node.runtime.install_from_fab(approved)
    assert installed == [approved]
    assert node.runtime.get_load_client_app_fn() == "the app's loader"


def test_an_administrator_sees_what_an_app_does_and_approves_it(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert approve(site, "--by", "Ada", "--yes") == 0
    shown = capsys.readouterr()
    for line in (
        "sites: north, south\n",
        "method fedvls, model ",
        "data: image of shape [1, 8, 8], classes 0, 1",
        "the server learns about the site's labels: nothing\n",
        "privacy: no noise is added",
        f"{PACKAGE}/client_app.py\n",
    ):
        assert line in shown.out
    assert f"approved by Ada; north runs only the apps in {site / NAME}" in shown.err
    (approval,) = read_approvals(site) or []
    assert (approval.app, approval.approved_by) == ("app", "Ada")
    assert approval.hash in shown.out
    assert refusal(site / "site.yaml", build_archive(site / "app")) is None


def test_names_in_an_app_cannot_add_lines_to_its_description(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "app" / PACKAGE / "a\nprivacy: perfect\x1b[2K.py").write_text("")
    capsys.readouterr()
    assert approve(site, "--yes") == 0
    shown = capsys.readouterr().out
    assert rf"{PACKAGE}/a\nprivacy: perfect\x1b[2K.py" in shown
    assert sum(line.startswith("privacy:") for line in shown.splitlines()) == 1


def test_a_single_round_and_a_single_epoch_are_singular(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(site / "digits.npz")
    init = ["federate", "init", str(site / "short"), "--sites", "north,south", "--data", data, "--rounds", "1"]
    init += ["--local-epochs", "1", "--clients-per-round", "1", "--set", "average=uniform"]
    assert main([*init, "--federation", "privacy=central", "--federation", "noise=2"]) == 0
    assert "federation.noise is 2 for 1 site and" in capsys.readouterr().err
    assert main(["federate", "approve", str(site / "short"), str(site / "site.yaml"), "--yes"]) == 0
    shown = capsys.readouterr().out
    assert ", 1 round, 1 local epoch\n" in shown
    assert " after 1 round, for a site" in shown


def test_an_app_is_approved_only_with_a_yes(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert approve(site) == 2
    assert "error: the app was not approved" in capsys.readouterr().err
    assert read_approvals(site) is None
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert approve(site) == 0
    assert len(read_approvals(site) or []) == 1


def test_an_app_that_flower_cannot_pack_is_refused_in_one_line(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = site / "app" / "pyproject.toml"
    project.write_text(project.read_text().replace('publisher = "fedskew"', ""))
    assert approve(site, "--yes") == 2
    assert f'error: Flower cannot pack {site / "app"}: Invalid Flower App configuration: - Property "publisher"' in (
        capsys.readouterr().err
    )


def test_a_user_without_a_name_and_a_folder_that_cannot_be_written_are_named(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / f".{NAME}.tmp").mkdir()
    assert approve(site, "--by", "Ada", "--yes") == 2
    assert f"error: cannot write {site / NAME}: Is a directory" in capsys.readouterr().err
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # no system has a user with this number
    assert approve(site, "--yes") == 2
    assert "the current user has no name; expected --by with the name of the approving" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["pyproject.toml", f"{PACKAGE}/client_app.py", f"{PACKAGE}/more.py"])
def test_any_change_of_the_app_needs_another_approval(
    file: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert approve(site, "--yes") == 0
    with (site / "app" / file).open("a") as changed:
        changed.write("\n[tool.changed]\nvalue = 1\n" if file.endswith(".toml") else "\n# changed\n")
    assert "the site has not approved this app" in str(refusal(site / "site.yaml", build_archive(site / "app")))
    assert main(["federate", "site", str(site / "site.yaml"), "--check", str(site / "app")]) == 2
    assert f"error: this site has not approved {site / 'app'}" in capsys.readouterr().err
    assert approve(site, "--yes") == 0
    assert len(read_approvals(site) or []) == 2


def test_without_approvals_a_site_says_that_it_runs_everything(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", "site", str(site / "site.yaml"), "--check", str(site / "app")]) == 0
    assert "warning: this site runs every app that the server sends" in capsys.readouterr().err
    assert refusal(site / "site.yaml", b"") is None


@pytest.mark.parametrize("required", ["secure-aggregation", "[secure-aggregation]"])
def test_a_site_that_requires_secure_aggregation_runs_no_app_before_it_has_approved_one(
    required: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (site / "site.yaml").open("a") as file:
        file.write(f"policy: {{require: {required}}}\n")
    reasons: list[str] = []
    installed: list[bytes] = []
    monkeypatch.setattr(node.runtime, "install_from_fab", lambda archive, **_: installed.append(archive))
    monkeypatch.setattr(node.runtime, "get_load_client_app_fn", lambda **_: "the app's loader")
    monkeypatch.setattr(node, "refusing_app", lambda reason, _: reasons.append(reason))
    node._allow_only_approved_app(site / "site.yaml")
    archive = build_archive(site / "app")
    node.runtime.install_from_fab(archive)
    node.runtime.get_load_client_app_fn()()
    assert installed == []
    assert "requires secure aggregation, but has approved no app, so the server could send any code" in reasons[0]
    assert approve(site, "--yes") == 0
    node.runtime.install_from_fab(archive)
    assert installed == [archive]


def test_a_policy_that_cannot_be_read_allows_no_app(site: Path) -> None:
    with (site / "site.yaml").open("a") as file:
        file.write("policy: [require, secure-aggregation]\n")
    with pytest.raises(UserError, match="expected keys such as require"):
        refusal(site / "site.yaml", build_archive(site / "app"))


def test_damaged_files_refuse_everything(site: Path) -> None:
    assert approve(site, "--yes") == 0
    assert refusal(site / "site.yaml", b"no archive") == "the app's archive is damaged"
    archive = build_archive(site / "app")

    def is_unreadable() -> bool:
        for read in (lambda: read_approvals(site), lambda: refusal(site / "site.yaml", archive)):
            with pytest.raises(UserError, match="cannot be read"):
                read()
        return True

    (site / NAME).write_text("[{}]")
    assert is_unreadable()
    (site / NAME).unlink()
    (site / NAME).symlink_to(site / "missing.json")
    assert is_unreadable()


@pytest.mark.parametrize(("place", "byte"), [(36, 0xFF), (8, 99), (6, 1)], ids=["data", "compression", "encryption"])
def test_an_archive_with_a_wrong_byte_is_damaged(place: int, byte: int) -> None:
    """For each of these bytes, zipfile raises another type of error."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        files.writestr("a.py", "print(1)\n" * 100)
    content = bytearray(archive.getvalue())
    content[place] = byte
    if place < 10:  # the directory at the end of an archive repeats these bytes
        content[content.index(b"PK\x01\x02") + place + 2] = byte
    with pytest.raises(UserError, match="the app's archive is damaged"):
        file_hashes(bytes(content))


def test_approvals_that_cannot_be_reached_do_not_allow_every_app(tmp_path: Path) -> None:
    """For example, a network drive may fail. Only a missing file allows every app."""
    assert read_approvals(tmp_path) is None
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="cannot be read"):
        read_approvals(tmp_path / "loop")


def test_where_damaged_approvals_are_stays_in_the_site_s_own_log(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / NAME).write_text("[{}]")
    reasons: list[str] = []
    monkeypatch.setattr(node.runtime, "install_from_fab", lambda *_, **__: pytest.fail("the app is not approved"))
    monkeypatch.setattr(node.runtime, "get_load_client_app_fn", lambda **_: "the app's loader")
    monkeypatch.setattr(node, "refusing_app", lambda reason, _: reasons.append(reason))
    node._allow_only_approved_app(site / "site.yaml")
    node.runtime.install_from_fab(build_archive(site / "app"))
    node.runtime.get_load_client_app_fn()()
    assert reasons == ["the site's approvals or its configuration cannot be read; the reason is in its log"]
    assert str(site / NAME) in capsys.readouterr().err
    with pytest.raises(StateUnusable):
        require_approved({}, load_site(site / "site.yaml"))


def test_an_empty_list_of_approvals_refuses_every_request(site: Path) -> None:
    (site / NAME).write_text("[]")
    with pytest.raises(UserError, match="this site has approved no app"):
        require_approved({}, load_site(site / "site.yaml"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_cannot_hide_a_file_behind_another_of_the_same_name() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("app.py", "good")
        files.writestr("app.py", "evil")
    with pytest.raises(UserError, match="two files of the same name"):
        file_hashes(archive.getvalue())


def _split(folder: Path) -> tuple[Federation, Path]:
    data = small_data(folder)
    return federation(str(data), Dirichlet(beta=0.5, clients=3), seed=0), data


def _config(**changed: Any) -> Config:
    return with_values(Config(), {"partition.clients": 3, "rounds": 1, "local_epochs": 1, "device": "cpu", **changed})


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({}, None),
        ({"lr": 0.3}, "lr"),
        ({"rounds": 5}, "rounds"),
        ({"share_loss": False}, "share_loss"),
        ({"central_noise": [1.0, 9.0]}, "central_noise"),
        ({"contract": Contract("image", ("a", "b"), (1, 8, 8), (0.5,), (0.5,)).to_json()}, "the contract"),
    ],
)
def test_a_server_cannot_use_other_settings_than_the_approved_app(
    changed: dict[str, Any], difference: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other sites go on without the site that refuses."""
    split, data = _split(tmp_path)
    made = case(tmp_path, split, data, _config(), minimum=2)
    settings, contract, config = read_settings(dict(made.context.run_config))
    approved = approved_settings(settings, contract, resolve_config(config, contract, settings.sites))
    own = {key: value for key, value in changed.items() if key in approved}
    approved |= own
    approved["config"] |= {key: value for key, value in changed.items() if key not in own}
    (tmp_path / "site-1").mkdir()
    add_approval(tmp_path / "site-1", Approval("app", "hash", "Ada", "today", {}, json.loads(json.dumps(approved))))
    with caplog.at_level("INFO", logger="flwr"):
        result = run_federation(made.grid, made.context)
    reason = f"the server's request differs from every app that this site approved: {difference}"
    assert (reason in caplog.text) == (difference is not None)
    assert result.site_rounds == {"site-0": 1, "site-1": 1 if difference is None else 0, "site-2": 1}


def test_a_refusal_names_the_differences_from_the_nearest_of_several_apps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split, data = _split(tmp_path)
    made = case(tmp_path, split, data, _config(), minimum=2)
    settings, contract, config = read_settings(dict(made.context.run_config))
    (tmp_path / "site-1").mkdir()
    for app, changed in (("far", {"lr": 0.3, "rounds": 5}), ("near", {"lr": 0.3})):
        approved = approved_settings(settings, contract, resolve_config(config, contract, settings.sites))
        approved["config"] |= changed
        add_approval(tmp_path / "site-1", Approval(app, app, "Ada", "today", {}, json.loads(json.dumps(approved))))
    with caplog.at_level("INFO", logger="flwr"):
        run_federation(made.grid, made.context)
    assert "every app that this site approved: lr (compared with the nearest of 2 apps)" in caplog.text


def test_an_approval_from_before_the_contract_had_tasks_still_counts(tmp_path: Path) -> None:
    """The contract's newer keys have their defaults."""
    split, data = _split(tmp_path)
    made = case(tmp_path, split, data, _config(), minimum=2)
    settings, contract, config = read_settings(dict(made.context.run_config))
    approved = approved_settings(settings, contract, resolve_config(config, contract, settings.sites))
    del approved["contract"]["task"], approved["contract"]["fields"]
    (tmp_path / "site-1").mkdir()
    add_approval(tmp_path / "site-1", Approval("app", "hash", "Ada", "today", {}, json.loads(json.dumps(approved))))
    assert run_federation(made.grid, made.context).site_rounds["site-1"] == 1


SPYING = """
import os
from pathlib import Path

Path(os.environ["FLWR_HOME"], f"executed-by-{os.getppid()}").touch()

from fedskew.flower.client_app import app

__all__ = ["app"]
"""


@pytest.mark.slow
def test_no_code_of_an_app_runs_at_a_site_that_has_not_approved_it(tmp_path: Path) -> None:
    """Real processes: the app leaves a file wherever it is imported. The other sites train without site-1."""
    real = Real(tmp_path)
    app = real.app("spying", real.config("fedavg"), SPYING, minimum=2, begin_with=2)
    careful = real.local.site_file("site-1").parent
    add_approval(careful, make_approval(real.app("known", real.config("fedavg")), "site-1", "Ada"))
    add_approval(real.local.site_file("site-2").parent, make_approval(app, "site-2", "Ada"))
    with real.local as local:
        local.start()
        run = local.start_run(app)
        assert run.wait(300) is not None
        executed = {path.name for path in (local.folder / "flower").glob("executed-by-*")}
        nodes = {name: processes("fedskew.flower.node", str(local.site_file(name))) for name in NAMES}
        by_site = {name: any(f"executed-by-{pid}" in executed for pid in pids) for name, pids in nodes.items()}
        assert by_site == {"site-1": False, "site-2": True, "site-3": True}
        assert "fedskew: warning: the site has not approved this app" in local.nodes["site-1"].output()
        assert "site-1 is not admitted: the site has not approved this app (hash " in run.output()
        assert "trained by 2 of 3 sites in every round" in run.output()
