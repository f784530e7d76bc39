"""Users' own models, named `package.module:factory` or passed as objects."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from fedskew.errors import UserError, unknown
from fedskew.models.base import DataShape, Factory
from fedskew.user_code import current_directory_importable, describe, import_user_module


def custom_factory(name: str) -> Factory:
    """Return a factory that calls the user's factory and checks its model on two samples of zeros."""
    user_factory = _find_factory(name)

    def factory(data: DataShape) -> nn.Module:
        with current_directory_importable():
            model = _call(user_factory, name, data)
            if not isinstance(model, nn.Module):
                raise UserError(f"model {name!r} returned a {type(model).__name__}; expected a torch.nn.Module")
            _check_trainable(model, name)
            _check_output(model, name, data)
        return model

    return factory


def check_model(model: object, data: DataShape) -> None:
    """Raise `UserError` if the object is not a model, or does not accept these inputs."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {model!r}; expected a model's name or a torch.nn.Module")
    name = type(model).__name__
    _check_trainable(model, name)
    _check_output(copy.deepcopy(model).to("cpu", torch.get_default_dtype()), name, data)


def _find_factory(name: str) -> Callable[..., object]:
    module, attribute = import_user_module("model", name, "factory")
    factory = getattr(module, attribute, None)
    if factory is None:
        raise unknown(f"factory in module {module.__name__!r}:", attribute, _factories(module))
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(
            f"model {name!r} is a {type(factory).__name__}; expected a function or class that returns a model"
        )
    found: Callable[..., object] = factory
    return found


def _factories(module: ModuleType) -> list[str]:
    """List the functions and classes that the user's module defines, as suggestions."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _call(factory: Callable[..., object], name: str, data: DataShape) -> object:
    arguments = (data,) if _takes_data_shape(factory) else ()
    try:
        return factory(*arguments)
    except Exception as error:
        raise UserError(f"model {name!r} cannot be created for {data}: {describe(error)}") from error


def _takes_data_shape(factory: Callable[..., object]) -> bool:
    """Return whether to pass the `DataShape`: the factory requires an argument, or its first one is called `inputs`."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except ValueError:  # builtins without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and (positional[0].default is inspect.Parameter.empty or positional[0].name == "inputs")


def _check_trainable(model: nn.Module, name: str) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model {name!r} has no trainable parameter; expected at least one with requires_grad")


def _check_output(model: nn.Module, name: str, data: DataShape) -> None:
    samples = torch.zeros(2, *data.shape, dtype=torch.int64 if data.vocabulary else torch.get_default_dtype())
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            logits = model(samples)
    except Exception as error:
        raise UserError(f"model {name!r} does not accept inputs of shape {data.shape}: {describe(error)}") from error
    finally:
        for module, training in modes.items():
            module.training = training
    expected = (2, data.classes)
    returned = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if returned != expected:
        raise UserError(f"model {name!r} returns {returned} for a batch of 2; expected {expected}, samples × classes")
