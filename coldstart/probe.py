"""What a model does at initialisation: parameter by parameter, and residual block by residual block."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from coldstart.blocks import Branch, Layer, Stack, find_stacks
from coldstart.gradients import LossFunction, TrainingLoss, at_least_float32, trainable_parameters

__all__ = ["BlockProbe", "DepthProbe", "first_tensor", "gradient_variance", "probe_depth", "weight_norms"]

ADAM_EPS = 1e-8  # torch.optim.Adam's


@dataclass(frozen=True)
class BlockProbe:
    """One residual block: where a branch leaves the stream, and where it joins it again.

    Norms are Euclidean, over the whole batch with its padding; NaN or infinite where the model overflows, and infinite
    from 1.8e19 on, whose square float32 does not hold.

    Attributes:
        stack: path of the encoder or decoder in the model.
        layer: path of the layer in the model.
        kind: "self-attention", "cross-attention" or "feed-forward".
        stream_before: norm of the stream that enters the block.
        branch: norm of what the branch adds to it.
        stream_after: norm of the stream that leaves the block; after its LayerNorm, where that comes after the sum.
        stream_gradient: norm of the gradient of the loss with respect to the stream that leaves the block; 0 where
            nothing that is trained comes before.
        weight_gradient: norm of the gradient of the trainable parameters of the branch.
    """

    stack: str
    layer: str
    kind: str
    stream_before: float
    branch: float
    stream_after: float
    stream_gradient: float
    weight_gradient: float

    @property
    def stream_ratio(self) -> float:
        """The stream that leaves over the stream that enters."""
        return _ratio(self.stream_after, self.stream_before)

    @property
    def branch_ratio(self) -> float:
        """The branch over the stream that enters."""
        return _ratio(self.branch, self.stream_before)


@dataclass(frozen=True)
class DepthProbe:
    """What a model does before training and in its first step, W -> W + dW.

    Attributes:
        blocks: the residual blocks that the batch went through, in the order of :func:`coldstart.blocks.find_stacks`.
        loss: the loss at W.
        updated_loss: the loss at W + dW, of the same batch.
        gradient_norm: Euclidean norm of the gradient over all trainable parameters.
        output_norm: ||F(W)||, F being what the model returns, for the whole batch.
        function_change: ||F(W + dW) - F(W)||: what T-Fixup's theorem 3.1 keeps independent of depth under SGD.
        output_spread: how much F(W) differs from token to token: its norm once the mean over all tokens of the batch is
            taken off. A token is an entry of all dimensions of F but the last.
        updated_spread: the same of F(W + dW).
    """

    blocks: tuple[BlockProbe, ...]
    loss: float
    updated_loss: float
    gradient_norm: float
    output_norm: float
    function_change: float
    output_spread: float
    updated_spread: float

    @property
    def relative_change(self) -> float:
        """||F(W + dW) - F(W)|| / ||F(W)||."""
        return _ratio(self.function_change, self.output_norm)

    @property
    def kept_spread(self) -> float:
        """The share of the differences between tokens that the first step leaves. Near 0, the model says the same
        whatever it reads, and there is little gradient to learn better from."""
        return _ratio(self.updated_spread, self.output_spread)

    @property
    def signal(self) -> dict[str, float]:
        """The norm of the stream behind the last block of each stack over that before its first, by path."""
        blocks: dict[str, list[BlockProbe]] = defaultdict(list)
        for block in self.blocks:
            blocks[block.stack].append(block)
        return {stack: _ratio(own[-1].stream_after, own[0].stream_before) for stack, own in blocks.items()}


def first_tensor(output: Any) -> Tensor:
    """A tensor, or the first one of a tuple, list or dictionary: where most models have their logits.

    Raises:
        TypeError: there is none.
    """
    values = output.values() if isinstance(output, Mapping) else output
    tensors = [values] if isinstance(values, Tensor) else [v for v in _iterated(values) if isinstance(v, Tensor)]
    if not tensors:
        raise TypeError(f"the model returns {type(output).__name__} without a tensor: give outputs=, which picks it")
    return tensors[0]


@torch.inference_mode(False)
def probe_depth(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    optimizer: str,
    lr: float,
    outputs: Callable[[Any], Tensor] = first_tensor,
) -> DepthProbe:
    """Measure the residual stream, its gradient and the first step of the optimiser, for one batch.

    The model is left as it is, to the bit, also when an exception flies; dropout is off meanwhile. All is computed in
    float32, whatever lower type the model has; float64 stays. What is random in the model nevertheless is the same
    before and after the step.

    Three passes keep the memory to that of a training step. The first is the ordinary one, with its gradient. Then each
    gradient makes room for a stepped weight, one after the other: Adam would hold two moments more, plain SGD one
    weight matrix less. The last two passes, for F(W) and F(W + dW), keep no activations. A model of half precision is
    converted to float32, as training does for its master weights. Checkpointed activations stay so where
    ``use_reentrant=False``; the other kind PyTorch refuses.

    Args:
        model: a module in which :func:`coldstart.blocks.find_stacks` finds layers.
        loss_fn: ``loss_fn(model, batch)`` is the mean training loss of a batch, a scalar; it calls ``model``.
        batch: passed to the loss function.
        optimizer: "adam", whose first step is ``-lr * g / (|g| + 1e-8)``, or "sgd", ``-lr * g``; without weight decay.
        lr: the learning rate of the step, that of the run.
        outputs: picks from what the model returns the tensor that is F.

    Returns:
        The measurement. What overflows in the model is no exception but infinite or NaN in there.

    Raises:
        ValueError: the optimiser is another one, the learning rate is not positive, no layers are found, or the loss is
            no scalar, depends on no trainable parameter or does not call the model.
    """
    take_step = _first_step(optimizer, lr)
    stacks = find_stacks(model)
    layers = [layer for stack in stacks for layer in stack.layers]
    loss_at = TrainingLoss(model, loss_fn, full_precision=True)
    weights = {
        name: at_least_float32(parameter.detach()).requires_grad_()
        for name, parameter in trainable_parameters(model).items()
    }
    with _measured(model, layers) as tensors, _plain_pass(model):
        gradients = dict(zip(weights, loss_at.gradient(weights, batch)[1], strict=True))
    if not tensors.norms:
        raise ValueError("loss_fn(model, batch) must call the Transformer layers of the model, but it never did")
    branch_gradients = _branch_gradients(layers, gradients)
    with torch.no_grad():
        stepped = {name: take_step(weight, gradients.pop(name)) for name, weight in weights.items()}
    loss, output = _evaluated(loss_at, weights, batch, outputs)
    updated_loss, updated_output = _evaluated(loss_at, stepped, batch, outputs)
    return DepthProbe(
        blocks=tuple(_blocks(stacks, tensors, branch_gradients)),
        loss=loss,
        updated_loss=updated_loss,
        gradient_norm=_total(branch_gradients.values()),
        output_norm=_total(map(_norm, output)),
        function_change=_total(_norm(new - old) for new, old in zip(updated_output, output, strict=True)),
        output_spread=_total(map(_spread, output)),
        updated_spread=_total(map(_spread, updated_output)),
    )


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


def _first_step(optimizer: str, lr: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The first step of an optimiser, as a function of a weight and its gradient."""
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be a positive number, not {lr}")
    steps = {
        "adam": lambda weight, gradient: torch.addcdiv(weight, gradient, gradient.abs() + ADAM_EPS, value=-lr),
        "sgd": lambda weight, gradient: torch.add(weight, gradient, alpha=-lr),
    }
    if optimizer not in steps:
        raise ValueError(f"optimizer must be 'adam' or 'sgd', not {optimizer!r}")
    return steps[optimizer]


