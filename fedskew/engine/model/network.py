"""A model as a pure function of named tensors, for one client and for a stack of clients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedskew.engine import kernels
from fedskew.engine.model.layers import Between, KeyedDropout, LayerContext, ValidBatchNorm
from fedskew.engine.model.lifting import lifted_model, vmap_of_a_model
from fedskew.engine.model.stacked_layers import StackedForward, StackedModel, has_own_forward, read_only, rule
from fedskew.errors import UserError
from fedskew.methods.parts import Mode, Outputs, Tensors
from fedskew.models.base import Classifier, has_features


@dataclass(frozen=True)
class ModelState:
    """The tensors of one model: trained parameters, and buffers such as BatchNorm's statistics.

    In a `RoundResult` and in stacks of clients, the tensors have a leading axis of clients.
    """

    params: Tensors
    buffers: Tensors


class Network:
    """A model whose trained parameters, buffers and randomness are arguments."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None
    ) -> None:
        self._model = copy.deepcopy(model).to(dtype)
        self._dtype = dtype
        self._autocast = autocast
        self._context = LayerContext()
        # `_stackable` is for padded batches and stacks of clients: its BatchNorm leaves out padding.
        self._plain, self._stackable = (
            _WithFeatures(self._with_keyed_dropout(copy.deepcopy(self._model)), self._context) for _ in range(2)
        )
        for name, layer in self._stackable.model.named_modules():
            is_norm = isinstance(layer, _BatchNorm) and type(layer).forward is _BatchNorm.forward
            if is_norm and not has_own_forward(layer):
                layer.forward = ValidBatchNorm(layer, self._context, name).forward

        for layer in (*self._plain.modules(), *self._stackable.modules()):
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False  # the local optimisers take dense gradients
        self._plain.train()
        self._has_tied_tensors = _has_tied_tensors(self._model)
        self._changes_inputs = False
        """Whether the model writes into its inputs. `smallest_batch` finds out."""
        self._changes_parameters = False
        """Whether the model writes into its parameters, as an embedding with `max_norm` does."""
        self._hooks_gradients = any(m._backward_hooks or m._backward_pre_hooks for m in self._model.modules())
        self._convolves = any(isinstance(m, nn.Conv2d) for m in self._model.modules())
        self._lifted: dict[Mode, StackedModel | None] = {}
        self._mixes: dict[Mode, bool] = {}
        """The answers of `mixes_rows`."""
        self._evaluates_stacked: bool | None = None
        """Whether `logits` uses the program over stacked clients. The first call finds out."""

    def to(self, device: torch.device) -> Network:
        for module in (self._model, self._plain, self._stackable):
            module.to(device)
        return self

    @property
    def resolution(self) -> float:
        """The relative rounding error of one operation, in the network's number format."""
        return torch.finfo(self._autocast or self._dtype).eps

    def state(self) -> ModelState:
        """Copy the model's buffers and trained parameters by name. Frozen parameters are left out."""
        trained = {n: p.detach().clone() for n, p in sorted(self._model.named_parameters()) if p.requires_grad}
        return ModelState(trained, {n: b.detach().clone() for n, b in sorted(self._model.named_buffers())})

    def module(self, state: ModelState) -> nn.Module:
        """Return an ordinary PyTorch module with the given tensors, in eval mode."""
        module = copy.deepcopy(self._model).eval()
        set_tensors(module, {**state.params, **state.buffers})
        return module

    def forward(
        self,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        mode: Mode = "eval",
        key: Tensor | None = None,
        between: Between | None = None,
    ) -> Outputs:
        """Return logits and features of a batch. Only train mode changes `buffers`.

        `between` changes the features before the head.
        """
        self._context.between = between
        written = buffers if mode == "train" else {name: b.clone() for name, b in buffers.items()}
        try:
            outputs, new = self._call(self._plain, params, written, self._own_inputs(x), mode, key, None)
        finally:
            self._context.between = None
        written.update(new)
        return outputs

    def forward_padded(
        self, params: Tensors, buffers: Tensors, x: Tensor, valid: Tensor, mode: Mode, key: Tensor | None = None
    ) -> tuple[Outputs, Tensors]:
        """Do the same as `forward` for a padded batch, but return new buffers and leave `buffers` as they are.

        `valid` marks the rows that are not padding. Only BatchNorm may change buffers: its new ones are in `_context`.
        """
        outputs, new = self._call(self._stackable, params, buffers, x, mode, key, valid)
        if new:
            raise RuntimeError("the model writes into its buffers")
        return outputs, {**buffers, **self._context.buffers}

    def forward_stacked(
        self,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        valid: Tensor | None,
        mode: Mode,
        keys: Tensor,
        between: Between | None = None,
    ) -> tuple[Outputs, Tensors]:
        """Do the same as `forward_padded` for a stack of clients. All tensors have a leading axis of clients.

        `valid` is None if there is no padding.
        """
        if self._hooks_gradients:
            raise RuntimeError("the model has backward hooks")
        lifted, x = self._lifted_in(mode), self._own_inputs(x)
        if lifted is None:
            if between is not None:
                raise RuntimeError(
                    "the method changes features, which needs a model whose layers can be stacked one by one"
                )
            valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
            return self._stacked_by_vmap(params, buffers, x, valid, mode, keys)
        with self._precision(x.device), read_only(buffers.values()):
            (logits, features), statistics = lifted(_prefixed({**params, **buffers}), x, valid, keys, between)
        new = {name.removeprefix(_PREFIX): t for name, t in statistics.items()}
        return self._outputs(logits, features), {**buffers, **new}

    def logits(self, model: ModelState, x: Tensor) -> Tensor:
        """Return logits in eval mode.

        On a GPU, a model with convolutions uses the kernels for stacked clients if possible, because they are faster.
        """
        if self._evaluates_stacked is None:
            self._evaluates_stacked = self.prefers_channels_last(x) and self._can_evaluate_stacked(model, x)
        if self._evaluates_stacked:
            return self._stacked_logits(model, x)
        return self.forward(model.params, model.buffers, x).logits

    def _can_evaluate_stacked(self, model: ModelState, x: Tensor) -> bool:
        try:
            if self._lifted_in("eval") is None:
                return False
            self._stacked_logits(model, x)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a user's code may fail in any way under `vmap`
            return False
        return True

    def _stacked_logits(self, model: ModelState, x: Tensor) -> Tensor:
        params, buffers = ({n: t.unsqueeze(0) for n, t in part.items()} for part in (model.params, model.buffers))
        images = x.contiguous(memory_format=torch.channels_last).unsqueeze(0)
        keys = torch.zeros(1, dtype=torch.int64, device=x.device)
        return self.forward_stacked(params, buffers, images, None, "eval", keys)[0].logits[0]

    def _lifted_in(self, mode: Mode) -> StackedModel | None:
        self._stackable.train(mode == "train")
        if mode not in self._lifted:
            self._lifted[mode] = None if self._hooks_gradients else lifted_model(self._stackable)
        return self._lifted[mode]

    def _stacked_by_vmap(
        self, params: Tensors, buffers: Tensors, x: Tensor, valid: Tensor, mode: Mode, keys: Tensor
    ) -> tuple[Outputs, Tensors]:
        def one_client(
            params: Tensors, buffers: Tensors, x: Tensor, valid: Tensor, key: Tensor
        ) -> tuple[Tensors, Tensors]:
            out, new = self.forward_padded(params, buffers, x, valid, mode, key)
            return out.tensors(), new

        with vmap_of_a_model(buffers.values()):
            tensors, new = torch.func.vmap(one_client)(params, buffers, x, valid, keys)
        return Outputs.from_tensors(tensors), {name: t.detach() for name, t in new.items()}

    def _call(
        self,
        module: nn.Module,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        mode: Mode,
        key: Tensor | None,
        valid: Tensor | None,
    ) -> tuple[Outputs, Tensors]:
        """Return the outputs, and the buffers to which the model assigned new tensors."""
        training = mode == "train"
        if module.training != training:  # setting it anyway would visit every layer, which is slow for a small model
            module.train(training)
        self._context.key, self._context.dropouts = key, 0
        self._context.valid, self._context.buffers = valid, {}
        tensors = _prefixed({**params, **buffers})
        with self._precision(x.device):
            logits, features = torch.func.functional_call(module, tensors, (x,), tie_weights=self._has_tied_tensors)
        new = {n: t.detach() for n, b in buffers.items() if (t := tensors[_PREFIX + n]) is not b}
        return self._outputs(logits, features), new

    def protected(self, params: Tensors) -> Tensors:
        """Copy the parameters of a frozen model, if the model's code would write into them."""
        return {name: p.clone() for name, p in params.items()} if self._changes_parameters else params

    def _own_inputs(self, x: Tensor) -> Tensor:
        """Copy the inputs if the model writes into them, because frozen models and later gradients use them, too."""
        return x.clone() if self._changes_inputs else x

    def _outputs(self, logits: Tensor, features: Tensor | None) -> Outputs:
        if self._autocast is not None:
            logits, features = logits.float(), None if features is None else features.float()
        return Outputs(logits, features)

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self._autocast)

    def prefers_channels_last(self, samples: Tensor) -> bool:
        """Return whether stacked inputs should have their channels last in memory."""
        return self._convolves and kernels.supported(samples, samples)

    def mixes_rows(self, mode: Mode, samples: Tensor) -> bool:
        """Return whether a sample's output depends on its position in the batch or on the batch's other samples."""
        if mode not in self._mixes:
            known = any(_layer_mixes_rows(layer, mode) for layer in self._stackable.modules())
            self._mixes[mode] = known or self._mixes_on_trial(mode, samples)
        return self._mixes[mode]

    @torch.no_grad()
    def _mixes_on_trial(self, mode: Mode, samples: Tensor) -> bool:
        state = self.state()
        key = torch.zeros((), dtype=torch.int64, device=samples.device)

        def logits(x: Tensor) -> Tensor:
            return self.forward(state.params, dict(state.buffers), x, mode, key).logits

        together = logits(samples)
        apart = torch.cat([logits(samples[row : row + 1]) for row in range(len(samples))])
        # In float32, rounding errors are far below this tolerance. In bf16, they may exceed it, and the answer is then
        # wrongly True. This only costs time: frozen models run on one batch per client instead of one large batch.
        return not torch.allclose(together, apart, rtol=0, atol=1e-2 * float(apart.abs().max()))

    def rows_keep_masks(self, samples: Tensor) -> bool:
        """Return whether a sample's dropout masks are the same in a longer batch, with other samples after it.

        A mask's numbers depend on their positions. So masks are only the same if the batch is their first axis.
        """
        layers = [m for m in self._plain.modules() if isinstance(m, KeyedDropout) and 0 < m.p < 1]
        if not layers:
            return True
        shapes, longer = (self._mask_shapes(layers, x) for x in (samples, torch.cat([samples, samples])))
        return all(one[1:] == other[1:] for one, other in zip(shapes, longer, strict=True))

    @torch.no_grad()
    def _mask_shapes(self, layers: Sequence[KeyedDropout], x: Tensor) -> list[torch.Size]:
        """Return the shapes of the masks that these layers draw in a forward pass, in order."""
        state, shapes = self.state(), list[torch.Size]()
        hooks = [m.register_forward_pre_hook(lambda m, inputs: shapes.append(m.mask_shape(*inputs))) for m in layers]
        try:
            self.forward(state.params, state.buffers, x, "train", torch.zeros((), dtype=torch.int64, device=x.device))
        finally:
            for hook in hooks:
                hook.remove()
        return shapes

    def smallest_batch(self, sample: Tensor) -> int:
        """Return the smallest batch size for training: 2 if a normalisation cannot train on one sample, else 1."""
        state, x = self.state(), sample[:1].clone()
        devices = [sample.device] if sample.device.type == "cuda" else []
        version, versions = x._version, [p._version for p in state.params.values()]
        try:
            with torch.random.fork_rng(devices), _without_recomputation():
                self.forward(state.params, state.buffers, x, "train", torch.zeros((), dtype=torch.int64))
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return 2
        finally:
            self._changes_inputs = self._changes_inputs or x._version != version
            self._changes_parameters |= versions != [p._version for p in state.params.values()]
        return 1

    def _with_keyed_dropout(self, model: nn.Module) -> nn.Module:
        for name, layer in list(model.named_modules(remove_duplicate=False)):
            # A subclass may have a forward pass of its own.
            is_dropout = isinstance(layer, _DROPOUTS) and type(layer).forward in [kind.forward for kind in _DROPOUTS]
            if name and is_dropout and not has_own_forward(layer):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, KeyedDropout(layer, self._context))
        return model


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""The layers that keyed dropout replaces."""


@contextlib.contextmanager
def _without_recomputation() -> Iterator[None]:
    """Refuse `torch.utils.checkpoint` within a `with` block, and with it all hooks for saved tensors.

    In the backward pass, a checkpoint calls layers again. They would then have the module's tensors, not the client's.
    """
    reason = (
        "the model has hooks for tensors that are saved for the gradient, such as those of torch.utils.checkpoint, "
        "which would call layers again with other parameters than the client's; expected a model without such hooks"
    )
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(reason):
            yield
    except RuntimeError as error:
        if str(error) != reason:
            raise
        raise UserError(reason) from error


@torch.no_grad()
def set_tensors(module: nn.Module, tensors: Tensors) -> None:
    """Copy tensors into the module's parameters and buffers of the same names.

    `load_state_dict` would leave out buffers that are not part of the module's state dict.
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in own.keys() & tensors.keys():
        own[name].copy_(tensors[name])


