"""Admin: Post-LN whose branches begin as small beside the stream as those of Pre-LN, by a profile of the data.

Liu, Liu, Gao, Chen, Han: Understanding the Difficulty of Training Transformers, EMNLP 2020. A branch is
``x_i = LN(omega_i x_(i-1) + f_i(x_(i-1)))``, with a trained vector ``omega_i``. A forward pass, the profiling, measures
the variance of each branch; the initialisation sets each omega by the variances of the branches before it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coldstart.blocks import WeightedResidual, find_stacks, weigh_residuals_, weighted_residuals

__all__ = ["add_skip_weights_", "admin_", "set_skip_weights_", "skip_weight"]


def add_skip_weights_(model: nn.Module) -> nn.Module:
    """Give every skip connection its vector omega, a parameter ``(d,)`` of ones, in place: as yet, plain Post-LN.

    Args:
        model: of fairseq's layers, Post-LN.

    Returns:
        ``model``.

    Raises:
        ValueError: no layers are found, or as :func:`coldstart.blocks.weigh_residuals_` has it.
    """
    for stack in find_stacks(model):
        outer = stack.layers[0].feed_forward.outer
        weigh_residuals_(model, stack, lambda outer=outer: nn.Parameter(outer.new_ones(outer.shape[0])))
    return model


def skip_weight(input_variance: float, branch_variances: Sequence[float]) -> float:
    """Omega of a branch: the root of ``Var[x_0] + sum_(j<i) Var[f_j]``; 1 for the first, which adds to ``x_0`` itself.

    So the normalised stream, times omega, has the variance that the input and all earlier branches have together
    without LayerNorm, and a branch begins with the share that it has in Pre-LN.

    Args:
        input_variance: ``Var[x_0]``, that of the input of the stack.
        branch_variances: ``Var[f_j]`` of the branches before this one, in the order of the forward pass.
    """
    return math.sqrt(input_variance + math.fsum(branch_variances)) if branch_variances else 1.0


@torch.no_grad()
def admin_(model: nn.Module, forward: Callable[[Any], Any], batches: Iterable[Any]) -> dict[str, float]:
    """Profile a model and set its omegas, in place; no other weight changes.

    As in the authors' code, the pass is that of training, dropout included; a variance is that of all entries, padding
    included; and omega is set as the pass comes to its branch, so that the variances are those of the model that is
    then trained. Over several batches, ``omega_i^2`` is the mean.

    Args:
        model: with the vectors of :func:`add_skip_weights_`.
        forward: runs the model on a batch.
        batches: of training data, at least one.

    Returns:
        The omega of each branch, which all of its features share, by the name of its
        :class:`coldstart.blocks.WeightedResidual`.

    Raises:
        ValueError: no layers are found, they have no omegas, or a branch was not run or has no finite variance.
    """
    profiles = [_Profile(weighted_residuals(model, stack)) for stack in find_stacks(model)]
    if not all(profile.squares for profile in profiles):
        raise ValueError("Admin sets weights of skip connections, but there are none: call add_skip_weights_ first")
    with contextlib.ExitStack() as hooks:
        for profile in profiles:
            for residual in profile.squares:
                hooks.enter_context(residual.register_forward_pre_hook(profile))
        with _training_of_every_layer(model):
            for batch in batches:
                forward(batch)
    names = {module: name for name, module in model.named_modules()}
    omegas = {
        names[residual]: _root_mean(squares) for profile in profiles for residual, squares in profile.squares.items()
    }
    for name, omega in omegas.items():
        if not math.isfinite(omega):
            raise ValueError(
                f"Admin found no finite variance for {name}: every branch must run on the profiled batches"
            )
    set_skip_weights_(model, omegas)
    return omegas


@torch.no_grad()
def set_skip_weights_(model: nn.Module, omegas: Mapping[str, float]) -> nn.Module:
    """Fill the vectors omega with what :func:`admin_` has returned, in place.

    Returns:
        ``model``.
    """
    for name, omega in omegas.items():
        model.get_submodule(name).skip_weight.fill_(omega)
    return model


class _Profile:
    """A hook of all branches of a stack, called before each sum, which sets its omega.

    Attributes:
        squares: ``omega^2`` of each branch in each pass.
    """

    def __init__(self, branches: Sequence[WeightedResidual]) -> None:
        self.squares: dict[WeightedResidual, list[float]] = {branch: [] for branch in branches}
        self.input_variance, self.branch_variances = math.nan, []

    def __call__(self, branch: WeightedResidual, inputs: tuple[tuple[Tensor, Tensor]]) -> None:
        output, stream = inputs[0]
        if branch is next(iter(self.squares)):
            self.input_variance, self.branch_variances = _variance(stream), []
        omega = skip_weight(self.input_variance, self.branch_variances)
        branch.skip_weight.fill_(omega)
        self.squares[branch].append(omega**2)
        self.branch_variances.append(_variance(output))


@contextlib.contextmanager
def _training_of_every_layer(model: nn.Module) -> Iterator[None]:
    """Training mode, but for containers: in it, that of fairseq's LayerDrop leaves out layers."""
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = not isinstance(module, nn.ModuleList)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _variance(tensor: Tensor) -> float:
    return tensor.double().var(correction=0).item()


def _root_mean(squares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else math.nan