class _Tensors:
    """The norms of tensors that pass by in the forward pass, and of the gradients that come back, each by a key."""

    def __init__(self) -> None:
        self.norms: dict[Hashable, Tensor] = {}
        self.gradients: dict[Hashable, Tensor] = {}

    def note(self, key: Hashable, tensor: Tensor) -> None:
        self.norms[key] = _norm(tensor.detach())
        if tensor.requires_grad:
            tensor.register_hook(partial(self._note_gradient, key))

    def _note_gradient(self, key: Hashable, gradient: Tensor) -> None:
        self.gradients[key] = _norm(gradient)

    def note_input(self, key: Hashable, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook. The first input is the stream, also in fairseq, which names all of them."""
        self.note(key, next(iter((*args, *kwargs.values()))))

    def note_output(self, key: Hashable, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """A forward hook."""
        self.note(key, first_tensor(output))


@contextlib.contextmanager
def _measured(model: nn.Module, layers: Iterable[Layer]) -> Iterator[_Tensors]:
    """Note, in the passes made meanwhile, the stream before each branch, each branch, and the stream after each layer.

    The keys are those of :func:`_blocks`.
    """
    tensors = _Tensors()
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            for branch in layer.branches:
                first, last = (model.get_submodule(branch.modules[index]) for index in (0, -1))
                entrance = partial(tensors.note_input, ("stream", branch))
                hooks.enter_context(first.register_forward_pre_hook(entrance, with_kwargs=True))
                hooks.enter_context(last.register_forward_hook(partial(tensors.note_output, ("branch", branch))))
            end = partial(tensors.note_output, ("stream", layer.name))
            hooks.enter_context(model.get_submodule(layer.name).register_forward_hook(end))
        yield tensors


def _blocks(
    stacks: Iterable[Stack], tensors: _Tensors, branch_gradients: dict[Branch | None, float]
) -> Iterator[BlockProbe]:
    """The residual blocks that the batch went through. In a layer, each ends where the next begins."""
    for stack in stacks:
        for layer in stack.layers:
            branches = [branch for branch in layer.branches if ("branch", branch) in tensors.norms]
            places = [("stream", branch) for branch in branches] + [("stream", layer.name)]
            for branch, (before, after) in zip(branches, pairwise(places), strict=True):
                yield BlockProbe(
                    stack=stack.name,
                    layer=layer.name,
                    kind=branch.kind,
                    stream_before=tensors.norms[before].item(),
                    branch=tensors.norms["branch", branch].item(),
                    stream_after=tensors.norms[after].item(),
                    stream_gradient=float(tensors.gradients.get(after, 0.0)),
                    weight_gradient=branch_gradients.get(branch, 0.0),
                )


def _evaluated(
    loss_at: TrainingLoss, weights: dict[str, Tensor], batch: Any, outputs: Callable[[Any], Tensor]
) -> tuple[float, list[Tensor]]:
    """The loss at some weights, and F of each call of the model."""
    returned: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        returned.append(outputs(output))

    with loss_at.model.register_forward_hook(keep), _plain_pass(loss_at.model):
        loss = loss_at.value(weights, batch)
    if not returned:
        raise ValueError("loss_fn(model, batch) must call the model that it is given, but it never did")
    return loss.item(), returned


@contextlib.contextmanager
def _plain_pass(model: nn.Module) -> Iterator[None]:
    """Every pass draws the same random numbers, and none takes torch.nn's fused path, which calls no submodule."""
    gpus = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _branch_gradients(layers: Iterable[Layer], gradients: dict[str, Tensor]) -> dict[Branch | None, float]:
    """The norm of the gradient of the parameters of each branch, and, under None, of those in no branch."""
    branches = {path: branch for layer in layers for branch in layer.branches for path in branch.modules}
    norms: dict[Branch | None, list[Tensor]] = defaultdict(list)
    for name, gradient in gradients.items():
        paths = accumulate(name.split("."), "{}.{}".format)
        norms[next((branches[path] for path in paths if path in branches), None)].append(_norm(gradient))
    return {branch: _total(own) for branch, own in norms.items()}


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor)


def _spread(output: Tensor) -> Tensor:
    tokens = output.reshape(-1, output.shape[-1]) if output.dim() else output.reshape(1, 1)
    return _norm(tokens - tokens.mean(dim=0))


def _total(norms: Iterable[Tensor | float]) -> float:
    """The norm of a whole from those of its parts."""
    return math.hypot(*map(float, norms))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf


def _iterated(values: Any) -> Iterable[Any]:
    return values if isinstance(values, Iterable) else ()
