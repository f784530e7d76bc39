"""Build dataset, split, model and method from a configuration, and check them before any training."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.data import Dataset, Federation, Partition, federation, load, make_partition
from fedskew.data.loading import is_named
from fedskew.data.partitions.rule import partition_class, require_rule
from fedskew.engine import choose_devices, choose_engine, choose_precision, estimated_seconds
from fedskew.errors import UserError, did_you_mean, expect, unknown
from fedskew.experiment.config import Config, PartitionConfig
from fedskew.methods import METHODS, Method, Objective, Part, Personal, Schedule, Stage, make_method, matching_entries
from fedskew.methods.parts import SGD_OPTIMIZERS, check_companions
from fedskew.methods.personal import check_personal, personal_names, shared_tensors
from fedskew.models import DataShape, Field, adapted_model, has_features, make_model, own_module
from fedskew.models.heads import HEADS, TWO_HEADS

if TYPE_CHECKING:
    from fedskew.models.weights import InitReport

DEFAULT_CLIENTS = 20
"""The number of clients if neither `partition.clients` nor the partition rule sets it."""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start, with its resolved configuration."""

    config: Config
    federation: Federation
    method: Method
    model: nn.Module
    init_report: InitReport | None = None
    """Which tensors the model took from the file of weights. None if `init` names no file."""
    notices: tuple[str, ...] = ()
    """Lines for the user about choices that `prepare` made."""

    @property
    def sample(self) -> Tensor:
        """One input of the model."""
        return model_input(self.federation.dataset, self.model)


def build_federation(config: Config, dataset: Dataset | None = None) -> Federation:
    """Load the data, unless `dataset` is given, and split them."""
    rule = partition_rule(config)
    data = load(config.data, config.data_dir, **data_options(config)) if dataset is None else dataset
    return federation(data, rule, config.partition_seed)


def data_options(config: Config) -> dict[str, Any]:
    """The options for loading the data: those in the configuration, and those that the partition needs."""
    needed = {} if is_named(config.data) else partition_rule(config).data_options()
    return {**needed, **config.data_params}


def partition_rule(config: Config) -> Partition:
    """Make the partition rule of a configuration."""
    section = config.partition
    if section.rule == "sites":
        raise UserError(
            "this configuration is for a federation across machines, so the data are at its sites; "
            "repeat the run with `flwr run` and the federation's app"
        )
    params = dict(section.params)
    takes_clients = any(spec.name == "clients" for spec in fields(partition_class(section.rule)))
    if takes_clients or section.clients is not None:
        params["clients"] = section.clients or DEFAULT_CLIENTS
    return make_partition(section.rule, **params)


def prepare(
    config: Config,
    given: Federation | None = None,
    method: str | Method | Part | None = None,
    model: nn.Module | None = None,
) -> Prepared:
    """Resolve the choices that `config` leaves open, and check them.

    A federation (`given`), a method or a model that is passed replaces the one that `config` names. A method that is
    passed also replaces the method's parameters. In the resolved configuration, four keys may keep `auto`: `head` for
    the model's own head, `task` for a single-label task, `engine` for a long run on a CPU (see `choose_engine`), and
    `compile`, which is not resolved.
    """
    chosen = make_method(config.method, config.method_params) if method is None else make_method(method)
    devices = choose_devices(config.device)
    fed = build_federation(config) if given is None else given
    if config.server_data:
        fed = fed.give_server(config.server_data)
    if config.client_test:
        fed = fed.hold_out(config.client_test)
    check_participants(config.clients_per_round, fed.clients)
    require_task(config.task, chosen, fed.dataset)
    require_batches(config, fed.dataset)
    chosen, class_weights = _weigh_classes(chosen, config, fed.dataset)
    shape = data_shape(fed.dataset)
    name = suitable_model(fed.dataset) if config.model == "auto" else config.model
    head = _choose_head(config, chosen, model)
    module = make_model(name, shape, config.seed, head) if model is None else adapted_model(model, shape)
    init_report = None
    if config.init is not None:
        from fedskew.models.weights import start_from  # few runs need it

        module, init_report = start_from(config.init, module, config.init_sha256)
    trained, sample = module, model_input(fed.dataset, module)
    if config.train != "all":
        trained, sample = _trained_part(config, chosen, module, sample)
    check_model(chosen, trained, fed.classes)
    if config.example_noise is not None:
        require_example_privacy(chosen, trained, sample)
    _check_settings(config, chosen, fed.dataset, module)
    resolved = replace(
        config,
        data_params=dict(fed.dataset.in_memory) or config.data_params,
        class_weights=class_weights,
        # `auto` is not part of the hash, so runs from before the key `task` keep their folders
        task="auto" if fed.dataset.task.name == "single-label" else fed.dataset.task.name,
        partition=_describe_split(fed, config),
        model=name if model is None else type(own_module(model)).__name__,
        head=head,
        init_sha256=None if init_report is None else init_report.sha256,
        method=chosen.name,
        method_params=_with_lists(chosen.params),
        engine=choose_engine(config.engine, trained, sample, devices[0], _cpu_seconds(config, fed, trained, sample)),
        device=",".join(map(str, devices)),
        precision=_precision(config, chosen, devices[0]),
    )
    return Prepared(resolved, fed, chosen, module, init_report, _notices(config, resolved))


