"""A site compares a finished model with one that it trains alone, on its own held-out samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from in_process import small_data
from safetensors.torch import load_file, save_file

from fedskew.cli import main
from fedskew.flower.local_comparison import LocalComparison, write_page
from fedskew.metrics.site_scores import SiteScore

TRAINING = ["--method", "fedavg", "--rounds", "6", "--local-epochs", "2", "--lr", "0.1"]


def private_app(place: Path) -> list[str]:
    """The command that makes an app with noise on the gradients of single samples."""
    data = str(place / "digits.npz")
    command = ["federate", "init", str(place / "private"), "--sites", "north,south", "--data", data, *TRAINING]
    noise = ["--set", "example_clip=1", "--set", "example_noise=4", "--federation", "privacy=example"]
    settings = ["attempts=1", "share_loss=false", "site_metrics=none", "evaluation=server", f"test_data={data}"]
    return [*command, *noise, *(word for setting in settings for word in ("--federation", setting))]


def federation_of_two(place: Path) -> tuple[Path, Path, Path]:
    """An app, a site with samples of five of ten digits, and an exported model that was trained on all digits."""
    data = small_data(place)
    with np.load(data) as arrays:
        few = arrays["y_train"] < 5
        parts = {"x_train": arrays["x_train"][few], "y_train": arrays["y_train"][few]}
        np.savez(
            place / "own.npz", **parts, x_test=arrays["x_test"], y_test=arrays["y_test"], classes=arrays["classes"]
        )
    (place / "site.yaml").write_text("name: north\ndata: own.npz\ndevice: cpu\n")
    assert main(["federate", "init", str(place / "app"), "--sites", "north,south", "--data", str(data), *TRAINING]) == 0
    alone = [
        "run",
        "--data",
        str(data),
        "--clients",
        "2",
        "--partition",
        "iid",
        "--device",
        "cpu",
        "--quiet",
        *TRAINING,
    ]
    assert main([*alone, "--out", str(place / "run")]) == 0
    assert main(["export", str(place / "run"), "-o", str(place / "model")]) == 0
    return place / "app", place / "site.yaml", place / "model"


def test_a_model_of_all_digits_is_better_than_one_that_has_seen_half_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app, site, model = federation_of_two(tmp_path)
    page = tmp_path / "page.md"
    capsys.readouterr()
    assert main(["federate", "compare", str(model), str(app), str(site), "-o", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "the federation's model is better than the local one" in found["verdict"]
    assert found["low"] > 0
    assert found["finished"]["samples"] == found["local"]["samples"] == 60
    unseen = [entry for entry in found["classes"] if int(entry[0]) >= 5]
    assert all(local == 0 for _, count, _, local in unseen if count)
    accuracy = json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy"]
    assert found["finished"]["accuracy"] == pytest.approx(accuracy)
    text = page.read_text()
    assert found["verdict"] in text
    assert "Nothing left the site for this page." in text
    assert "which neither has seen, unless this site's data have changed since the federation's training." in text
    assert not (tmp_path / "state").exists()
    assert main(private_app(tmp_path)) == 0
    capsys.readouterr()
    assert main(["federate", "compare", str(model), str(tmp_path / "private"), str(site), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["local"] == found["local"]  # what stays at the site needs no noise
    other = tmp_path / "other.yaml"
    other.write_text(site.read_text().replace("north", "west"))
    assert main(["federate", "compare", str(model), str(app), str(other)]) == 2
    assert "'west' is not a site of this federation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("federation_app.mine:Mine", "is code of the app, which this command would execute"),
        ("somebody.else:Mine", "error: this site does not run the method 'somebody.else:Mine'"),
    ],
)
def test_no_code_that_only_the_app_names_is_executed(
    name: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app, data = tmp_path / "app", small_data(tmp_path)
    (tmp_path / "site.yaml").write_text("name: north\ndata: digits.npz\ndevice: cpu\n")
    assert main(["federate", "init", str(app), "--sites", "north,south", "--data", str(data), *TRAINING]) == 0
    settings = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(settings.replace('name = "fedavg"', f'name = "{name}"'))
    assert main(["federate", "compare", str(tmp_path / "model"), str(app), str(tmp_path / "site.yaml")]) == 2
    assert line in capsys.readouterr().err


def test_the_local_model_starts_from_the_pretrained_weights_if_the_site_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a learning rate of almost 0, both models are still the one that they started from."""
    _, site, model = federation_of_two(tmp_path)
    weights, page = str(model / "model.safetensors"), tmp_path / "page.md"
    command = ["federate", "init", str(tmp_path / "pretrained"), "--sites", "north,south", "--init", weights]
    assert main([*command, "--data", str(tmp_path / "digits.npz"), *TRAINING[:-1], "1e-9"]) == 0
    compare = ["federate", "compare", str(model), str(tmp_path / "pretrained"), str(site), "-o", str(page), "--json"]
    capsys.readouterr()
    assert main([*compare, "--init", weights]) == 0
    alike = capsys.readouterr()
    found = json.loads(alike.out)
    assert found["local"]["accuracy"] == found["finished"]["accuracy"]
    assert "favours" not in alike.err + page.read_text()
    assert "noise, from the pretrained weights that the federation's model started from, with" in page.read_text()
    assert main(compare) == 0
    unequal = capsys.readouterr()
    assert json.loads(unequal.out)["local"]["accuracy"] < found["local"]["accuracy"]
    caveat = "and the local model from random ones, which favours the federation's"
    assert caveat in unequal.err
    assert caveat in page.read_text()


