"""The gradient of a training loss at weights of one's choice, without touching the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["LossFunction", "TrainingLoss", "at_least_float32", "trainable_parameters"]

HALF_PRECISION = (torch.float16, torch.bfloat16)

LossFunction = Callable[[nn.Module, Any], Tensor]
T = TypeVar("T")


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name; a tied one once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def at_least_float32(tensor: Tensor) -> Tensor:
    """A tensor of half precision as float32; any other as it is."""
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor


class TrainingLoss(nn.Module):
    """``loss_fn(model, batch)`` as a function of the model's weights.

    Everything random or cumulative is off while it is computed: dropout and the like as in evaluation, while BatchNorm
    uses the statistics of the batch and leaves the running ones alone. No parameter, buffer or mode of the model is
    changed, also when an exception flies.

    Args:
        model: any module.
        loss_fn: ``loss_fn(model, batch)`` is the mean training loss of a batch, a scalar.
        full_precision: compute in float32 where the model is of a lower type, or the caller's autocast would have it:
            parameters, buffers and the tensors that the model is called with are converted.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, full_precision: bool = False) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = (loss_fn,)  # in a tuple, so that a loss that is itself a module is not taken for a part of this
        self.full_precision = full_precision

    def value(self, weights: dict[str, Tensor], batch: Any) -> Tensor:
        """The loss of a batch, a scalar without graph; activations are not kept.

        Args:
            weights: what to use in the place of the model's parameters, by name.
            batch: passed to the loss function.

        Raises:
            ValueError: the loss is no scalar.
        """

        def loss() -> Tensor:
            with torch.no_grad():
                return self._loss(batch)

        return self._at(weights, loss, twice=False)

    def gradient(
        self, weights: dict[str, Tensor], batch: Any, *, differentiable: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch, and its gradient.

        Args:
            weights: what to use in the place of the model's parameters, by name; each requires a gradient.
            batch: passed to the loss function.
            differentiable: build the graph of the gradient, so that it can be differentiated once more. Attention
                then goes through PyTorch's math kernel, since fused kernels have no second derivative.

        Returns:
            The loss (a scalar without graph), and one gradient for each of ``weights``, in their order; zero for
            one that the loss does not depend on.

        Raises:
            ValueError: the loss is no scalar, or depends on no weight.
        """
        leaves = list(weights.values())

        def loss_and_gradients() -> tuple[Tensor, list[Tensor]]:
            loss = self._loss(batch)
            gradients = [None]
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, leaves, create_graph=differentiable, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise ValueError(
                    "loss_fn(model, batch) must return a loss that depends on the parameters of the model "
                    f"({type(self.model).__name__}) that it is given, but this one depends on none"
                )
            return loss.detach(), _dense(gradients, leaves)

        return self._at(weights, loss_and_gradients, twice=differentiable)

    def second_gradient(
        self, weights: dict[str, Tensor], gradients: Sequence[Tensor], direction: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradient of <gradients, direction>: the Hessian times the direction.

        Args:
            weights: as given to :meth:`gradient`.
            gradients: what it returned, differentiable.
            direction: one constant tensor for each of them.
        """
        leaves = list(weights.values())
        curved = [(g, d) for g, d in zip(gradients, direction, strict=True) if g.requires_grad]
        if not curved:  # the loss is linear in every weight
            return _dense([None] * len(leaves), leaves)
        outputs, grad_outputs = zip(*curved, strict=True)
        grad = functools.partial(torch.autograd.grad, outputs, leaves, grad_outputs, allow_unused=True)
        return _dense(self._at(weights, grad, twice=True), leaves)

    def _loss(self, batch: Any) -> Tensor:
        loss = self._loss_fn[0](self.model, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn(model, batch) must return a scalar tensor, not {what}")
        return loss

    def _at(self, weights: dict[str, Tensor], compute: Callable[[], T], *, twice: bool) -> T:
        """What ``compute`` returns with ``weights`` in their place; it can be differentiated, ``twice`` where need be.

        Backward passes belong in here too: a model that checkpoints its activations runs parts of its forward pass
        again in them.
        """
        given = {id(parameter): weights[name] for name, parameter in self.model.named_parameters() if name in weights}
        given |= {id(buffer): buffer.clone() for buffer in self.model.buffers()}
        if self.full_precision:
            given = {id(parameter): parameter for parameter in self.model.parameters()} | given
            given = {key: at_least_float32(tensor) for key, tensor in given.items()}
        torch.clear_autocast_cache()  # of the caller's autocast: the weights may have changed in place
        modes, kernels = _evaluation_with_batch_statistics(self.model), _differentiable_kernels(self.model, twice)
        precision = _full_precision(self.model) if self.full_precision else contextlib.nullcontext()
        with modes, kernels, precision, torch.enable_grad():
            return functional_call(self, self._placed(given), (compute,), tie_weights=False)

    def _placed(self, given: dict[int, Tensor]) -> dict[str, Tensor]:
        """What to use for each parameter and buffer, by the name of its place; a module that occurs twice counts once.

        ``functional_call`` would find tied weights by itself, but leaves the given ones in a module with two names.
        """
        return {
            f"{prefix}.{name}": given[id(tensor)]
            for prefix, module in self.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if id(tensor) in given
        }

    def forward(self, compute: Callable[[], T]) -> T:
        """Called by :meth:`_at`, with the weights in their place."""
        return compute()


@contextlib.contextmanager
def _evaluation_with_batch_statistics(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = isinstance(module, _NormBase)
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def _differentiable_kernels(model: nn.Module, twice: bool) -> Iterator[None]:
    """No kernel without derivative (cuDNN's recurrent ones in evaluation), nor second derivative (fused attention)."""
    with contextlib.ExitStack() as stack:
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if twice:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextlib.contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """No autocast, and what the model is given in half precision as float32."""

    def convert(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(_converted, args)), {name: _converted(value) for name, value in kwargs.items()}

    with contextlib.ExitStack() as stack:
        for device in {parameter.device.type for parameter in model.parameters()}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(model.register_forward_pre_hook(convert, prepend=True, with_kwargs=True))
        yield


def _converted(value: Any) -> Any:
    return at_least_float32(value) if isinstance(value, Tensor) else value


def _dense(gradients: Sequence[Tensor | None], weights: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for a gradient that is missing; a sparse one (of ``nn.Embedding``) with all its zeros."""
    pairs = zip(gradients, weights, strict=True)
    return [torch.zeros_like(weight) if gradient is None else gradient.to_dense() for gradient, weight in pairs]
