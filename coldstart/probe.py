"""What a model does at initialisation, measured parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from coldstart.gradients import LossFunction, TrainingLoss, trainable_parameters

__all__ = ["gradient_variance", "weight_norms"]


@torch.no_grad()
def weight_norms(model: nn.Module) -> dict[str, float]:
    """Frobenius norm of each trainable parameter, by name (figure 9 of the GradInit paper)."""
    return {name: parameter.norm().item() for name, parameter in trainable_parameters(model).items()}


@torch.inference_mode(False)
@torch.no_grad()
def gradient_variance(model: nn.Module, loss_fn: LossFunction, batches: Iterable[Any]) -> dict[str, float]:
    """Variance of the gradient between batches, by parameter name (figure 10 of the GradInit paper).

    Args:
        model: any module; it is left as it is, dropout is off meanwhile.
        loss_fn: ``loss_fn(model, batch)`` is the mean training loss of a batch, a scalar.
        batches: at least two batches.

    Returns:
        For each trainable parameter the unbiased variance of an entry of its gradient, mean over the entries; 0 for
        one without entries.

    Raises:
        ValueError: fewer than two batches.
    """
    loss = TrainingLoss(model, loss_fn)
    weights = {
        name: parameter.detach().clone().requires_grad_() for name, parameter in trainable_parameters(model).items()
    }
    count = 0
    means = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights.values()]
    squares = [torch.zeros_like(mean) for mean in means]  # summed squared distances from the running means (Welford)
    for count, batch in enumerate(batches, start=1):
        for mean, square, gradient in zip(means, squares, loss.gradient(weights, batch)[1], strict=True):
            distance = gradient - mean
            mean += distance / count
            square += distance * (gradient - mean)
    if count < 2:
        raise ValueError(f"a variance between batches needs at least 2 batches, not {count}")
    pairs = zip(weights, squares, strict=True)
    return {name: square.sum().item() / (max(square.numel(), 1) * (count - 1)) for name, square in pairs}
