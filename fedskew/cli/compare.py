"""`fedskew compare`: several methods on the same federations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedskew.cli.flags import CONFIGURATION, FLAGS, TRAINING, Json, Quiet, Settings, takes_settings
from fedskew.cli.observing import Live, Log, Onlookers
from fedskew.cli.run import RUNS, examples, seed_range
from fedskew.errors import UserError

if TYPE_CHECKING:
    from fedskew.experiment.config import Config

EXAMPLES = (
    "fedskew compare --methods fedavg,fedlmd,fedvls --rounds 5 --lr 0.1",
    "fedskew compare --methods fedprox,fedvls+fedavgm --rounds 3 --seeds 2",
    "fedskew compare --methods fedlmd,fedntd --set method.beta=0.5 --rounds 3",
)
DEFAULT = "fedavg,fedlmd,fedvls"
METHOD = "method."


def add_to(app: typer.Typer) -> None:
    app.command("compare", epilog=examples(EXAMPLES))(_command)


@takes_settings(name for name in FLAGS if name != "method")
def _command(
    settings: Settings,
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="finished runs, simulated or of a federation, to compare instead",
                       show_default=False),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B,C", help=f"methods, or all (default: {DEFAULT})",
                     rich_help_panel=TRAINING, show_default=False),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N", help="federations, with seeds from --seed on (default: 1)",
                     rich_help_panel=TRAINING, show_default=False),
    ] = None,
    out: Annotated[
        str, typer.Option("--out", metavar="FOLDER", help="the folder of the runs' folders",
                          rich_help_panel=CONFIGURATION)
    ] = RUNS,
    live: Live = False,
    log: Log = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Run several methods on the same federations and compare them. Finished runs are not run again.

    --set method.NAME=VALUE goes to every method that has the parameter,
    --set method.fedvls.NAME=VALUE to one. The YAML file may list `methods` and
    `seeds`, too. With folders of finished runs, nothing is run.
    """
    from fedskew.cli.several_runs import report, run_all
    from fedskew.experiment.compare import prepare_comparison

    if folders:
        if methods or seeds or settings.file or settings.values:
            raise UserError("folders of runs are compared as they are; expected no settings beside them")
        _show_recorded(folders, as_json)
        return
    comparison = read_comparison(settings, methods, seeds)
    runs = prepare_comparison(comparison.base, comparison.methods, comparison.seeds)
    results = run_all(runs, Path(out), as_json or quiet, Onlookers(live, log))
    report(results, runs[0].federation.dataset.classes, as_json)


def _show_recorded(folders: Sequence[str], as_json: bool) -> None:
    from fedskew.cli.compare_folders import recorded_results
    from fedskew.cli.several_runs import report
    from fedskew.cli.terminal import notice

    results, classes, notes = recorded_results(folders)
    report(results, classes, as_json)
    for line in notes:
        notice(line)


class Comparison(NamedTuple):
    """What is to be compared."""

    base: Config
    methods: list[Config]
    """`base` with one method each."""
    seeds: list[int]


def read_comparison(settings: Settings, methods: str | None = None, seeds: str | None = None) -> Comparison:
    """From the file, the flags and the settings; flags win over the file."""
    from fedskew.experiment.config import Config, with_values
    from fedskew.experiment.config.yaml_file import read_yaml

    content = read_yaml(settings.file) if settings.file else {}
    keys: dict[str, Any] = dict(content) if isinstance(content, Mapping) else {}
    listed = keys.pop("methods", None) if methods is None else methods
    wanted = keys.pop("seeds", None) if seeds is None else seeds
    keys = {key: value for key, value in keys.items() if key not in ("methods", "seeds")}
    if content is not None and not isinstance(content, Mapping):
        raise UserError(f"{settings.file}: expected a mapping of keys to values")
    try:
        file = Config.from_mapping(keys)
    except UserError as error:
        raise UserError(f"{settings.file}: {error}") from error
    if "method" in settings.values:
        raise UserError("compare takes several methods; expected --methods a,b,c instead of a value for method")
    own = {key: value for key, value in settings.values.items() if key.startswith(METHOD)}
    base = with_values(file, {key: value for key, value in settings.values.items() if key not in own})
    chosen = [with_values(base, {"method": method}) for method in _listed(DEFAULT if listed is None else listed)]
    return Comparison(base, _with_parameters(_distinct(chosen), own), seed_range(base, wanted))


def _listed(methods: object) -> Sequence[Any]:
    """`a,b+c` or a list of names and of mappings such as {name: fedvls, distill_weight: 0.5}."""
    from fedskew.methods import METHODS

    if methods == "all":
        return sorted(METHODS)
    if isinstance(methods, str):
        methods = [name.strip() for name in methods.split(",") if name.strip()]
    if not isinstance(methods, list) or not methods:
        raise UserError(f"methods is {methods!r}; expected names such as fedavg,fedvls or all")
    return methods


def _distinct(methods: list[Config]) -> list[Config]:
    """Refuse a method given twice, which one table could not tell apart."""
    from fedskew.methods import make_method

    names = [make_method(config.method).name for config in methods]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"method {name!r} is given twice; expected each method once")
    return methods


def _with_parameters(methods: list[Config], own: Mapping[str, Any]) -> list[Config]:
    """Each method with those parameters that it has; one that none has is refused."""
    from fedskew.experiment.config import with_values
    from fedskew.methods import make_method

    for key in own:
        if not any(_has(config, key) for config in methods):
            known = sorted({name for config in methods for name in make_method(config.method).params})
            names = ", ".join(config.method for config in methods)
            raise UserError(f"none of {names} has the parameter {key[len(METHOD) :]!r}; they have: {', '.join(known)}")
    return [with_values(config, {key: value for key, value in own.items() if _has(config, key)}) for config in methods]


def _has(config: Config, key: str) -> bool:
    from fedskew.methods import find, make_method

    owner, _, name = key[len(METHOD) :].rpartition(".")
    owners = {n for part in config.method.split("+") for n in (find(part).name, *find(part).aliases)}
    return name in make_method(config.method).params and owner in ("", *owners)
