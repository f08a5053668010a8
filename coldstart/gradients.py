"""The gradient of a training loss at weights of one's choice, without touching the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["LossFunction", "TrainingLoss", "trainable_parameters"]

LossFunction = Callable[[nn.Module, Any], Tensor]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name; a tied one once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class TrainingLoss(nn.Module):
    """``loss_fn(model, batch)`` as a function of the model's weights.

    Everything random or cumulative is off while it is computed: dropout and the like as in evaluation, while BatchNorm
    uses the statistics of the batch and leaves the running ones alone. No parameter, buffer or mode of the model is
    changed, also when an exception flies.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = (loss_fn,)  # in a tuple, so that a loss that is itself a module is not taken for a part of this

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
        parameters = {f"model.{name}": weight for name, weight in weights.items()}
        buffers = {f"model.{name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        with _evaluation_with_batch_statistics(self.model):
            return functional_call(self, (parameters, buffers), (batch, list(weights.values()), differentiable))

    def forward(self, batch: Any, weights: list[Tensor], differentiable: bool) -> tuple[Tensor, list[Tensor]]:
        """Called with ``weights`` in their place. The backward pass is made here too, since a model that checkpoints
        its activations runs parts of its forward pass again in it."""
        kernel = sdpa_kernel(SDPBackend.MATH) if differentiable else contextlib.nullcontext()
        with torch.enable_grad(), kernel:
            loss = self._loss_fn[0](self.model, batch)
            if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                raise ValueError(
                    "loss_fn(model, batch) must return a scalar tensor that depends on the model's weights, "
                    f"not {_described(loss)}"
                )
            gradients = torch.autograd.grad(loss, weights, create_graph=differentiable, materialize_grads=True)
        return loss.detach(), list(gradients)


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


def _described(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__}"
    return f"a tensor of shape {tuple(loss.shape)}" if loss.dim() else "one without a gradient"