def _check_settings(config: Config, method: Method, dataset: Dataset, module: nn.Module) -> None:
    """Refuse settings that the method, the data, the model or the installation do not allow."""
    if config.eval_local and method.personal is not None and not method.personal.has_global_model:
        raise UserError(
            f"eval_local compares the global model before and after local training, but method {method.name!r} has no "
            "global model; expected client_test, which tests every client's own model"
        )
    if method.server.needs_server_data and not config.server_data:
        raise UserError(
            f"method {method.name!r} needs samples at the server; expected server_data, such as --server-data 0.02"
        )
    if config.optimizer not in SGD_OPTIMIZERS and any(m.needs_sgd for part in method.parts for m in part.members):
        raise UserError(
            f"method {method.name!r} requires local SGD, but optimizer is {config.optimizer!r}; "
            f"expected {' or '.join(SGD_OPTIMIZERS)}"
        )
    if method.weighting is not None and config.average != "samples":
        raise UserError(
            f"average is {config.average!r}, but method {method.name!r} sets the weights itself; expected 'samples'"
        )
    positive_class(config, dataset)  # raises if there is no such class
    if config.save_predictions and find_spec("pyarrow") is None:
        raise UserError("save_predictions needs pyarrow: install fedskew[data]")
    stages = method.stages(config.rounds, config.local_epochs, {})  # raises if one sends or reveals more than declared
    if not has_features(module) and _needs_features(method, stages):
        raise UserError(
            f"method {method.name!r} needs features, but {type(module).__name__} has no separate encoder; "
            "use a fedskew.Classifier(encoder, head)"
        )


def _needs_features(method: Method, stages: Sequence[Stage]) -> bool:
    """Return whether a part of the method, or of a stage that is known before training, needs features."""
    parts = (*method.members, *(part for stage in stages for part in stage.parts))
    return any(part.needs_features for part in parts)


def _choose_head(config: Config, method: Method, model: nn.Module | None) -> str:
    """Return the head that the configuration or the method names. A linear head is recorded as `auto`."""
    needed = method.head
    if needed not in ("", "linear", *HEADS):
        hint = did_you_mean(needed, HEADS)
        raise UserError(
            f"method {method.name!r} chooses the head {needed!r};{hint} expected linear, {', '.join(HEADS)}"
        )
    head = config.head if config.head != "auto" or model is not None else needed or "auto"
    if needed and model is None and head != needed:
        raise UserError(f"head is {head!r}, but method {method.name!r} is made for {needed!r}; expected auto")
    if model is not None and head not in ("auto", "linear"):
        raise UserError(f"head is {head!r}, but the model is an object, which has its own; expected auto")
    if head in TWO_HEADS and needed != head:
        raise UserError(f"head is {head!r}, but method {method.name!r} trains one head; expected auto")
    return "auto" if head == "linear" else head


def _precision(config: Config, method: Method, device: torch.device) -> str:
    """Choose the number format. A method that computes its head in closed form gets float32 in place of bf16.

    The logits of such a head are often closer to each other than bf16 resolves.
    """
    chosen = choose_precision(config.precision, device)
    trains = not isinstance(method.objective, Schedule) or method.objective.trains_clients
    return chosen if trains or chosen != "bf16" else "float32"


def _notices(config: Config, resolved: Config) -> tuple[str, ...]:
    """Name the number format, unless it was requested or is float32 by default."""
    if config.precision == "bf16" and resolved.precision == "float32":
        return (f"number format: float32, because bf16 is too coarse for the logits of {resolved.method}",)
    if config.precision == resolved.precision or resolved.precision == "float32":
        return ()
    return (
        f"number format: {resolved.precision}, the default on this GPU; --precision float32 rounds less but is slower",
    )


def check_model(method: Method, module: nn.Module, classes: int) -> None:
    """Refuse a model that a part of the method cannot work with."""
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for part in method.parts:
        _check_part(part, method, params, classes)
        if isinstance(part, Objective):
            check_companions(part)
    if method.personal is None:
        return
    check_personal(method.personal, module)
    if method.server.needs_server_data and not method.personal.has_global_model:
        raise UserError(
            f"method {method.name!r} tests the global model on the server's samples, but has no global model; "
            "expected a personal part with one, such as ditto"
        )
    try:
        shared = shared_tensors(params, personal_names(method.personal, module))
        _check_part(method.server, method, shared, classes)
    except UserError as error:
        raise UserError(
            f"the server rule of method {method.name!r} needs tensors that stay on the clients: {error}"
        ) from error


