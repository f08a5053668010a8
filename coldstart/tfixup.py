"""T-Fixup: initial weights scaled by depth, so that a Transformer trains without LayerNorm and warmup.

Huang, Perez, Ba, Volkovs: Improving Transformer Optimization Through Better Initialization, ICML 2020.
The equations are those of its section 3.2 ("T-Fixup initialization"); N is the number of layers of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from coldstart.blocks import Attention, FeedForward, Stack, find_stacks

__all__ = [
    "adam_gain",
    "decoder_gain",
    "depth_gain",
    "embedding_gain",
    "encoder_gain",
    "input_gain",
    "no_gain",
    "tfixup_",
    "tfixup_embedding_",
]

Gain = Callable[[Stack], float]
BASE_LAYERS = 6  # of the Transformer that the paper starts from


def encoder_gain(num_layers: int) -> float:
    """``0.67 * N^(-1/4)``: the gain of V, output projection and both feed-forward matrices of an encoder.

    An encoder layer has two residual branches of two matrices each; scaling every matrix by N^(-1/4) keeps the
    sum of N branches at order one.

    Args:
        num_layers: N, the number of layers of the encoder.

    Raises:
        ValueError: ``num_layers`` is below 1.
    """
    return 0.67 * _at_least_one(num_layers) ** -0.25


def decoder_gain(num_layers: int) -> float:
    """``(9 N)^(-1/4)``: the gain of V, output projection and both feed-forward matrices of a decoder.

    Args:
        num_layers: N, the number of layers of the decoder.

    Raises:
        ValueError: ``num_layers`` is below 1.
    """
    return (9 * _at_least_one(num_layers)) ** -0.25


def embedding_gain(num_layers: int) -> float:
    """``(9 N)^(-1/4)``: the gain of the input embeddings, on either side, with that side's own N.

    Args:
        num_layers: N, the number of layers of the stack that the embedding feeds.

    Raises:
        ValueError: ``num_layers`` is below 1.
    """
    return (9 * _at_least_one(num_layers)) ** -0.25


def depth_gain(stack: Stack) -> float:
    """The gain of V, output projection and feed-forward matrices of a stack: :func:`decoder_gain` of its depth where
    it has cross-attention, and so three branches a layer, :func:`encoder_gain` where it has two."""
    return (decoder_gain if stack.has_cross_attention else encoder_gain)(len(stack.layers))


def input_gain(stack: Stack) -> float:
    """The gain of the input embedding of a stack: :func:`embedding_gain` of its depth."""
    return embedding_gain(len(stack.layers))


def adam_gain(stack: Stack) -> float:
    """:func:`depth_gain`, beyond 6 layers times ``(6/N)^(3/4)``: under Adam it keeps the first update independent of N.

    This is ours, not the paper's; up to 6 layers, where the paper's model begins, the two agree.

    Theorem 3.1 is about SGD, whose step shrinks with the gradient. Adam moves every entry of a matrix by the learning
    rate, and the branch by that times the other matrix of the branch: with the paper's gains N branches move the
    stream by ``N * N^(-1/4)``.
    """
    return depth_gain(stack) * min(1.0, BASE_LAYERS / len(stack.layers)) ** 0.75


def no_gain(stack: Stack) -> float:
    """1 at any depth: Xavier's weights, which T-Fixup is measured against."""
    return 1.0


