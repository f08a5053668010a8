"""Mimetic initialisation: self-attention that starts as it looks after training.

Trockman, Kolter: Mimetic Initialization of Self-Attention Layers, ICML 2023. Trained attention has W_Q W_K^T near
the identity and W_V W_proj near minus the identity, up to noise; section 3 gives weights in closed form that start
there. The paper writes ``x W``; the functions here return weights as PyTorch stores them, ``(out, in)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from coldstart.blocks import Attention, Stack, find_stacks

__all__ = ["LANGUAGE", "VISION", "mimetic_", "query_key_factors", "value_projection_factors"]

# (alpha, beta) of queries and keys, and of values and output projection: section 4 and section 5 of the paper.
VISION = {"qk": (0.7, 0.7), "vo": (0.4, 0.4)}
LANGUAGE = {"qk": (0.0, 0.5), "vo": (0.2, 0.2)}


def query_key_factors(
    dim: int,
    head_dim: int,
    alpha: float,
    beta: float,
    *,
    num_heads: int = 1,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights of queries and keys whose product, in each head, is the nearest one of its rank to ``alpha Z + beta I``.

    ``Z`` is ``(dim, dim)`` with independent entries of variance ``1 / dim``, drawn for each head. With the singular
    value decomposition ``U S V^T`` of the sum, cut at rank ``head_dim``, ``W_Q = U S^(1/2)`` and ``W_K = V S^(1/2)``.

    One decomposition serves all heads of a call: ``Z`` turned by a random orthogonal matrix is as good a ``Z``, so
    each head has exactly the law above and a basis of its own (also for ``alpha = 0``, where the decomposition is not
    unique and a library would hand every head the first coordinates). What heads share is the spectrum.

    Args:
        dim: the width ``d`` of the stream.
        head_dim: the width ``k`` of a head, a divisor of ``dim``.
        alpha: the share of noise, in [0, 1].
        beta: the share of the identity, in [0, 1].
        num_heads: how many heads to draw.
        generator: source of randomness; the default generator where it is None.
        dtype: of the result; the default type where it is None.

    Returns:
        Two matrices ``(num_heads * head_dim, dim)``: head ``i`` owns rows ``i * head_dim`` to ``(i + 1) * head_dim``.
        With the rows of one head, ``query.T @ key`` is ``W_Q W_K^T``.

    Raises:
        ValueError: ``alpha`` or ``beta`` is outside [0, 1], or ``head_dim`` does not divide ``dim``.
    """
    _check_shares(alpha, beta)
    if head_dim < 1 or dim % head_dim:
        raise ValueError(
            f"the width of a head must divide the width of the stream, but {head_dim} does not divide {dim}"
        )
    left, right = _balanced_factors(_noisy_identity(dim, alpha, beta, generator, dtype), head_dim)
    # Both factors live in a subspace, which a random rotation of everything takes to a random subspace.
    basis, coordinates = torch.linalg.qr(torch.cat((left, right), dim=1))
    turned = _random_frames(num_heads, dim, basis.shape[1], generator, basis.dtype) @ coordinates
    query, key = turned.mT.split(head_dim, dim=1)
    return query.reshape(-1, dim), key.reshape(-1, dim)


