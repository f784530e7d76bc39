"""Users' own models, named `package.module:factory` or passed as objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

from torch import nn
from torch.nn.parameter import is_lazy

from fedskew.errors import UserError, unknown
from fedskew.models.adapter import adapt, own_module
from fedskew.models.base import DataShape, Factory
from fedskew.user_code import describe, import_user_module, importing_from_current_folder


def custom_factory(name: str) -> Factory:
    """Return a factory that calls the user's factory and tries its model on two samples."""
    user_factory = _find_factory(name)

    def factory(data: DataShape) -> nn.Module:
        with importing_from_current_folder():
            model = _call_factory(user_factory, name, data)
            if not isinstance(model, nn.Module):
                raise UserError(f"model {name!r} returned a {type(model).__name__}; expected a torch.nn.Module")
            _check_tensors(model, name)
            return adapt(model, name, data)

    return factory


def adapted_model(model: object, data: DataShape) -> nn.Module:
    """Return the user's model in fedskew's form. Raise `UserError` if it does not accept these inputs."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is {model!r}; expected a model's name or a torch.nn.Module")
    name = type(own_module(model)).__name__
    _check_tensors(model, name)
    return adapt(model, name, data)


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


def _call_factory(factory: Callable[..., object], name: str, data: DataShape) -> object:
    try:
        if _takes_data_shape(factory):
            return factory(data)
        return factory(num_classes=data.classes) if _takes_number_of_classes(factory) else factory()
    except Exception as error:
        raise UserError(f"model {name!r} cannot be created for {data}: {describe(error)}") from error


def _takes_data_shape(factory: Callable[..., object]) -> bool:
    """Return whether the factory takes the `DataShape` as its first argument.

    That argument is called `inputs`, or has no default and another name than `num_classes`.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except ValueError:  # builtins without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not positional or positional[0].name == "num_classes":
        return False
    return positional[0].default is inspect.Parameter.empty or positional[0].name == "inputs"


def _check_tensors(model: nn.Module, name: str) -> None:
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"model {name!r} does not know the shape of {tensor_name!r} yet; call it with one batch of data first"
            )
        if tensor.is_complex():
            raise UserError(
                f"{tensor_name!r} of model {name!r} is complex; expected real tensors, which the model can combine "
                "with torch.view_as_complex"
            )
        if tensor._backward_hooks:
            raise UserError(
                f"{tensor_name!r} of model {name!r} has a hook for its gradient, which would not be called; "
                "expected no such hook"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"model {name!r} has no trainable parameter; expected at least one with requires_grad")


def _takes_number_of_classes(factory: Callable[..., object]) -> bool:
    """Return whether the factory takes `num_classes`. torchvision's and timm's do, often through `**kwargs`.

    A factory with `**kwargs` is taken for one of theirs if it has `weights` (torchvision) or `pretrained` (timm).
    """
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return False
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "num_classes" in parameters or (has_kwargs and bool({"weights", "pretrained"} & set(parameters)))
