"""A site's own files: its configuration, what it keeps, and the socket of its worker."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedskew.cli import main
from fedskew.data import IID, federation
from fedskew.errors import UserError
from fedskew.flower.audit import site_log
from fedskew.flower.frames import receive_frame, send_frame
from fedskew.flower.site_config import DataUnreadable, load_site
from fedskew.flower.site_state import SiteState
from fedskew.flower.socket_paths import socket_path


def written(folder: Path, text: str) -> Path:
    (folder / "site.yaml").write_text(text)
    return folder / "site.yaml"


def own_data(folder: Path, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    x = np.random.default_rng(0).integers(0, 255, (20, 8, 8), np.uint8)
    np.savez(folder / "scans.npz", x=x, y=np.arange(20) % len(classes), classes=list(classes))


def test_data_lie_beside_the_file(tmp_path: Path) -> None:
    own_data(tmp_path)
    site = load_site(written(tmp_path, "name: a\ndata: {name: scans.npz, test_fraction: 0.5}"))
    assert site.federation().sizes.tolist() == [10]
    assert site.state_folder == tmp_path / "state"


def test_a_folder_of_datasets_is_looked_for_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere" / "datasets").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    site = load_site(written(tmp_path, "name: a\ndata: mnist\ndata_dir: datasets"))
    with pytest.raises(DataUnreadable, match=re.escape(f"data folder '{tmp_path / 'datasets'}' does not exist")):
        site.federation()


@pytest.mark.parametrize("data", ["scans.npz", "scans"])
def test_data_of_the_same_name_in_the_current_folder_are_not_read(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("site", "current"):
        (tmp_path / folder).mkdir()
    (tmp_path / "current" / "scans").mkdir()
    own_data(tmp_path / "current")
    monkeypatch.chdir(tmp_path / "current")
    site = load_site(written(tmp_path / "site", f"name: a\ndata: {data}"))
    with pytest.raises(DataUnreadable, match=re.escape(f"'{tmp_path / 'site' / data}' does not exist")):
        site.federation()


def test_a_key_without_a_value_has_its_default(tmp_path: Path) -> None:
    empty = ("state", "device", "client", "threads", "metrics", "packages", "keys", "policy")
    file = written(tmp_path, "name: a\ndata: digits\n" + "".join(f"{key}:\n" for key in empty))
    site = load_site(file)
    assert site_log(file).path.parent == site.state_folder == tmp_path / "state"
    assert site == load_site(written(tmp_path, "name: a\ndata: digits"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("data: digits", "no 'name'"),
        ("name: a", "no 'data'"),
        ("name: a\ndata: digits\nstat: here", "did you mean 'state'"),
        ("name: a\ndata: digits\nclient: -1", "client is -1"),
        ("name: a\ndata: digits\nthreads: 0", "threads is 0"),
        ("name: a\ndata: digits\ndevice: gpu", "device is 'gpu'; .* did you mean 'cuda'"),
        ("name: a\ndata: digits\nstate: ~/state", "state is '~/state'; expected a path without ~"),
        ("name: a\ndata: {name: digits, data_dir: /tmp}", "data.data_dir is '/tmp'; expected data_dir as a key beside"),
        ("name: a\ndata: {name: digits, 1: 2}", "a key of data is 1; expected name, or an option such as label"),
        ("name: a\ndata: {path: x.csv}", r"data has no 'name'; expected a path or .* such as data: \{name"),
        ("name: a\ndata: {name: [x.csv]}", r"data is \['x.csv'\]; expected a path"),
        ("- 1", "expected keys such as name and data"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        load_site(written(tmp_path, text))


def test_the_home_folder_of_an_unknown_user_is_named(tmp_path: Path) -> None:
    site = load_site(written(tmp_path, "name: a\ndata: ~nobody-here/x.csv"))
    with pytest.raises(DataUnreadable, match=r"~nobody-here/x\.csv' does not exist"):
        site.federation()


def test_a_client_that_the_split_does_not_have_is_refused(tmp_path: Path) -> None:
    federation("digits", IID(clients=3), seed=0).save_split(tmp_path / "split.npz")
    site = load_site(written(tmp_path, "name: a\ndata: digits\nsplit: split.npz\nclient: 3"))
    with pytest.raises(DataUnreadable, match="client is 3; expected a client of the split, from 0 to 2"):
        site.federation()


def test_the_version_of_data_changes_with_every_file_in_any_subfolder(tmp_path: Path) -> None:
    image = tmp_path / "scans" / "train" / "cat" / "1.png"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"one")
    site = load_site(written(tmp_path, "name: a\ndata: scans"))
    versions = [site.data_version()]
    assert site.data_version() == versions[0]
    with image.open("r+b") as file:  # overwritten in place, so no folder changes
        file.write(b"other")
    versions.append(site.data_version())
    (image.parent / "2.png").write_bytes(b"two")
    versions.append(site.data_version())
    image.unlink()
    versions.append(site.data_version())
    assert len(set(versions)) == 4


def test_the_site_command_checks_data_against_the_federation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_data(tmp_path, ("dog", "cow"))
    file = str(written(tmp_path, "name: a\ndata: scans.npz"))
    init = ["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "--shape", "1,8,8"]
    assert main([*init, "--classes", "cat,dog"]) == 0
    assert main(["federate", "site", file, "--check", str(tmp_path / "app")]) == 2
    assert "classes 'cow' are not among 'cat', 'dog'" in capsys.readouterr().err
    own_data(tmp_path, ("dog", "cat"))
    assert main(["federate", "site", file, "--check", str(tmp_path / "app" / "pyproject.toml")]) == 0
    told = capsys.readouterr().out
    assert "a: 16 training samples (dog 8, cat 8)" in told
    assert "tests: the number of test samples and of correct predictions" in told
    assert "the server learns about the site's labels: nothing" in told
    assert "privacy: no noise is added" in told


def test_the_site_command_says_that_results_by_class_reveal_label_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_data(tmp_path)
    file = str(written(tmp_path, "name: a\ndata: scans.npz"))
    init = ["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "--shape", "1,8,8", "--classes", "cat,dog"]
    private = ["--federation", "privacy=central", "--federation", "noise=2", "--set", "average=uniform"]
    assert main([*init, "--federation", "site_metrics=class", "--rounds", "10", *private]) == 0
    assert main(["federate", "site", file, "--check", str(tmp_path / "app")]) == 0
    shown = capsys.readouterr()
    assert "results and score histograms by class, whose sums are the label counts of the site's test part" in shown.out
    assert "the server learns about the site's labels: label counts of its test part" in shown.out
    assert "privacy: central, ε = 17.9 at δ = 1e-05 after 10 rounds, for a site whose data are replaced" in shown.out
    assert "this site allows only metrics: total, so the server will not receive its test results" in shown.err
    assert "warning: the noise on a round's mean is" in shown.err
    readme = (tmp_path / "app" / "README.md").read_text(encoding="utf-8")
    assert (
        "- besides what updates can reveal, the server learns about the site's labels: label counts of its test part"
        in readme
    )


def test_the_newest_state_that_the_server_knows_of_is_kept(tmp_path: Path) -> None:
    states = SiteState(tmp_path, "run")
    for number in (1, 2, 3, 4):
        states.write("global", number, {"c": torch.tensor([float(number)])}, kept=number - 1, oldest=number - 2)
    assert [states.read("global", number) is not None for number in (1, 2, 3, 4)] == [False, True, True, True]
    assert states.read("global", 4) == {"c": torch.tensor([4.0])}


def test_a_server_cannot_write_outside_the_site_s_state(tmp_path: Path) -> None:
    for run in ("../elsewhere", "/etc", "", "a/b"):
        with pytest.raises(UserError, match="the server's name of the run"):
            SiteState(tmp_path, run)


def test_what_a_site_keeps_is_for_its_user_alone(tmp_path: Path) -> None:
    SiteState(tmp_path / "state", "run").write("global", 1, {"c": torch.zeros(3)}, kept=None, oldest=0)
    assert stat.S_IMODE((tmp_path / "state" / "run").stat().st_mode) == 0o700


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    states = SiteState(tmp_path, "run")
    states.write("expert.0", 1, {"c": torch.zeros(3)}, kept=None, oldest=0)
    file = next(tmp_path.rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="delete it, and the site uses the state of another round"):
        states.read("expert.0", 1)


def test_the_worker_s_socket_lies_where_nobody_else_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("fedskew.flower.socket_paths._MOST_BYTES", 1000)  # the name of pytest's folder may be long
    path = socket_path(tmp_path / ("deep" * 30) / "site.yaml", 12345)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(os.fsencode(path.name)) < 40
    path.parent.chmod(0o700)
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not a folder that only you can enter"):
        socket_path(tmp_path / "site.yaml", 12345)
    path.parent.unlink()
    path.parent.mkdir()
    path.parent.chmod(0o755)
    with pytest.raises(UserError, match="not a folder that only you can enter"):
        socket_path(tmp_path / "site.yaml", 12345)


def test_a_place_for_the_socket_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="set XDG_RUNTIME_DIR"):
        socket_path(tmp_path / "site.yaml", 12345)


def test_a_place_for_the_socket_with_a_long_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
    with pytest.raises(UserError, match=r"longer than \d+ bytes, the system's limit .*; set XDG_RUNTIME_DIR"):
        socket_path(tmp_path / "site.yaml", 12345)


class _HeardOnce(socket.socket):
    """Its peer reads what is sent first, and hangs up."""

    peer: socket.socket

    def sendall(self, data: Any, flags: int = 0) -> None:
        super().sendall(data, flags)
        assert receive_frame(self.peer) == ({"a": 1}, b"")
        self.peer.close()


def test_a_frame_without_payload_is_sent_in_one_go() -> None:
    ours, theirs = socket.socketpair()
    with _HeardOnce(fileno=ours.detach()) as sending:
        sending.peer = theirs
        send_frame(sending, {"a": 1})


def test_frames_arrive_whole_or_not_at_all() -> None:
    one, other = socket.socketpair()
    with one, other:
        send_frame(one, {"a": [1, 2]}, b"x" * 1000)
        assert receive_frame(other) == ({"a": [1, 2]}, b"x" * 1000)
        one.sendall((5).to_bytes(8, "big") + (7).to_bytes(8, "big") + b"{}")
        one.close()
        with pytest.raises(EOFError):
            receive_frame(other)


def test_a_site_may_have_a_single_class(tmp_path: Path) -> None:
    """Label skew at its strongest: what the other classes are called, the site's configuration says."""
    rows = "\n".join(f"{i},{i * i},benign" for i in range(10))
    (tmp_path / "patients.csv").write_text(f"age,size,diagnosis\n{rows}\n")
    data = "{name: patients.csv, label: diagnosis, classes: [malignant, benign]}"
    held = load_site(written(tmp_path, f"name: a\ndata: {data}")).federation()
    assert held.dataset.classes == ("malignant", "benign")
    assert held.label_counts.tolist() == [[0, 8]]
    with pytest.raises(UserError, match=r"expected at least 2 classes.* classes: \[ill, well\]"):
        load_site(written(tmp_path, "name: a\ndata: {name: patients.csv, label: diagnosis}")).federation()