@torch.no_grad()
def tfixup_(
    model: nn.Module,
    *,
    gain: Gain = depth_gain,
    embeddings_gain: Gain = input_gain,
    pretrained_embeddings: Collection[nn.Embedding] = (),
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialise every Transformer layer, input embedding and input/output projection of a model, in place.

    What the law does to each tensor, N being the layers of its stack:

    - every matrix is Xavier-uniform with gain 1, but Q and K have gain 1/sqrt(2), as in the authors' code, and
      are never scaled; each has its own fans, also where Q, K and V are thirds of one packed matrix;
    - V, output projection (of cross-attention too) and both feed-forward matrices are multiplied by :func:`depth_gain`;
    - input embeddings are N(0, std d^(-1/2)), the padding row zero, multiplied by :func:`input_gain`; one that
      several stacks share is initialised once, with the N of the first of them (the encoder);
    - biases are zero.

    A stack without cross-attention (encoder-only, decoder-only) has two branches a layer, so it follows the
    encoder's law: this is our reading, the paper is silent. Positional embeddings and an output projection
    that is not tied to an embedding are left as they are: the authors' code keeps fairseq's own for both. LayerNorm
    is not touched either: see :func:`coldstart.blocks.remove_layer_norms_`. ``torch.nn`` keeps embeddings outside its
    stacks: use :func:`tfixup_embedding_` for those.

    Args:
        model: a module in which :func:`coldstart.blocks.find_stacks` finds layers.
        gain: what values, outputs and feed-forward matrices of a stack are multiplied by.
        embeddings_gain: what the input embedding of a stack is multiplied by. Some accounts of the paper have
            :func:`encoder_gain` for an encoder's; the paper and its code have the default.
        pretrained_embeddings: embeddings that hold trained vectors: scaled, but not drawn again.
        generator: source of randomness; the default generator where it is None.

    Returns:
        ``model``.

    Raises:
        ValueError: no layers are found, or a weight is not a matrix (flattened by a sharding wrapper, say).
    """
    seen: set[Tensor] = set()
    for stack in find_stacks(model):
        _initialise_layers_(stack, gain(stack), generator)
        for embedding in stack.embeddings:
            if embedding.weight in seen:
                continue
            seen.add(embedding.weight)
            if embedding in pretrained_embeddings:
                embedding.weight.mul_(embeddings_gain(stack))
            else:
                _initialise_embedding_(embedding, embeddings_gain(stack), generator)
    return model


@torch.no_grad()
def tfixup_embedding_(
    embedding: nn.Embedding, num_layers: int, *, generator: torch.Generator | None = None
) -> nn.Embedding:
    """Initialise an input embedding: N(0, std d^(-1/2)) times ``(9 N)^(-1/4)``, the padding row zero, in place.

    Args:
        embedding: weight ``(vocabulary, d)``.
        num_layers: N, the number of layers of the stack that the embedding feeds.
        generator: source of randomness; the default generator where it is None.

    Returns:
        ``embedding``.

    Raises:
        ValueError: ``num_layers`` is below 1.
    """
    _initialise_embedding_(embedding, embedding_gain(num_layers), generator)
    return embedding


def _initialise_embedding_(embedding: nn.Embedding, gain: float, generator: torch.Generator | None) -> None:
    nn.init.normal_(embedding.weight, std=gain * embedding.embedding_dim**-0.5, generator=generator)
    if embedding.padding_idx is not None:
        embedding.weight[embedding.padding_idx].zero_()


def _initialise_layers_(stack: Stack, gain: float, generator: torch.Generator | None) -> None:
    for layer in stack.layers:
        for attention in layer.attentions:
            _initialise_attention_(attention, gain, generator)
        _initialise_feed_forward_(layer.feed_forward, gain, generator)
    for projection in stack.projections:
        _xavier_(projection, 1.0, generator)


def _initialise_attention_(attention: Attention, gain: float, generator: torch.Generator | None) -> None:
    for weight in (attention.query, attention.key):
        _xavier_(weight, 2**-0.5, generator)
    for weight in (attention.value, attention.output):
        _xavier_(weight, gain, generator)
    for bias in attention.biases:
        bias.zero_()


def _initialise_feed_forward_(block: FeedForward, gain: float, generator: torch.Generator | None) -> None:
    for weight in (block.inner, block.outer):
        _xavier_(weight, gain, generator)
    for bias in block.biases:
        bias.zero_()


def _xavier_(weight: Tensor, gain: float, generator: torch.Generator | None) -> None:
    if weight.dim() != 2:
        raise ValueError(
            f"T-Fixup needs whole weight matrices, but one has shape {tuple(weight.shape)}: "
            "initialise before the model is sharded or flattened"
        )
    nn.init.xavier_uniform_(weight, gain=gain, generator=generator)


def _at_least_one(num_layers: int) -> int:
    if num_layers < 1:
        raise ValueError(f"the number of layers must be at least 1, not {num_layers}")
    return num_layers