def _has_tied_tensors(model: nn.Module) -> bool:
    """Return whether a tensor has several names.

    Without this answer, `functional_call` would look for such tensors at every call, which is slow for a small model.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return len({id(tensor) for _, tensor in tensors}) < len(tensors)


def _layer_mixes_rows(layer: nn.Module, mode: Mode) -> bool:
    if isinstance(layer, _BatchNorm):
        return mode == "train" or layer.running_mean is None
    return mode == "train" and isinstance(layer, KeyedDropout)


_PREFIX = "model."


def _prefixed(tensors: Tensors) -> Tensors:
    """Name the tensors as in `_WithFeatures`."""
    return {_PREFIX + name: t for name, t in tensors.items()}


class Perturbation(nn.Module):
    """A layer between the encoder and the head, in which an objective may change the features."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self._context = context

    def forward(self, features: Tensor) -> Tensor:
        return features if self._context.between is None else self._context.between(features)


@rule(Perturbation)
def _perturb(forward: StackedForward, name: str, layer: Perturbation, features: Tensor) -> Tensor:  # noqa: ARG001
    return features if forward.between is None else forward.between(features)


class _WithFeatures(nn.Module):
    """Makes `forward` return logits and features. The features are None if the logits are not `head(encoder(x))`."""

    def __init__(self, model: nn.Module, context: LayerContext) -> None:
        super().__init__()
        self.model = model
        self.perturbation = Perturbation(context)
        self._is_classifier = has_features(model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._is_classifier:
            model = cast(Classifier, self.model)
            features = model.encoder(x)
            return model.head(self.perturbation(features)), features
        return self.model(x), None
