"""Mimetic attention: what its products are, how they are distributed, and what is left alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coldstart.blocks import find_stacks
from coldstart.mimetic import LANGUAGE, VISION, _balanced_factors, mimetic_, query_key_factors, value_projection_factors

SHARES = ((0.7, 0.7), (0.0, 0.5), (1.0, 0.0), (0.3, 1.0))
DOUBLE = {"dtype": torch.float64}


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def head_products(dim, head_dim, alpha, beta, num_heads, seed=1):
    """W_Q W_K^T of every head, (heads, d, d), in float64."""
    factors = query_key_factors(dim, head_dim, alpha, beta, num_heads=num_heads, generator=generator(seed), **DOUBLE)
    query, key = (factor.view(num_heads, head_dim, dim) for factor in factors)
    return query.mT @ key


def independent_products(dim, head_dim, alpha, beta, draws):
    """W_Q W_K^T of one head a call: the heads of a call share their spectrum."""
    return torch.cat([head_products(dim, head_dim, alpha, beta, num_heads=1, seed=seed) for seed in range(draws)])


def reference_products(dim, head_dim, alpha, beta, draws, seed=2):
    """The same by the book: a noise and a singular value decomposition for each head."""
    noise = torch.randn(draws, dim, dim, generator=generator(seed), **DOUBLE) / dim**0.5
    u, s, vh = torch.linalg.svd(alpha * noise + beta * torch.eye(dim, **DOUBLE))
    return u[..., :head_dim] * s[:, None, :head_dim] @ vh[:, :head_dim]


# --- queries and keys ---


@settings(max_examples=30, deadline=None)
@given(
    dim=st.sampled_from((6, 16, 33)), rank=st.integers(1, 33), shares=st.sampled_from(SHARES), seed=st.integers(0, 99)
)
def test_the_cut_product_is_the_nearest_of_its_rank(dim, rank, shares, seed):
    """Eckart and Young: the error of the best approximation is what the discarded singular values amount to."""
    rank, (alpha, beta) = min(rank, dim), shares
    noise = torch.randn(dim, dim, generator=generator(seed), **DOUBLE) / dim**0.5
    matrix = alpha * noise + beta * torch.eye(dim, **DOUBLE)
    left, right = _balanced_factors(matrix, rank)
    values = torch.linalg.svdvals(matrix)
    error = torch.linalg.svdvals(matrix - left @ right.T)
    torch.testing.assert_close(error[: dim - rank], values[rank:], atol=1e-7, rtol=0)
    assert error[dim - rank :].max() < 1e-7
    # Balanced: both factors carry the square roots of the singular values.
    for factor in (left, right):
        torch.testing.assert_close(factor.T @ factor, torch.diag(values[:rank].flip(0)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dim", "head_dim"), [(48, 12), (48, 48), (40, 20), (30, 6)])
@pytest.mark.parametrize("shares", SHARES)
def test_every_head_has_the_singular_values_and_eigenvalues_of_the_nearest_matrix(dim, head_dim, shares):
    """A rotation keeps both, and no factorisation of anything else has them."""
    alpha, beta = shares
    noise = torch.randn(dim, dim, generator=generator(), **DOUBLE) / dim**0.5  # the first thing that is drawn
    u, s, vh = torch.linalg.svd(alpha * noise + beta * torch.eye(dim, **DOUBLE))
    nearest = u[:, :head_dim] * s[:head_dim] @ vh[:head_dim]
    for product in head_products(dim, head_dim, alpha, beta, num_heads=3):
        torch.testing.assert_close(torch.linalg.svdvals(product), torch.linalg.svdvals(nearest), atol=1e-6, rtol=0)
        if alpha:  # without noise the nearest is not unique, and a projection has k equal eigenvalues anyway
            for power in (1, 2, 3):
                actual, expected = (torch.linalg.matrix_power(m, power).trace() for m in (product, nearest))
                torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_full_rank_noise_has_variance_one_over_the_width():
    dim, alpha, beta = 200, 0.7, 0.7
    for product in head_products(dim, dim, alpha, beta, num_heads=2):
        noise = (product - beta * torch.eye(dim, **DOUBLE)) / alpha
        assert noise.var().item() * dim == pytest.approx(1, abs=5 * math.sqrt(2) / dim)
        assert noise.mean().item() == pytest.approx(0, abs=5 / dim**1.5)
        assert noise.diagonal().var().item() * dim == pytest.approx(1, abs=5 * math.sqrt(2 / dim))
        assert (noise**4).mean().item() * dim**2 == pytest.approx(3, abs=0.2), "not normal"


@pytest.mark.parametrize("shares", SHARES)
def test_heads_have_directions_of_their_own(shares):
    """Two random subspaces of k of d directions share k^2/d of them; two equal ones share k."""
    dim, head_dim, heads = 96, 12, 8
    query, _ = query_key_factors(dim, head_dim, *shares, num_heads=heads, generator=generator(), **DOUBLE)
    bases = torch.linalg.qr(query.view(heads, head_dim, dim).mT).Q
    shared = torch.stack(
        [(bases[i].T @ bases[j]).square().sum() for i in range(heads) for j in range(i)],
    )
    assert shared.mean().item() == pytest.approx(head_dim**2 / dim, rel=0.15)
    assert shared.max() < head_dim / 2
    again, _ = query_key_factors(dim, head_dim, *shares, num_heads=heads, generator=generator(), **DOUBLE)
    other, _ = query_key_factors(dim, head_dim, *shares, num_heads=heads, generator=generator(2), **DOUBLE)
    assert torch.equal(query, again)
    assert not torch.allclose(query, other)


@pytest.mark.parametrize(("dim", "head_dim"), [(32, 8), (32, 16), (24, 24)])
@pytest.mark.parametrize("shares", SHARES[:3:2])
def test_the_fast_way_has_the_distribution_of_one_decomposition_a_head(dim, head_dim, shares):
    """Entries, traces, norms and asymmetry, by mean and spread over many draws, within the sampling error."""
    draws = 1500
    fast = independent_products(dim, head_dim, *shares, draws)
    slow = reference_products(dim, head_dim, *shares, draws)
    statistics = {
        "corner": lambda m: m[:, 0, 0],
        "last diagonal": lambda m: m[:, -1, -1],
        "off the diagonal": lambda m: m[:, 1, 0],
        "trace": lambda m: m.diagonal(dim1=1, dim2=2).sum(1),
        "norm": lambda m: m.square().sum((1, 2)),
        "asymmetry": lambda m: (m - m.mT).square().sum((1, 2)),
        "cube": lambda m: (m @ m @ m).diagonal(dim1=1, dim2=2).sum(1),
    }
    for name, statistic in statistics.items():
        a, b = statistic(fast), statistic(slow)
        error = ((a.var() + b.var()) / draws).sqrt()
        assert (a.mean() - b.mean()).abs() < 4.5 * error, name
        assert (a.std() / b.std()).log().abs() < 4.5 * math.sqrt(1.5 / draws), name


# --- the attention map of the theory ---


@pytest.mark.parametrize(
    ("head_dim", "shares"), [(64, (0.7, 0.7)), (16, (0.7, 0.7)), (16, (0.0, 0.5)), (32, (0.3, 0.6))]
)
def test_expected_attention_map(head_dim, shares):
    """E[(X + P) W_Q W_K^T (X + P)^T] = c (d I + P P^T), X of independent entries of unit variance; c is beta at full
    rank, and the mean diagonal of W_Q W_K^T below it."""
    dim, length, draws = 64, 5, 3000
    frequencies = 1e4 ** (-torch.arange(0, dim, 2, **DOUBLE) / dim)
    angles = torch.arange(length, **DOUBLE)[:, None] * frequencies
    positions = torch.cat((angles.sin(), angles.cos()), dim=1)
    products = independent_products(dim, head_dim, *shares, draws)
    share = shares[1] if head_dim == dim else products.diagonal(dim1=1, dim2=2).mean().item()
    if shares[0] == 0:
        assert share == pytest.approx(shares[1] * head_dim / dim, rel=1e-9)
    x = torch.randn(draws, length, dim, generator=generator(3), **DOUBLE) + positions
    maps = x @ products @ x.mT
    expected = share * (dim * torch.eye(length, **DOUBLE) + positions @ positions.T)
    assert ((maps.mean(0) - expected).abs() < 5 * maps.std(0) / draws**0.5).all()


# --- values and output projection ---


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("alpha", "beta"), [(0.4, 0.4), (0.2, 0.2), (1.0, 0.0), (0.0, 0.2)])
def test_values_and_output_are_near_the_identity(alpha, beta, sign):
    dim = 200
    value, output = value_projection_factors(dim, alpha, beta, sign=sign, generator=generator(), **DOUBLE)
    product = value.T @ output.T
    assert product.diagonal().mean().item() == pytest.approx(sign * beta, abs=max(5 * alpha / dim, 1e-9))
    off = product[~torch.eye(dim, dtype=torch.bool)]
    assert off.std().item() == pytest.approx(alpha / dim**0.5, rel=5 / dim, abs=1e-9)
    assert off.mean().item() == pytest.approx(0, abs=max(5 * alpha / dim**1.5, 1e-9))
    torch.testing.assert_close(value @ value.T, output.T @ output, atol=1e-6, rtol=0)  # S on both sides


def test_single_precision_is_exact_enough():
    value, output = value_projection_factors(64, 0.4, 0.4, generator=generator())
    noise = torch.randn(64, 64, generator=generator()) / 8
    torch.testing.assert_close(value.T @ output.T, 0.4 * noise - 0.4 * torch.eye(64), atol=2e-6, rtol=0)


def test_no_noise_and_no_identity_is_zero():
    for factor in (*query_key_factors(12, 4, 0, 0, num_heads=2), *value_projection_factors(12, 0, 0)):
        assert not factor.any()


# --- whole models ---


class FusedAttention(nn.Module):
    """timm's attention, by its names."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)


