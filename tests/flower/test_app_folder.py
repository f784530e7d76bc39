"""The app folder that `federate init` writes says what its operators chose, and can be read back."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedskew.cli import main
from fedskew.errors import UserError
from fedskew.experiment.config import Config, with_values
from fedskew.flower.app_folder import write_app
from fedskew.flower.contract import Contract
from fedskew.flower.disclosure import settings_warnings
from fedskew.flower.planning import contract_from_text, make_settings, read_app, resolve_config
from fedskew.flower.settings import FederationSettings, read_settings
from fedskew.flower.site_config import load_site

CONTRACT = Contract("image", ("cat", 'it\'s a "dog"', "ö, wl"), (1, 8, 8), (0.3,), (0.2,))
SITES = ("north", "south", "east")


def test_settings_contract_and_configuration_survive_the_file(tmp_path: Path) -> None:
    config = with_values(Config(), {"method": "fedvls", "method.distill_weight": 0.7, "clients_per_round": 2})
    whole = resolve_config(config, CONTRACT, SITES)
    settings = make_settings(SITES, {"minimum": 2, "round_timeout": 9.5})
    read, contract, same = read_app(write_app(tmp_path / "app", settings, CONTRACT, whole))
    assert (read, contract) == (settings, CONTRACT)
    assert (same.method, same.method_params, same.clients_per_round) == ("fedvls", whole.method_params, 2)
    assert same.partition.params == {"names": list(SITES)}


def test_repeated_spaces_in_a_site_s_name_count_as_one() -> None:
    assert make_settings(("St  Mary", "north "), {}).sites == ("St Mary", "north")


@pytest.mark.parametrize("name", ["no", "007", "1.10", "2024-01-01", "#1", "St Mary: 'a' \"b\"", "Zürich"])
def test_the_example_and_the_guide_spell_any_name_of_a_site_right(tmp_path: Path, name: str) -> None:
    config = resolve_config(Config(), CONTRACT, (name, "south"))
    app = write_app(tmp_path / "app", make_settings((name, "south"), {}), CONTRACT, config)
    assert load_site(app / "site.example.yaml").name == name
    lines = (app / "README.md").read_text(encoding="utf-8").splitlines()
    (register,) = [line for line in lines if "supernode register" in line]
    assert shlex.split(register, comments=True)[3:] == [f"keys/sites/{name}/node.pub", "--name", name]


def test_a_method_s_lists_survive_too(tmp_path: Path) -> None:
    config = with_values(Config(), {"method": "pkd", "method.groups": [[0, 1], [1, 2]]})
    app = write_app(tmp_path / "app", make_settings(SITES, {}), CONTRACT, resolve_config(config, CONTRACT, SITES))
    assert read_app(app)[2].method_params["groups"] == [[0, 1], [1, 2]]


def test_noise_on_samples_without_its_accounting_is_refused_before_an_app_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("method: fedavg\nexample_noise: 1.0\nexample_clip: 1.0\n")
    command = ["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "-c", str(config)]
    assert main(command) == 2
    assert "example_noise is set, but federation.privacy is 'none'; expected 'example'" in capsys.readouterr().err
    assert not (tmp_path / "app").exists()
    noisy = (
        "privacy=example",
        "share_loss=false",
        "site_metrics=none",
        "evaluation=server",
        "attempts=1",
        "test_data=digits",
    )
    assert main([*command, *(part for value in noisy for part in ("--federation", value))]) == 0
    assert read_app(tmp_path / "app")[0].privacy == "example"


def test_an_app_says_that_its_encoding_is_that_of_the_coordinator_s_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{40 + row % 9}.5,{'AB'[row % 2]},{'Rome' if row else 'Ponza'},{row % 3 % 2}" for row in range(40)]
    (tmp_path / "rome.csv").write_text("\n".join(["age,ward,village,ill", *rows]) + "\n")
    command = ["federate", "init", "--sites", "a,b", "--set", "data.label=ill", "--data", str(tmp_path / "rome.csv")]

    def init(name: str, *more: str) -> tuple[str, str]:
        assert main([*command, str(tmp_path / name), *more]) == 0
        return capsys.readouterr().err, (tmp_path / name / "README.md").read_text(encoding="utf-8")

    warned, guide = init("all")
    assert "every site, and 'village' has categories of fewer than 5 rows" in warned
    assert "data.drop=NAME" in warned
    assert "Ponza" not in warned
    assert "means and standard deviations of the coordinator's own table" in guide
    warned, guide = init("dropped", "--set", "data.drop=village")
    assert "categories of fewer" not in warned
    assert "coordinator's own table" in guide
    warned, guide = init("sums", "--column-sums")
    assert "categories of fewer" not in warned
    assert "coordinator's own table" not in guide
    (tmp_path / "agreed.yaml").write_text("[{name: age}, {name: ward, categories: [A, C]}]")
    agreed = ["--set", "data.drop=village", "--set", f"data.encoding={tmp_path / 'agreed.yaml'}"]
    warned, guide = init("agreed", *agreed)
    assert "categories of fewer" not in warned
    assert "coordinator's own table" not in guide


def test_flower_itself_accepts_the_app(tmp_path: Path) -> None:
    assert main(["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "--rounds", "3"]) == 0
    flwr = Path(sys.executable).parent / "flwr"
    built = subprocess.run(
        [str(flwr), "build", "--app", str(tmp_path / "app")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert list(tmp_path.glob("*.fab"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an empty folder"):
        write_app(tmp_path, make_settings(SITES, {}), CONTRACT, Config())


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"federation.minimun": 2}, "did you mean 'federation.minimum'"),
        ({"federation.minimum": 4}, "at most 3, the number of sites"),
        ({"federation.sites": "a,a"}, "different names"),
        ({"federation.sites": ""}, "federation.sites is None; expected different names"),
        ({"federation.evaluation": "server"}, "without federation.test_data"),
        ({"federation.site_metrics": "none"}, "the sites' tests are the only"),
        ({"federation.round_timeout": -1}, "federation.round_timeout"),
        ({"rouns": 3}, "did you mean 'rounds'"),
        ({"federation.sites": "a/b,c,d"}, "federation.sites is 'a/b'; expected a name without /"),
        ({"contract.shape": "[1, 2"}, "contract.shape"),
        ({"contract.std": "[0.0]"}, "expected finite numbers, and each std above 0"),
        ({"contract.mean": "[.nan]"}, "expected finite numbers, and each std above 0"),
        ({"contract.classes": "ill,wel"}, "contract.classes is 'ill,wel'; expected a list"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, object], line: str) -> None:
    good = {"federation.sites": "a, b, c", **{f"contract.{k}": str(v) for k, v in _contract().items()}}
    with pytest.raises(UserError, match=line):
        read_settings(good | values)


def test_class_names_keep_their_emoji(tmp_path: Path) -> None:
    command = ["federate", "init", str(tmp_path / "app"), "--sites", "a,b", "--classes", "\U0001f600,é", "--shape", "4"]
    assert main(command) == 0
    assert read_app(tmp_path / "app")[1].classes == ("\U0001f600", "é")


def test_an_app_without_sites_is_refused() -> None:
    with pytest.raises(UserError, match=r"federation\.sites is not set; expected different names"):
        read_settings({f"contract.{k}": str(v) for k, v in _contract().items()})


def _contract() -> dict[str, object]:
    return {"kind": "image", "classes": '["a", "b"]', "shape": "[1, 8, 8]", "mean": "[0.5]", "std": "[0.5]"}


def test_half_of_the_sites_are_needed_unless_one_says_otherwise() -> None:
    assert FederationSettings(sites=("a", "b", "c")).required_sites == 2
    assert FederationSettings(sites=("a", "b", "c"), minimum=3).required_sites == 3


def test_a_contract_can_be_described_where_there_are_no_data() -> None:
    assert contract_from_text("cat, dog", "3x32x32").shape == (3, 32, 32)
    assert contract_from_text("yes,no", "12").kind == "table"
    with pytest.raises(UserError, match="expected channels, height and width"):
        contract_from_text("yes,no", "3,4")
    with pytest.raises(UserError, match="classes is 'yes,no,'; expected names such as benign,malignant, none of them"):
        contract_from_text("yes,no,", "12")


def test_methods_and_models_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["federate", "init", str(tmp_path / "app"), "--sites", "a,b"]
    assert main([*arguments, "--method", "centralised"]) == 2
    assert "pools all samples in one place" in capsys.readouterr().err
    assert main([*arguments, "--federation", "minimun=1"]) == 2
    assert "did you mean 'minimum'" in capsys.readouterr().err
    assert main([*arguments, "--classes", "a,b"]) == 2
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("sites", "trim", "advice"),
    [
        (3, 0.1, "expected trim of at least 0.34, or median"),
        (10, 0.1, None),
        (3, 0.34, None),
        (2, 0.4, "expected at least 3 sites per round"),  # with two updates, the median is a plain mean, too
    ],
)
def test_a_trimmed_mean_that_trims_nobody_is_warned_of(sites: int, trim: float, advice: str | None) -> None:
    config = with_values(Config(), {"method": "trimmed-mean", "method.trim": trim})
    warnings = settings_warnings(FederationSettings(sites=tuple(f"s{i}" for i in range(sites))), CONTRACT, config)
    assert len(warnings) == (advice is not None)
    for warning in warnings:
        assert f"leaves out none of {sites} updates" in warning
        assert warning.endswith(str(advice))


@pytest.mark.parametrize("text", ["", "[tool.flwr]\napp = 'here'", "[tool.flwr.app]\nconfig = 'here'", "not TOML"])
def test_a_file_that_is_no_app_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"is not the pyproject\.toml of a federation's app"):
        read_app(tmp_path)
