"""DeepNorm's constants against their closed form, and its weights on torch.nn."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from law import assert_normal
from torch import Tensor, nn

from coldstart.blocks import find_stacks
from coldstart.deepnorm import (
    decoder_constants,
    deepnorm_,
    deepnorm_weights_,
    encoder_constants,
    law_for,
    single_constants,
)

WIDTH, FFN, HEADS = 64, 160, 4
DEPTHS = st.integers(min_value=1, max_value=10_000)


@given(DEPTHS, DEPTHS)
def test_constants_are_the_paper_s(n, m):
    assert single_constants(n) == pytest.approx(((2 * n) ** (1 / 4), (8 * n) ** (-1 / 4)), rel=1e-12)
    assert decoder_constants(m) == pytest.approx(((3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)), rel=1e-12)
    root = n ** (1 / 4) * m ** (1 / 16)
    assert encoder_constants(n, m) == pytest.approx((0.81 * root, 0.87 / root), rel=1e-12)


def test_constants_of_known_models():
    """By hand: 6 layers alone; 6+6; 18+6, where the encoder's depth counts four times the decoder's."""
    assert single_constants(6) == pytest.approx((1.86121, 0.37992), abs=1e-5)
    assert encoder_constants(6, 6) == pytest.approx((1.41786, 0.49701), abs=1e-4)
    assert decoder_constants(6) == pytest.approx((2.05977, 0.34329), abs=1e-5)
    assert encoder_constants(18, 6).alpha / encoder_constants(6, 6).alpha == pytest.approx(3**0.25)
    assert encoder_constants(6, 18).alpha / encoder_constants(6, 6).alpha == pytest.approx(3 ** (1 / 16))


@given(DEPTHS)
def test_a_branch_weighs_the_same_at_any_depth_of_a_single_stack(n):
    """beta^2 is what the gain of two matrices does to a branch, and alpha weighs the stream beside it: with 2N
    branches, the paper's bound of the update is 2N (beta / alpha)^2, here 1/2 whatever N is."""
    alpha, beta = single_constants(n)
    assert 2 * n * (beta / alpha) ** 2 == pytest.approx(0.5)


@pytest.mark.parametrize("n", [0, -3])
def test_less_than_one_layer_is_refused(n):
    for constants in (single_constants, decoder_constants, lambda n: encoder_constants(n, 6)):
        with pytest.raises(ValueError, match=f"at least 1, not {n}"):
            constants(n)
    with pytest.raises(ValueError, match=f"at least 1, not {n}"):
        encoder_constants(6, n)


def assert_xavier_normal(weight: Tensor, gain: float) -> None:
    assert_normal(weight, gain * (2 / sum(weight.shape)) ** 0.5)


def check_attention(attention: nn.MultiheadAttention, beta: float) -> None:
    query, key, value = attention.in_proj_weight.split(WIDTH)
    assert_xavier_normal(query, 1.0)
    assert_xavier_normal(key, 1.0)
    assert_xavier_normal(value, beta)
    assert_xavier_normal(attention.out_proj.weight, beta)
    assert not attention.in_proj_bias.any()
    assert not attention.out_proj.bias.any()


def check_feed_forward(layer: nn.Module, beta: float) -> None:
    for linear in (layer.linear1, layer.linear2):
        assert_xavier_normal(linear.weight, beta)
        assert not linear.bias.any()


@pytest.mark.parametrize(("n", "m"), [(5, 2), (1, 4)])
def test_torch_transformer_of_unequal_depths_follows_the_law(n, m):
    model = nn.Transformer(WIDTH, HEADS, n, m, FFN, batch_first=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert deepnorm_weights_(model, generator=torch.Generator().manual_seed(1)) is model
    beta = 0.87 * (n**4 * m) ** (-1 / 16)
    for layer in model.encoder.layers:
        check_attention(layer.self_attn, beta)
        check_feed_forward(layer, beta)
    beta = (12 * m) ** -0.25
    for layer in model.decoder.layers:
        check_attention(layer.self_attn, beta)
        check_attention(layer.multihead_attn, beta)
        check_feed_forward(layer, beta)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert all((parameter == 7.0).all() for parameter in norms)


def test_an_encoder_alone_follows_the_law_of_one_stack():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, FFN), 3, enable_nested_tensor=False)
    deepnorm_weights_(model, generator=torch.Generator().manual_seed(2))
    for layer in model.layers:
        check_feed_forward(layer, 24**-0.25)
    assert not torch.equal(model.layers[0].linear1.weight, model.layers[1].linear1.weight)


def test_same_seed_same_weights():
    def weights(seed):
        model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        return deepnorm_weights_(model, generator=torch.Generator().manual_seed(seed)).encoder.layers[1].linear1.weight

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_decoders_of_two_depths_are_refused():
    model = nn.ModuleList(nn.Transformer(16, 2, 1, depth, 32, batch_first=True) for depth in (2, 3))
    with pytest.raises(ValueError, match="decoders of 2 and 3 layers"):
        law_for(model)


def test_layers_that_sum_out_of_reach_are_refused():
    model = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32)])
    assert len(find_stacks(model)) == 1
    with pytest.raises(ValueError, match="TransformerEncoderLayer sums its branches where no weight can come between"):
        deepnorm_(model)
