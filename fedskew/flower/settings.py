"""A federation's settings, as an app's pyproject.toml has them under [tool.flwr.app.config].

Keys of `fedskew run` have the same names here (`rounds`, `method.name`, `lr` …). Keys of the federation begin with
`federation.` and `contract.`. Flower accepts only text, numbers and booleans, so lists are written as text, such as
"[1, 28, 28]".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fedskew.errors import UserError, unknown
from fedskew.experiment.config import Config, PartitionConfig, with_values
from fedskew.experiment.config.values import (
    Check,
    choice,
    flag,
    integer,
    invalid_value,
    optional,
    parse_yaml,
    real,
    text,
)
from fedskew.flower.contract import Contract
from fedskew.flower.secure.fixed_point import FEWEST_BITS, FixedPoint
from fedskew.flower.secure.identity import require_different_keys
from fedskew.flower.secure.session import FEWEST_SITES, LEAST_THRESHOLD, count_needed
from fedskew.methods import Method

FEDERATION = "federation"
"""Name of the sites' data in a run's configuration."""
SITES = "sites"
"""Name of the partition in a run's configuration: every site has its own data."""


def _option(default: Any, check: Check, help: str) -> Any:
    return field(default=default, metadata={"check": check, "help": help})


def _names(key: str, value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else str("" if value is None else value).split(",")
    sites = tuple(" ".join(str(name).split()) for name in names)  # as `one_line` does with the name in a site's message
    if not all(sites) or len(set(sites)) < len(sites):
        raise invalid_value(key, value, "different names, separated by commas")
    if unusable := [name for name in sites if "/" in name]:
        raise invalid_value(key, unusable[0], "a name without /, because it is part of file names")
    return sites


def _node_keys(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(line, str) for line in value.values()):
        raise invalid_value(key, value, "a mapping from sites to public keys, as `federate init --node-keys` writes it")
    return {str(name): " ".join(line.split()[:2]) for name, line in value.items()}  # without the comment


def _data(key: str, value: Any) -> str:
    """Check the data's name or path. A mapping with a name and options becomes JSON, which `data_source` reads."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return json.dumps(value)
    return str(text(key, value))


def data_source(value: str) -> tuple[str, dict[str, Any]]:
    """Return the name or path of the data, and their options."""
    options = json.loads(value) if value.startswith("{") else {"name": value}
    return options.pop("name"), options


@dataclass(frozen=True)
class FederationSettings:
    """Settings that a federation across machines has in addition to those of a simulation."""

    sites: tuple[str, ...] = _option((), _names, "the sites' names, as registered with their keys")
    minimum: int | None = _option(
        None,
        optional(integer(1)),
        "sites that must be connected, and updates that must arrive, for a round; default: half of all sites, rounded "
        "up",
    )
    begin_with: int | None = _option(
        None, optional(integer(1)), "sites that must be connected before a new run begins; default: as for a round"
    )
    round_timeout: float = _option(3600.0, real(above=0), "seconds after which a round ends without the missing sites")
    grace: float = _option(
        3.0,
        real(at_least=0),
        "a site is late after this many times its usual time, once the minimum replied; 0: only after round_timeout",
    )
    grace_seconds: float = _option(60.0, real(at_least=0), "no site is late before this many seconds")
    attempts: int = _option(3, integer(1), "how often a round is attempted, if too few good replies arrive")
    evaluation: str = _option(
        "sites", choice("server", "sites"), "whose test data are used: the server's or the sites'"
    )
    site_metrics: str = _option(
        "total",
        choice("class", "total", "none"),
        "what a site reports of its tests: results by class (they reveal label counts), the total, or nothing",
    )
    local_tests: bool = _option(
        False, flag, "whether sites also report the accuracy on their test part before and after their local training"
    )
    largest_update: float = _option(
        30.0, real(above=1), "largest norm of an update that counts, in multiples of the round's median"
    )
    most_samples: int = _option(1_000_000, integer(1), "largest number of training samples that a site may report")
    share_loss: bool = _option(True, flag, "whether sites report their training loss")
    test_data: str | None = _option(
        None, optional(_data), "the server's test data, for evaluation = server: a name, a path, or {name: …}"
    )
    privacy: str = _option(
        "none",
        choice("none", "central", "local", "example"),
        "who adds noise: the server to the mean (central), or each site to its update (local) or to the gradients of "
        "single samples (example)",
    )
    clip: float = _option(1.0, real(above=0), "largest norm of a site's change, if privacy is central or local")
    noise: float = _option(1.0, real(above=0), "noise multiplier z: standard deviation of the noise, divided by clip")
    delta: float = _option(1e-5, real(above=0, below=1), "δ of the reported (ε, δ)")
    secure_aggregation: bool = _option(
        False, flag, "whether the server learns only sums over the sites, and no individual update"
    )
    secure_threshold: float = _option(
        LEAST_THRESHOLD,
        real(at_least=LEAST_THRESHOLD, at_most=1),
        "with secure aggregation, share of a round's sites that must stay to its end; at least 2/3",
    )
    largest_change: float = _option(
        16.0, real(above=0), "with secure aggregation, the largest change of any number of the model in a round"
    )
    node_keys: Mapping[str, str] | None = _option(
        None, optional(_node_keys), "with secure aggregation, the public node key of every site"
    )
    survey: bool = _option(
        False,
        flag,
        "whether `fedskew federate survey` may ask for label counts and ranges of columns",
    )
    evaluate_only: bool = _option(
        False, flag, "whether `fedskew federate evaluate` may ask for tests (score histograms) of finished models"
    )
    purpose: str = _option(
        "train", choice("train", "survey", "evaluate"), "what a run does; the commands survey and evaluate set it"
    )
    tested_model: str | None = _option(None, optional(text), "the file of the finished model; evaluate sets it")
    folder: str = _option("runs/federation", text, "the run's folder on the server")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = spec.metadata["check"](f"federation.{spec.name}", getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)
        if not self.sites:
            raise UserError("federation.sites is not set; expected different names, separated by commas")
        for name, number in (("minimum", self.minimum), ("begin_with", self.begin_with)):
            if (number or 1) > len(self.sites):
                raise invalid_value(f"federation.{name}", number, f"at most {len(self.sites)}, the number of sites")
        if self.sites_add_noise:
            self._check_noise_at_sites()
        if self.evaluation == "sites" and self.site_metrics == "none":
            raise UserError(
                "federation.site_metrics is 'none'; expected 'total' or 'class', since the sites' tests are the only "
                "ones, or federation.evaluation = 'server' with federation.test_data"
            )
        if self.local_tests and self.site_metrics == "none":
            raise UserError(
                "federation.local_tests is true, but federation.site_metrics is 'none'; expected 'total' or 'class'"
            )
        if self.evaluation == "server" and self.test_data is None:
            raise UserError("federation.evaluation is 'server' without federation.test_data; expected a path or a name")
        if self.secure_aggregation:
            self._check_secure_aggregation()

    def _check_noise_at_sites(self) -> None:
        """Refuse losses and metrics, which have no noise, and repeated rounds, because every attempt spends privacy."""
        needed = {
            "share_loss": False, "site_metrics": "none", "local_tests": False, "evaluation": "server", "attempts": 1,
        }  # fmt: skip
        expected = [f"{name} = {json.dumps(value)}" for name, value in needed.items() if getattr(self, name) != value]
        if self.test_data is None:
            expected.append("test_data = a path or a name")
        if expected:
            raise UserError(
                f"federation.privacy is {self.privacy!r}, but losses and metrics have no noise, and every attempt of a "
                f"round spends privacy; expected {', '.join(expected)}"
            )

    def _check_secure_aggregation(self) -> None:
        """Refuse settings with which the server would need or learn more than sums."""
        if len(self.sites) < FEWEST_SITES:
            names = ", ".join(self.sites)
            raise invalid_value("federation.sites", names, f"at least {FEWEST_SITES} sites for secure aggregation")
        if missing := [site for site in self.sites if site not in (self.node_keys or {})]:
            raise UserError(
                f"federation.node_keys has no key of {missing[0]!r}, which secure aggregation needs; expected "
                "`federate init --node-keys FOLDER`"
            )
        if foreign := [name for name in self.node_keys or {} if name not in self.sites]:
            raise UserError(
                f"federation.node_keys has a key of {foreign[0]!r}, which is not one of federation.sites; expected one "
                "key per site"
            )
        require_different_keys(self.node_keys or {})
        for key, value, refused in (
            ("site_metrics", self.site_metrics, "class"),
            ("local_tests", self.local_tests, True),
            ("privacy", self.privacy, "central"),
            ("survey", self.survey, True),
            ("evaluate_only", self.evaluate_only, True),
        ):
            if value == refused:
                raise UserError(
                    f"federation.{key} is {json.dumps(value)}, which needs single sites' results; secure aggregation "
                    "gives the server only sums"
                )
        bits = FixedPoint(len(self.sites), self.most_samples, self.largest_change).fraction_bits
        if bits < FEWEST_BITS:
            raise UserError(
                f"federation.most_samples is {self.most_samples} and federation.largest_change is "
                f"{self.largest_change:g}, which leave {bits} bits after the binary point; expected smaller values, "
                f"which leave at least {FEWEST_BITS}"
            )

    @property
    def sites_add_noise(self) -> bool:
        """Whether updates have noise before they leave the sites."""
        return self.privacy in ("local", "example")

    @property
    def required_sites(self) -> int:
        """The number of sites that a round needs: the minimum, or half of all sites, rounded up."""
        return self.minimum or -(-len(self.sites) // 2)

    @property
    def sites_to_begin_round(self) -> int:
        """The number of sites that must be connected before a round begins.

        With secure aggregation, it may be larger than `required_sites`.
        """
        if not self.secure_aggregation:
            return self.required_sites
        return max(self.required_sites, FEWEST_SITES, count_needed(len(self.sites), self.secure_threshold))


def read_settings(values: Mapping[str, Any]) -> tuple[FederationSettings, Contract, Config]:
    """Read the three parts of an app's configuration."""
    parsed = {key: _value(key, value) for key, value in values.items()}
    section = _section("federation", parsed)
    known = {spec.name for spec in fields(FederationSettings)}
    for key in section:
        if key not in known:
            raise unknown("key", f"federation.{key}", {f"federation.{name}" for name in known})
    settings = FederationSettings(**section)
    contract = Contract.from_json(_section("contract", parsed))
    require_noiseless_sums(settings, contract)
    rest = {key: v for key, v in parsed.items() if not key.startswith(("federation.", "contract."))}
    config = with_values(Config(), {"device": "cpu", "engine": "plain", **rest, "data": FEDERATION})
    split = PartitionConfig(SITES, len(settings.sites), None, {"names": list(settings.sites)})
    require_example_settings(settings, config)
    return settings, contract, with_values(config, {"partition": split.to_mapping()})


def require_example_settings(settings: FederationSettings, config: Config) -> None:
    """Refuse noise on samples' gradients without `privacy = 'example'`, and the reverse.

    Only this privacy setting makes the accounting of ε include that noise.
    """
    has_noise = config.example_noise is not None
    if settings.privacy == "example" and not has_noise:
        raise UserError("federation.privacy is 'example' without example_clip and example_noise; expected both")
    if settings.privacy != "example" and has_noise:
        raise UserError(
            f"example_noise is set, but federation.privacy is {settings.privacy!r}; expected 'example', so that ε "
            "includes this noise"
        )


def require_noiseless_sums(settings: FederationSettings, contract: Contract) -> None:
    """Refuse column sums in a run with noise. The sums have no noise, and the model's encoding reveals them."""
    if contract.column_sums and settings.privacy != "none":
        raise UserError(
            f"federation.privacy is {settings.privacy!r}, but ε would not cover column sums, which have no noise; "
            "expected an encoding from a file (init --encoding without --column-sums), or privacy = 'none'"
        )


def _section(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _value(key: str, value: Any) -> Any:
    """Parse a list or a mapping, which the app has as text. Empty text means None."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        parsed = parse_yaml(value, key)
        try:
            return json.loads(value)  # YAML reads a JSON escape of an emoji as two characters
        except ValueError:
            return parsed
    return None if value == "" else value


def require_testable(settings: FederationSettings, method: Method) -> None:
    """Refuse tests by the server for a method without a global model."""
    if method.personal is not None and not method.personal.has_global_model and settings.evaluation != "sites":
        raise UserError(
            f"federation.evaluation is {settings.evaluation!r}, but method {method.name!r} has no global model "
            "that the server could test; expected 'sites', where every site tests its own model"
        )