def _check_part(part: Part, method: Method, params: Mapping[str, Tensor], classes: int) -> None:
    """Refuse a model that the part cannot work with. A linear head has one row per class."""
    rows = params.get("head.weight")
    if part.needs_linear_head and (rows is None or rows.dim() != 2 or len(rows) != classes):
        raise UserError(
            f"method {_name_of_part(part, method)!r} needs a model that ends in a linear layer 'head'; choose one of "
            "fedskew's models, with the default head"
        )
    part.check(params, classes)


def require_example_privacy(method: Method, model: nn.Module, sample: Tensor) -> None:
    """Refuse a method or a model that example-level privacy does not cover. `sample` is one input of the model."""
    from fedskew.engine.private_gradient import require_sample_gradients  # few runs need it
    from fedskew.methods.example_privacy import require_private_gradients

    require_private_gradients(method)
    require_sample_gradients(model, sample)


def require_task(task: str, method: Method, dataset: Dataset) -> None:
    """Refuse data whose task is not the configuration's, and a method that cannot learn several labels per sample."""
    found = dataset.task.name
    if task not in ("auto", found):
        raise UserError(f"task is {task!r}, but the labels of {dataset.name!r} are {found}; expected auto or {found}")
    unfit = next((member for member in method.members if not member.multi_label), None)
    if found == "multi-label" and unfit is not None:
        fitting = [entry.name for entry in matching_entries() if all(part.multi_label for part in entry.parts)]
        raise UserError(
            f"method {_name_of_part(unfit, method)!r} needs one class per sample, but {dataset.name!r} has several "
            f"labels per sample; expected {', '.join(fitting)}"
        )


def require_batches(config: Config, dataset: Dataset) -> None:
    """Refuse balanced batches of samples with several labels."""
    if config.batches == "balanced" and dataset.task.name == "multi-label":
        raise UserError(
            f"batches is 'balanced', but {dataset.name!r} has several labels per sample, so drawing a sample for one "
            "label also draws its others; expected shuffled, perhaps with class_weights balanced"
        )


def _weigh_classes(method: Method, config: Config, dataset: Dataset) -> tuple[Method, str | dict[str, float] | None]:
    """Return the method with its class weights, and the setting with the weights of a file in place of its path."""
    if config.class_weights is None:
        return method, None
    from fedskew.experiment.class_weights import resolve_class_weights, with_class_weights  # few runs need it

    setting = resolve_class_weights(config.class_weights, dataset.classes)
    return with_class_weights(method, setting, dataset), setting


def _name_of_part(part: Part, method: Method) -> str:
    """Return which method has this part, if `method` combines several."""
    names = [name for name in method.name.split("+") if name in METHODS and type(part) in METHODS[name].parts]
    return names[0] if names else method.name


def _trained_part(config: Config, method: Method, module: nn.Module, sample: Tensor) -> tuple[nn.Module, Tensor]:
    """Return the part that clients train, as a model, and its input for this sample.

    Refuse a model, a method or an augmentation that does not fit the setting `train`.
    """
    if not has_features(module):
        raise UserError(
            f"train is {config.train!r}, but {type(module).__name__} has no separate encoder; expected 'all', or a "
            "fedskew.Classifier(encoder, head)"
        )
    if isinstance(method.objective, Schedule) and method.objective.trains_encoders:
        raise UserError(f"method {method.name!r} needs trained encoders; expected train: all")
    from fedskew.experiment.trained_part import trained_model  # few runs need it

    part = trained_model(config, module)
    if method.personal is not None:
        _require_shared_part(config, method, method.personal, module, part)
    if config.train == "lora":
        return part, sample
    if config.augment:
        raise UserError(
            f"augment is {', '.join(config.augment)}; expected none with train: head, because the features of each "
            "sample are computed once"
        )
    with torch.no_grad():
        return part, copy.deepcopy(module).eval().encoder(sample)


def _require_shared_part(
    config: Config, method: Method, personal: Personal, module: nn.Module, part: nn.Module
) -> None:
    """Refuse a trained part that lacks the layers that stay on the clients, or consists only of these."""
    check_personal(personal, module)
    try:
        check_personal(personal, part)
    except UserError as error:
        raise UserError(
            f"train is {config.train!r}, but method {method.name!r} keeps {', '.join(personal.keeps())} on the clients "
            f"and shares other layers, and {config.train!r} does not train both; expected train: all"
            + (" or lora" if config.train == "head" else "")
        ) from error