class FusedBlock(nn.Module):
    """timm's block, by its names."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.attn, self.mlp = FusedAttention(dim, num_heads), nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)


MODELS = {
    "torch.nn, packed": lambda: nn.Transformer(24, 4, 2, 2, 32, batch_first=True),
    "timm, fused": lambda: nn.Sequential(FusedBlock(24, 4), FusedBlock(24, 4)),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(1)
    return MODELS[request.param]()


def self_attentions(model):
    return [layer.self_attention for stack in find_stacks(model) for layer in stack.layers]


def test_every_self_attention_is_mimetic(model):
    mimetic_(model, qk=(0, 0.5), vo=(0, 0.2), generator=generator())
    attentions = self_attentions(model)
    for attention in attentions:
        product = attention.value.T @ attention.output.T
        torch.testing.assert_close(product, -0.2 * torch.eye(24), atol=1e-6, rtol=0)
        for query, key in zip(attention.query.split(6), attention.key.split(6), strict=True):
            torch.testing.assert_close(query @ key.T, 0.5 * torch.eye(6), atol=1e-6, rtol=0)
        assert attention.biases
        assert not any(bias.any() for bias in attention.biases)
    queries = torch.stack([attention.query for attention in attentions])
    assert len(torch.unique(queries.flatten(1), dim=0)) == len(attentions)


def test_half_is_left_alone_where_it_is_none(model):
    halves = {"qk": ("query", "key", "query_key_biases"), "vo": ("value", "output", "value_output_biases")}
    for left_out, names in halves.items():
        before = [tensors_of(attention, names) for attention in self_attentions(model)]
        others = next(other for half, other in halves.items() if half != left_out)
        replaced = [tensors_of(attention, others[:2]) for attention in self_attentions(model)]
        mimetic_(model, **{left_out: None})
        for attention, kept, gone in zip(self_attentions(model), before, replaced, strict=True):
            assert all(map(torch.equal, tensors_of(attention, names), kept))
            assert not any(map(torch.equal, tensors_of(attention, others[:2]), gone))


def tensors_of(attention, names):
    values = [getattr(attention, name) for name in names]
    return [tensor.clone() for value in values for tensor in (value if isinstance(value, tuple) else (value,))]


def test_everything_but_self_attention_is_left_alone(model):
    ours = {tensor.data_ptr() for a in self_attentions(model) for tensor in (a.query, a.output, *a.biases)}
    before = {name: p.clone() for name, p in model.named_parameters() if p.data_ptr() not in ours}
    assert any("linear1" in name or "fc1" in name for name in before)
    mimetic_(model)
    changed = [name for name, p in model.named_parameters() if name in before and not torch.equal(p, before[name])]
    assert not changed


def test_a_block_maps_its_input_to_most_of_it(model):
    """Where attention looks at its own place only, x becomes (1 - beta) x + alpha x Z."""
    alpha, beta = VISION["vo"]
    mimetic_(model, generator=generator())
    x = torch.randn(4000, 24)
    for attention in self_attentions(model):
        y = x + x @ attention.value.T @ attention.output.T
        kept = ((x * y).sum() / x.square().sum()).item()
        assert kept == pytest.approx(1 - beta, abs=5 * alpha / 24)
        assert (y - (1 - beta) * x).square().mean().sqrt().item() == pytest.approx(alpha, rel=0.2)


def test_depth_gain_multiplies_values_and_output(model):
    mimetic_(model, qk=None, vo=(0, 0.4), vo_gain=lambda stack: 1 / len(stack.layers))
    for attention in self_attentions(model):
        torch.testing.assert_close(attention.value.T @ attention.output.T, -0.1 * torch.eye(24), atol=1e-6, rtol=0)


def test_same_seed_same_weights_in_any_precision(model):
    mimetic_(model, **LANGUAGE, generator=generator())
    expected = [attention.query.clone() for attention in self_attentions(model)]
    mimetic_(model.bfloat16(), **LANGUAGE, generator=generator())
    for attention, query in zip(self_attentions(model), expected, strict=True):
        assert torch.equal(attention.query, query.bfloat16())


# --- what is refused ---


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_shares_outside_of_zero_and_one_are_refused(share, place):
    shares = [0.5, 0.5]
    shares[place] = share
    with pytest.raises(ValueError, match=f"{('alpha', 'beta')[place]} must be between 0 and 1, not {share}"):
        query_key_factors(8, 4, *shares)
    with pytest.raises(ValueError, match=f"{('alpha', 'beta')[place]} must be between 0 and 1, not {share}"):
        value_projection_factors(8, *shares)


@pytest.mark.parametrize("head_dim", [3, 0, 16, -1])
def test_heads_that_do_not_divide_the_width_are_refused(head_dim):
    with pytest.raises(ValueError, match=f"{head_dim} does not divide 8"):
        query_key_factors(8, head_dim, 0.5, 0.5)


def test_another_sign_is_refused():
    with pytest.raises(ValueError, match="must be -1 or 1, not 0"):
        value_projection_factors(8, 0.5, 0.5, sign=0)


def test_attention_that_is_not_square_is_refused():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.self_attn = nn.MultiheadAttention(8, 2, kdim=6, vdim=8)
    with pytest.raises(ValueError, match=r"0.self_attn has weights of shapes \(8, 6\), \(8, 8\)"):
        mimetic_(nn.ModuleList([layer]))
