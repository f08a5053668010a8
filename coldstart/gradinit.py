"""GradInit: learn one scale for each parameter tensor before training, so that the optimiser's first step does most.

Zhu, Ni, Xu, Kong, Huang, Goldstein: GradInit: Learning to Initialize Neural Networks for Stable and Efficient
Training, NeurIPS 2021. The iteration is its algorithm 1; the rule for gamma is its section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from coldstart.gradients import LossFunction, TrainingLoss, trainable_parameters
from coldstart.scales import Iteration, fold_, is_bias

__all__ = ["GradInitResult", "Settings", "default_gamma", "gradinit"]

NORM_ORDER = {"adam": 1, "sgd": 2}
FIRST_ORDER_DECREASE = 0.1  # what a first step may gain at most, to first order: eta ||g||_1, or eta ||g||_2^2


@dataclass(frozen=True)
class Settings:
    """The settings of :func:`gradinit`, checked; where ``gamma`` is None it becomes :func:`default_gamma`."""

    optimizer: str
    eta: float
    gamma: float | None
    lr: float
    iterations: int
    min_scale: float
    grad_clip: float | None
    betas: tuple[float, float]

    def __post_init__(self) -> None:
        if self.optimizer not in NORM_ORDER:
            raise ValueError(f"optimizer must be 'adam' or 'sgd', not {self.optimizer!r}")
        for name in ("eta", "gamma", "lr", "grad_clip"):
            value = getattr(self, name)
            if value is None and name in ("gamma", "grad_clip"):
                continue
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, not {value}")
        if not isinstance(self.iterations, int) or self.iterations < 1:
            raise ValueError(f"iterations must be a whole number from 1 on, not {self.iterations}")
        if not 0 <= self.min_scale <= 1:
            raise ValueError(f"min_scale must be between 0 and 1, where the scales start, not {self.min_scale}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, not {self.betas}")
        if self.gamma is None:
            object.__setattr__(self, "gamma", default_gamma(self.optimizer, self.eta))

    def record(self) -> dict[str, Any]:
        """The settings by name, as JSON knows them."""
        return asdict(self) | {"betas": list(self.betas)}


@dataclass(frozen=True)
class GradInitResult:
    """What GradInit found.

    Attributes:
        scales: from parameter name to scale, folded into the model already.
        history: one record an iteration.
        settings: the settings that it ran with, gamma included.
    """

    scales: dict[str, float]
    history: tuple[Iteration, ...]
    settings: dict[str, Any]


def default_gamma(optimizer: str, eta: float) -> float:
    """The bound of the gradient norm from the learning rate: ``0.1 / eta`` (Adam), ``sqrt(0.1 / eta)`` (SGD).

    To first order, a step of Adam lowers the loss by eta times the l1 norm, one of SGD by eta times the squared l2
    norm; either is at most 0.1 (section 3.3).
    """
    return (FIRST_ORDER_DECREASE / eta) ** (1 / NORM_ORDER[optimizer])


@torch.inference_mode(False)
def gradinit(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[tuple[Any, Any]],
    *,
    optimizer: str = "adam",
    eta: float,
    gamma: float | None = None,
    lr: float,
    iterations: int,
    min_scale: float = 0.01,
    grad_clip: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    process_group: dist.ProcessGroup | None = None,
    progress: Callable[[Iteration], None] | None = None,
) -> GradInitResult:
    """Learn one scale for each trainable parameter of a model and multiply the parameters by them, in place.

    Dropout is off meanwhile; BatchNorm uses the statistics of each batch and leaves its running ones alone. Tied
    parameters have one scale; frozen parameters, buffers and the mode of every module stay as they are. Until the
    last iteration has ended the model is not touched, so whatever is raised leaves it as it was.

    Args:
        model: any module.
        loss_fn: ``loss_fn(model, batch)`` is the mean training loss of a batch, a scalar. With ``process_group``, the
            loss of the whole batch is the mean of what the processes return: where their batches differ in size, each
            weights its own accordingly.
        batches: pairs (S, S~) of batches, at least ``iterations`` of them; S~ shares some of its examples with S.
        optimizer: the optimiser that will train the model: "adam" bounds the l1 norm of the gradient and takes the
            step ``eta * sign(g)``; "sgd" bounds the l2 norm and takes ``eta * g``.
        eta: learning rate of the prescribed first step.
        gamma: bound of the gradient norm; :func:`default_gamma` where it is None.
        lr: learning rate tau of the scales.
        iterations: how many steps the scales take.
        min_scale: lower bound of the scales of weights; that of biases (the last part of the name has "bias") is 0.
        grad_clip: bound c of the gradient of each scale, ``[-c, c]``; None for no bound.
        betas: moments of the two Adam optimisers of the scales.
        process_group: processes that share the work, each with its own part of every batch and the same model; all
            end with the same scales, to the bit.
        progress: called with the record of each iteration.

    Returns:
        The scales and the history.

    Raises:
        ValueError: a setting is out of range, the model has no trainable parameter, the loss is no scalar, or the
            batches end before the iterations.
        FloatingPointError: the loss, the gradient norm or the gradient of a scale is not finite; the sentence names
            the iteration and the first parameter concerned.
    """
    settings = Settings(optimizer, eta, gamma, lr, iterations, min_scale, grad_clip, betas)
    solver = _Solver(model, loss_fn, settings, process_group)
    history = []
    for iteration, (batch, second_batch) in enumerate(_exactly(iterations, batches), start=1):
        history.append(solver.iterate(iteration, batch, second_batch))
        if progress is not None:
            progress(history[-1])
    scales = solver.named_scales()
    fold_(solver.parameters, scales)
    return GradInitResult(scales, tuple(history), settings.record())


class _Solver:
    """The state of the iteration: the scales and their two optimisers, one for each branch (section 3.2)."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, settings: Settings, process_group) -> None:
        self.parameters = trainable_parameters(model)
        if not self.parameters:
            raise ValueError(f"{type(model).__name__} has no trainable parameter to scale")
        self.loss = TrainingLoss(model, loss_fn)
        self.settings = settings
        self.process_group = process_group
        first = next(iter(self.parameters.values()))
        precision = torch.promote_types(first.dtype, torch.float32)
        self.scales = nn.Parameter(torch.ones(len(self.parameters), dtype=precision, device=first.device))
        self.lower_bounds = torch.tensor(
            [0.0 if is_bias(name) else settings.min_scale for name in self.parameters],
            dtype=precision,
            device=first.device,
        )
        self.objective, self.constraint = (
            torch.optim.Adam([self.scales], lr=settings.lr, betas=settings.betas) for _ in range(2)
        )
        self.expects_constraint = False  # whether this iteration will need second derivatives: as the last one did

    def iterate(self, iteration: int, batch: Any, second_batch: Any) -> Iteration:
        """One iteration of algorithm 1.

        Only the branch that lowers the norm needs the graph of the gradient. It is built where the last iteration
        took that branch; where that guess was wrong, the gradient is computed once more.
        """
        weights = self._scaled_weights()
        loss, gradients = self.loss.gradient(weights, batch, differentiable=self.expects_constraint)
        loss, whole = self._mean_loss(loss), self._mean_gradients(gradients)
        norm = self._norm(whole)
        self._refuse_non_finite(iteration, "the loss", loss, whole)
        self._refuse_non_finite(iteration, "the gradient norm", norm, whole)
        constrained = norm > self.settings.gamma
        if constrained:
            if not self.expects_constraint:
                del gradients, whole
                gradients = self.loss.gradient(weights, batch, differentiable=True)[1]
                whole = self._mean_gradients(gradients)
            slopes = self._slopes(self._norm_gradient(weights, gradients, whole, norm))
            updated_loss = None
        else:
            del gradients
            self._take_first_step_(weights, whole)
            del whole
            updated_loss, gradients = self.loss.gradient(weights, second_batch)
            updated_loss = self._mean_loss(updated_loss)
            self._refuse_non_finite(iteration, "the loss after the first step", updated_loss, gradients)
            slopes = self._slopes(gradients) / self.settings.eta
        self.expects_constraint = constrained
        self._refuse_non_finite_slopes(iteration, slopes)
        self._step_(self.constraint if constrained else self.objective, slopes)
        return Iteration(constrained, norm, loss, updated_loss)

    def named_scales(self) -> dict[str, float]:
        return dict(zip(self.parameters, self.scales.tolist(), strict=True))

    @torch.no_grad()
    def _scaled_weights(self) -> dict[str, Tensor]:
        """W_i = s_i W_i^0, as leaves."""
        pairs = zip(self.parameters.items(), self.scales.unbind(), strict=True)
        return {name: (parameter * scale.to(parameter)).requires_grad_() for (name, parameter), scale in pairs}

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """The norm over all parameters: l1 for Adam, l2 for SGD. The same number on every process."""
        order = NORM_ORDER[self.settings.optimizer]
        norms = torch.stack([norm.to(self.scales) for norm in torch._foreach_norm(list(gradients), order)])
        norm = norms.norm(order)
        if self.process_group is not None:
            dist.broadcast(norm, dist.get_global_rank(self.process_group, 0), group=self.process_group)
        return norm.item()

    @torch.no_grad()
    def _take_first_step_(self, weights: dict[str, Tensor], gradients: Sequence[Tensor]) -> None:
        """W <- W - eta sign(g) (Adam), W - eta g (SGD); the step is a constant for what follows."""
        step = torch._foreach_sign(list(gradients)) if self.settings.optimizer == "adam" else list(gradients)
        torch._foreach_add_(list(weights.values()), step, alpha=-self.settings.eta)

    def _norm_gradient(
        self, weights: dict[str, Tensor], gradients: Sequence[Tensor], whole: Sequence[Tensor], norm: float
    ) -> Sequence[Tensor]:
        """The gradient of ||g|| with respect to the weights: the Hessian times sign(g) (l1) or g / ||g|| (l2)."""
        if self.settings.optimizer == "adam":
            direction = torch._foreach_sign(list(whole))
        else:
            direction = torch._foreach_div(list(whole), norm)
        return self.loss.second_gradient(weights, gradients, direction)

    @torch.no_grad()
    def _slopes(self, gradients: Sequence[Tensor]) -> Tensor:
        """d/ds_i of a function of the weights s_i W_i^0: <W_i^0, its gradient>. One number for each scale."""
        pairs = zip(self.parameters.values(), gradients, strict=True)
        return self._mean(torch.stack([torch.dot(w.flatten(), g.flatten()).to(self.scales) for w, g in pairs]))

    @torch.no_grad()
    def _step_(self, optimizer: torch.optim.Optimizer, slopes: Tensor) -> None:
        if self.settings.grad_clip is not None:
            slopes = slopes.clamp(-self.settings.grad_clip, self.settings.grad_clip)
        self.scales.grad = slopes
        optimizer.step()
        self.scales.copy_(torch.maximum(self.scales, self.lower_bounds))

    def _mean(self, values: Tensor) -> Tensor:
        """Mean over the processes."""
        if self.process_group is not None:
            dist.all_reduce(values, group=self.process_group)
            values /= dist.get_world_size(self.process_group)
        return values

    def _mean_loss(self, loss: Tensor) -> float:
        return self._mean(loss.clone()).item()

    @torch.no_grad()
    def _mean_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of the whole batch, without graph."""
        gradients = [gradient.detach() for gradient in gradients]
        if self.process_group is None:
            return gradients
        flat = self._mean(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    def _refuse_non_finite(self, iteration: int, what: str, value: float, gradients: Sequence[Tensor]) -> None:
        if math.isfinite(value):
            return
        pairs = zip(self.parameters, gradients, strict=True)
        culprit = next((name for name, gradient in pairs if not gradient.isfinite().all()), None)
        where = f", and so is the gradient of {culprit}, the first such" if culprit else ""
        raise FloatingPointError(f"GradInit stopped in iteration {iteration}: {what} is {value}{where}")

    def _refuse_non_finite_slopes(self, iteration: int, slopes: Tensor) -> None:
        finite = slopes.isfinite()
        if not finite.all():
            name = list(self.parameters)[int(finite.logical_not().nonzero()[0])]
            raise FloatingPointError(
                f"GradInit stopped in iteration {iteration}: the gradient of the scale of {name} is not finite"
            )


def _exactly(iterations: int, batches: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    given = iter(batches)
    for count in range(iterations):
        try:
            pair = next(given)
        except StopIteration:
            raise ValueError(
                f"GradInit was to take {iterations} iterations, but got only {count} pairs of batches"
            ) from None
        yield pair