def _cpu_seconds(config: Config, fed: Federation, module: nn.Module, sample: Tensor) -> float:
    """Estimate how long the run takes on a CPU."""
    participants = min(config.clients_per_round or fed.clients, fed.clients)
    passes = config.rounds * config.local_epochs * participants
    steps = passes * float(np.ceil(fed.sizes / config.batch_size).mean())
    return estimated_seconds(module, sample, steps, passes * float(fed.sizes.mean()))


def model_input(dataset: Dataset, module: nn.Module) -> Tensor:
    """One input of this dataset, in the model's number format."""
    dtype = torch.int64 if dataset.kind == "text" else next(module.parameters()).dtype
    return torch.tensor(dataset.train.x[:1]).to(dtype)


def data_shape(dataset: Dataset) -> DataShape:
    """The shape of a sample and the number of classes. A model is made for these."""
    fields = tuple(Field(*field) for field in dataset.fields)
    return DataShape(dataset.input_shape, len(dataset.classes), dataset.vocabulary, fields)


def suitable_model(dataset: Dataset) -> str:
    """Choose a small model for the data, for `model: auto`. Images of at least 16×16 pixels get a CNN."""
    if dataset.kind == "text":
        return "fasttext"
    if dataset.kind == "image" and min(dataset.input_shape[1:]) >= 16:
        return "cnn"
    return "dnn"


def positive_class(config: Config, dataset: Dataset) -> int | None:
    """The index of the class that `positive` names. None if `positive` is not set."""
    if config.positive is None:
        return None
    classes, several = dataset.classes, dataset.task.name == "multi-label"
    found = "several labels per sample" if several else f"{len(classes)} classes, not 2"
    expect(len(classes) == 2 and not several, "positive", config.positive, f"no value, because the data have {found}")
    if config.positive not in classes:
        raise unknown("positive class", config.positive, classes)
    return classes.index(config.positive)


def default_threads(config: Config) -> int | None:
    """Return 1 for the stacked engine on a CPU, unless OMP_NUM_THREADS is set. Otherwise None: torch's default.

    Stacked small networks gain nothing from a second thread, and lose much if the other cores are busy. The number is
    fixed, not measured: it decides the order of sums, and a resumed run must repeat sums bit for bit.
    """
    single = config.engine == "stacked" and config.device == "cpu" and not os.environ.get("OMP_NUM_THREADS")
    return 1 if single else None


def check_participants(clients_per_round: int | None, clients: int) -> None:
    """Refuse more clients per round than the federation has."""
    requested = clients_per_round or 1
    expect(requested <= clients, "clients_per_round", requested, f"at most {clients}, the number of clients")


def refuse_data_settings(settings: Mapping[str, Any], data: object, partition: Partition | None = None) -> None:
    """Refuse settings that have no effect, because the given `data` or `partition` replaces them.

    `partition.seed` is left to `refuse_other_split`.
    """
    reasons: dict[str, str] = {}
    if data is not None:
        reasons["data"] = "the data are given; for data with options, pass what fedskew.load returns"
    if partition is not None:
        require_rule(partition)
        reasons["partition"] = "a partition is given; set the parameters of that rule"
    if isinstance(data, Federation):
        reason = "the federation already has its data and its split; make another one, with fedskew.federation"
        reasons = {"data": reason, "partition": reason}
    for key, value in settings.items():
        reason = reasons.get(key.partition(".")[0], "")
        if reason and key != "partition.seed":
            raise UserError(f"{key} is {value!r}, but {reason}")


def refuse_other_split(config: Config, fed: Federation) -> None:
    """Refuse a `partition.seed` that is not the seed of the federation's split."""
    if (seed := config.partition.seed) not in (None, fed.seed):
        raise UserError(
            f"partition.seed is {seed}, but the federation is already split with seed {fed.seed}; expected {fed.seed} "
            f"or none; in a comparison or a race, {fed.seed} gives all seeds this split; with none, each has its own"
        )


def _describe_split(fed: Federation, config: Config) -> PartitionConfig:
    """Describe the split as a configuration. Its seed is None if it is the run's seed and `config` does not set it."""
    params = {key: value for key, value in fed.partition.items() if key not in ("name", "clients")}
    rule = str(fed.partition["name"])
    rule_sets_number = "clients" not in fed.partition and rule != "sites"  # for example a file of counts
    clients = None if rule_sets_number else fed.clients
    is_run_seed = config.partition.seed is None and fed.seed == config.seed
    return PartitionConfig(rule, clients, None if is_run_seed else fed.seed, params)


def _with_lists(params: Mapping[str, object]) -> dict[str, Any]:
    """Turn tuples into lists, because YAML has only lists."""
    return {name: _as_list(value) for name, value in params.items()}


def _as_list(value: object) -> Any:
    return [_as_list(v) for v in value] if isinstance(value, tuple) else value
