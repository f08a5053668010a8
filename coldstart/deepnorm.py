"""DeepNorm: Post-LN that trains a thousand layers deep, by a weight on the skip connections and small branches.

Wang, Ma, Dong, Huang, Zhang, Wei: DeepNet: Scaling Transformers to 1,000 Layers, 2022 (arXiv 2203.00555). A branch is
``x = LN(alpha x + f(x))``, and beta is the gain of some of the weights of ``f``; N is the number of layers of an
encoder or of a decoder alone, M that of a decoder beside an encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coldstart.blocks import Attention, FeedForward, Stack, find_stacks, weigh_residuals_

__all__ = [
    "Constants",
    "decoder_constants",
    "deepnorm_",
    "deepnorm_residuals_",
    "deepnorm_weights_",
    "encoder_constants",
    "law_for",
    "single_constants",
]


class Constants(NamedTuple):
    """``alpha``, the weight of skip connections; ``beta``, the gain of values, outputs and feed-forward matrices."""

    alpha: float
    beta: float


def single_constants(num_layers: int) -> Constants:
    """``alpha = (2N)^(1/4)``, ``beta = (8N)^(-1/4)``: an encoder alone, or a decoder alone (figure 2).

    Args:
        num_layers: N.

    Raises:
        ValueError: ``num_layers`` is below 1.
    """
    layers = _at_least_one(num_layers)
    return Constants(alpha=(2 * layers) ** 0.25, beta=(8 * layers) ** -0.25)


def encoder_constants(num_layers: int, decoder_layers: int) -> Constants:
    """``alpha = 0.81 (N^4 M)^(1/16)``, ``beta = 0.87 (N^4 M)^(-1/16)``: an encoder beside a decoder (figure 2).

    Args:
        num_layers: N, the number of layers of the encoder.
        decoder_layers: M, that of the decoder.

    Raises:
        ValueError: either is below 1.
    """
    depth = _at_least_one(num_layers) ** 4 * _at_least_one(decoder_layers)
    return Constants(alpha=0.81 * depth ** (1 / 16), beta=0.87 * depth ** (-1 / 16))


def decoder_constants(num_layers: int) -> Constants:
    """``alpha = (3M)^(1/4)``, ``beta = (12M)^(-1/4)``: a decoder beside an encoder (figure 2).

    Args:
        num_layers: M.

    Raises:
        ValueError: ``num_layers`` is below 1.
    """
    layers = _at_least_one(num_layers)
    return Constants(alpha=(3 * layers) ** 0.25, beta=(12 * layers) ** -0.25)


def law_for(model: nn.Module) -> Callable[[Stack], Constants]:
    """The constants of a stack of this model, as a function of the stack.

    A stack with cross-attention is a decoder beside an encoder; one without is the encoder beside it, or alone.

    Args:
        model: a module in which :func:`coldstart.blocks.find_stacks` finds layers.

    Raises:
        ValueError: no layers are found, or decoders of several depths, of which an encoder can follow only one.
    """
    decoder_depths = {len(stack.layers) for stack in find_stacks(model) if stack.has_cross_attention}
    if len(decoder_depths) > 1:
        raise ValueError(
            "DeepNorm's encoder follows the depth of its decoder, but there are decoders of "
            f"{' and '.join(map(str, sorted(decoder_depths)))} layers"
        )

    def law(stack: Stack) -> Constants:
        num_layers = len(stack.layers)
        if stack.has_cross_attention:
            return decoder_constants(num_layers)
        return encoder_constants(num_layers, *decoder_depths) if decoder_depths else single_constants(num_layers)

    return law


def deepnorm_(model: nn.Module, *, generator: torch.Generator | None = None) -> nn.Module:
    """:func:`deepnorm_weights_` and :func:`deepnorm_residuals_`."""
    return deepnorm_residuals_(deepnorm_weights_(model, generator=generator))


def deepnorm_residuals_(model: nn.Module) -> nn.Module:
    """Give every skip connection its weight ``alpha``, in place, by :func:`coldstart.blocks.weigh_residuals_`.

    Returns:
        ``model``.

    Raises:
        ValueError: as :func:`law_for` and :func:`coldstart.blocks.weigh_residuals_` have it.
    """
    law = law_for(model)
    for stack in find_stacks(model):
        alpha = stack.layers[0].feed_forward.outer.new_tensor(law(stack).alpha)
        weigh_residuals_(model, stack, alpha.clone)
    return model


@torch.no_grad()
def deepnorm_weights_(model: nn.Module, *, generator: torch.Generator | None = None) -> nn.Module:
    """Initialise the weights of every layer, in place.

    Every matrix is Xavier-normal: with gain 1 for queries and keys; with gain ``beta`` for values, output projection
    (of cross-attention too) and both feed-forward matrices. Biases are zero: the paper has none in its theory and says
    nothing of their start. What is around the layers stays as it is.

    Args:
        model: a module in which :func:`coldstart.blocks.find_stacks` finds layers.
        generator: source of randomness; the default generator where it is None.

    Returns:
        ``model``.

    Raises:
        ValueError: as :func:`law_for` has it.
    """
    law = law_for(model)
    for stack in find_stacks(model):
        beta = law(stack).beta
        for layer in stack.layers:
            for attention in layer.attentions:
                _initialise_attention_(attention, beta, generator)
            _initialise_feed_forward_(layer.feed_forward, beta, generator)
    return model


def _initialise_attention_(attention: Attention, beta: float, generator: torch.Generator | None) -> None:
    _initialise_(((attention.query, 1.0), (attention.key, 1.0)), attention.query_key_biases, generator)
    _initialise_(((attention.value, beta), (attention.output, beta)), attention.value_output_biases, generator)


def _initialise_feed_forward_(block: FeedForward, beta: float, generator: torch.Generator | None) -> None:
    _initialise_(((block.inner, beta), (block.outer, beta)), block.biases, generator)


def _initialise_(
    weights: tuple[tuple[Tensor, float], ...], biases: tuple[Tensor, ...], generator: torch.Generator | None
) -> None:
    for weight, gain in weights:
        nn.init.xavier_normal_(weight, gain=gain, generator=generator)
    for bias in biases:
        bias.zero_()


def _at_least_one(num_layers: int) -> int:
    if num_layers < 1:
        raise ValueError(f"the number of layers must be at least 1, not {num_layers}")
    return num_layers