def test_a_local_training_that_diverged_is_no_fair_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, site, model = federation_of_two(tmp_path)
    data, app, page = (str(tmp_path / name) for name in ("digits.npz", "steep", "page.md"))
    assert main(["federate", "init", app, "--sites", "north,south", "--data", data, *TRAINING, "--lr", "1e30"]) == 0
    capsys.readouterr()
    assert main(["federate", "compare", str(model), app, str(site), "-o", page]) == 0
    caveat = (
        "The local training diverged in 6 rounds, which did not change the local model. This favours the federation's."
    )
    assert f"warning: {caveat}" in capsys.readouterr().err
    assert caveat in Path(page).read_text()


def test_init_must_be_the_file_that_the_app_starts_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app, site, model = federation_of_two(tmp_path)
    weights = model / "model.safetensors"
    assert main(["federate", "compare", str(model), str(app), str(site), "--init", str(weights)]) == 2
    assert "but the app has no init; expected no --init" in capsys.readouterr().err
    command = ["federate", "init", str(tmp_path / "pretrained"), "--sites", "north,south", "--init", str(weights)]
    assert main([*command, "--data", str(tmp_path / "digits.npz"), *TRAINING]) == 0
    other = tmp_path / "other.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, other)
    compare = ["federate", "compare", str(model), str(tmp_path / "pretrained"), str(site)]
    assert main([*compare, "--init", str(other)]) == 2
    assert "the digest in the configuration" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["creff", "fedrod"])
def test_the_local_model_has_one_head_where_the_method_trains_two(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, site = small_data(tmp_path), tmp_path / "site.yaml"
    site.write_text("name: north\ndata: digits.npz\ndevice: cpu\n")
    training = ["--data", str(data), "--rounds", "1", "--local-epochs", "1", "--method", method]
    run, model, app, page = (str(tmp_path / name) for name in ("run", "model", "app", "page.md"))
    assert main(["run", *training, "--clients", "2", "--device", "cpu", "--quiet", "--out", run]) == 0
    assert main(["export", run, "-o", model]) == 0
    assert main(["federate", "init", app, "--sites", "north,south", *training]) == 0
    capsys.readouterr()
    assert main(["federate", "compare", model, app, str(site), "-o", page, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finished"]["samples"] == found["local"]["samples"] == 60
    line = (
        "with the federation's architecture and other settings, but with one linear head in place of two, for 1 epoch."
    )
    assert line in Path(page).read_text()


def test_the_verdict_follows_from_the_interval() -> None:
    score = SiteScore(100, 0.8, None)
    base = {"site": "a", "model": "m", "sha256": "", "train_samples": 9, "epochs": 2, "classes": ()}
    found = {
        low: LocalComparison(**base, finished=score, local=score, difference=low + 0.05, low=low, high=low + 0.1)
        for low in (0.01, -0.05, -0.2)
    }
    words = ["federation's model is better", "do not differ significantly", "local model is better"]
    assert all(word in one.verdict for word, one in zip(words, found.values(), strict=True))
    assert "+6.0 points, 95 % interval +1.0 to +11.0" in write_page(found[0.01])


def test_names_are_no_markup_on_the_page() -> None:
    score = SiteScore(100, 0.8, None)
    classes = (("<unknown>", 3, 0.5, 0.25), ("*a*|b", 2, 1.0, 0.0))
    found = LocalComparison("<a>", "m", "", 9, 2, score, score, 0.0, -0.1, 0.1, classes)
    page = write_page(found)
    assert r"# \<a>: the" in page
    assert r"On the data of \<a>, the" in page
    assert r"| \<unknown> | 3 | 50.0 % | 25.0 % |" in page
    assert r"| \*a\*\|b | 2 | 100.0 % | 0.0 % |" in page