def value_projection_factors(
    dim: int,
    alpha: float,
    beta: float,
    *,
    sign: int = -1,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights of values and output projection whose product is ``alpha Z - beta I``.

    ``Z`` is as in :func:`query_key_factors`. With the singular value decomposition ``U S V^T``,
    ``W_V = U S^(1/2)`` and ``W_proj = V S^(1/2)``.

    Args:
        dim: the width ``d`` of the stream.
        alpha: the share of noise, in [0, 1].
        beta: the share of the identity, in [0, 1].
        sign: of the identity: -1, or +1 for the ablation of the paper.
        generator: source of randomness; the default generator where it is None.
        dtype: of the result; the default type where it is None.

    Returns:
        Two matrices ``(dim, dim)``, value and output; ``value.T @ output.T`` is ``W_V W_proj^T``.

    Raises:
        ValueError: ``alpha`` or ``beta`` is outside [0, 1], or ``sign`` is neither -1 nor 1.
    """
    _check_shares(alpha, beta)
    if sign not in (-1, 1):
        raise ValueError(f"the sign of the identity must be -1 or 1, not {sign}")
    left, right = _balanced_factors(_noisy_identity(dim, alpha, sign * beta, generator, dtype), dim)
    return left.T.contiguous(), right


@torch.no_grad()
def mimetic_(
    module: nn.Module,
    *,
    qk: tuple[float, float] | None = VISION["qk"],
    vo: tuple[float, float] | None = VISION["vo"],
    sign: int = -1,
    vo_gain: Callable[[Stack], float] = lambda stack: 1.0,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Give every self-attention of a module mimetic weights, in place, and biases of zero.

    Heads are independent. Cross-attention is left alone: it reads one stream and writes another, between which there
    is no identity. Weights are drawn in float32 (float64 for float64) on the CPU, so that a seed means the same weights
    on any device. Positions should be sinusoidal: the paper measured a loss with learned ones.

    Args:
        module: a module in which :func:`coldstart.blocks.find_stacks` finds layers.
        qk: (alpha, beta) of :func:`query_key_factors`, or None to leave queries and keys as they are. The default is
            the paper's for vision; :data:`LANGUAGE` has those for language.
        vo: (alpha, beta) of :func:`value_projection_factors`, or None to leave values and output as they are.
        sign: as in :func:`value_projection_factors`.
        vo_gain: what values and outputs of a stack are multiplied by, each: a law of depth, where there is one.
        generator: source of randomness, on the CPU; the default generator where it is None.

    Returns:
        ``module``.

    Raises:
        ValueError: no layers are found, a share is outside [0, 1], or a self-attention is not square.
    """
    for stack in find_stacks(module):
        gain = vo_gain(stack)
        for layer in stack.layers:
            attention = layer.self_attention
            dim, dtype = _width(attention), torch.promote_types(attention.query.dtype, torch.float32)
            if qk is not None:
                heads = {"num_heads": attention.num_heads, "generator": generator, "dtype": dtype}
                factors = query_key_factors(dim, dim // attention.num_heads, *qk, **heads)
                _write_((attention.query, attention.key), factors, attention.query_key_biases)
            if vo is not None:
                factors = value_projection_factors(dim, *vo, sign=sign, generator=generator, dtype=dtype)
                factors = tuple(gain * factor for factor in factors)
                _write_((attention.value, attention.output), factors, attention.value_output_biases)
    return module


def _check_shares(alpha: float, beta: float) -> None:
    for name, share in (("alpha", alpha), ("beta", beta)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be between 0 and 1, not {share}")


def _width(attention: Attention) -> int:
    shapes = {tuple(w.shape) for w in (attention.query, attention.key, attention.value, attention.output)}
    if len(shapes) > 1 or len(set(shapes.copy().pop())) > 1:
        raise ValueError(
            f"mimetic self-attention needs queries, keys, values and output of one width, but {attention.name} has "
            f"weights of shapes {', '.join(map(str, sorted(shapes)))}"
        )
    return attention.query.shape[1]


def _write_(weights: tuple[Tensor, ...], values: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
    for bias in biases:
        bias.zero_()


def _noisy_identity(
    dim: int, alpha: float, beta: float, generator: torch.Generator | None, dtype: torch.dtype | None
) -> Tensor:
    """``alpha Z + beta I``, ``(dim, dim)``."""
    noise = torch.randn(dim, dim, generator=generator, dtype=dtype) / dim**0.5
    return alpha * noise + beta * torch.eye(dim, dtype=dtype)


def _balanced_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``U S^(1/2)`` and ``V S^(1/2)``, each ``(d, rank)``, of the largest singular values of a square matrix.

    From the eigenvectors V of ``M^T M``, in a third of the time of a singular value decomposition: ``M V`` is ``U S``,
    and ``M V V^T`` is M however exact the eigenvalues are, whose squaring costs half of the digits.
    """
    right = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -rank:]
    left = matrix @ right
    root = torch.linalg.vector_norm(left, dim=0).sqrt()
    return left / root.clamp_min(torch.finfo(root.dtype).tiny), right * root


def _random_frames(number: int, dim: int, rank: int, generator: torch.Generator | None, dtype: torch.dtype) -> Tensor:
    """Orthonormal columns, ``(number, dim, rank)``, uniformly distributed: any rotation of a frame is as likely."""
    noise = torch.randn(number, dim, rank, generator=generator, dtype=dtype)
    frames, triangle = torch.linalg.qr(noise)
    # A library's QR has signs of its own choice; positive diagonals make it unique, and the frames uniform.
    return frames * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
