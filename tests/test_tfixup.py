"""T-Fixup's law on torch.nn, against its closed form."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from law import assert_normal, assert_xavier
from torch import nn

from coldstart import decoder_gain, embedding_gain, encoder_gain, tfixup_, tfixup_embedding_
from coldstart.blocks import find_stacks
from coldstart.tfixup import adam_gain, depth_gain, no_gain

WIDTH, FFN, HEADS = 64, 160, 4


@given(st.integers(min_value=1, max_value=10_000))
def test_gains_are_the_paper_s(n):
    assert encoder_gain(n) == pytest.approx(0.67 / n**0.25, rel=1e-12)
    assert decoder_gain(n) == pytest.approx(1 / (9 * n) ** 0.25, rel=1e-12)
    assert embedding_gain(n) == pytest.approx(1 / (9 * n) ** 0.25, rel=1e-12)


def test_gains_of_the_paper_s_base_model():
    # 6 layers: 0.67 / 1.5651 and 1 / 2.7108, by hand
    assert encoder_gain(6) == pytest.approx(0.42809, abs=1e-5)
    assert decoder_gain(6) == pytest.approx(0.36889, abs=1e-5)


@pytest.mark.parametrize("gain", [encoder_gain, decoder_gain, embedding_gain])
@pytest.mark.parametrize("n", [0, -3])
def test_gains_refuse_less_than_one_layer(gain, n):
    with pytest.raises(ValueError, match=f"at least 1, not {n}"):
        gain(n)


def test_torch_transformer_of_unequal_depths_follows_the_law():
    model = nn.Transformer(
        WIDTH, HEADS, num_encoder_layers=5, num_decoder_layers=2, dim_feedforward=FFN, batch_first=True
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    assert tfixup_(model, generator=torch.Generator().manual_seed(1)) is model

    for layer in model.encoder.layers:
        check_attention(layer.self_attn, encoder_gain(5))
        check_feed_forward(layer, encoder_gain(5))
    for layer in model.decoder.layers:
        check_attention(layer.self_attn, decoder_gain(2))
        check_attention(layer.multihead_attn, decoder_gain(2))
        check_feed_forward(layer, decoder_gain(2))
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert all((parameter == 7.0).all() for parameter in norms), "LayerNorm is not T-Fixup's to touch"


def check_attention(attention: nn.MultiheadAttention, gain: float) -> None:
    query, key, value = attention.in_proj_weight.split(WIDTH)
    assert_xavier(query, 2**-0.5)
    assert_xavier(key, 2**-0.5)
    assert_xavier(value, gain)
    assert_xavier(attention.out_proj.weight, gain)
    assert not attention.in_proj_bias.any()
    assert not attention.out_proj.bias.any()


def check_feed_forward(layer: nn.Module, gain: float) -> None:
    assert_xavier(layer.linear1.weight, gain)
    assert_xavier(layer.linear2.weight, gain)
    assert not layer.linear1.bias.any()
    assert not layer.linear2.bias.any()


def test_encoder_only_model_follows_the_encoder_law():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN)
    model = tfixup_(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    assert_xavier(model.layers[2].linear1.weight, encoder_gain(3))
    # nn.TransformerEncoder starts as copies of one layer; T-Fixup must not keep them equal.
    assert not torch.equal(model.layers[0].linear1.weight, model.layers[1].linear1.weight)


def test_law_for_adam_agrees_with_the_paper_up_to_six_layers_and_falls_as_one_over_n_beyond():
    def gains(encoder_layers, decoder_layers):
        model = nn.Transformer(8, 2, encoder_layers, decoder_layers, 8, batch_first=True)
        return [(adam_gain(stack), depth_gain(stack)) for stack in find_stacks(model)]

    for adam, paper in (*gains(6, 6), *gains(1, 2)):
        assert adam == pytest.approx(paper, rel=1e-12)
    (encoder, _), (decoder, _) = gains(12, 24)
    assert encoder == pytest.approx(encoder_gain(6) / 2, rel=1e-12)
    assert decoder == pytest.approx(decoder_gain(6) / 4, rel=1e-12)


def test_without_a_law_weights_are_xavier_s():
    model = nn.Transformer(WIDTH, HEADS, 3, 2, FFN, batch_first=True)
    tfixup_(model, gain=no_gain)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        check_attention(layer.self_attn, 1.0)
        check_feed_forward(layer, 1.0)


def test_cross_attention_to_another_width():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, HEADS, FFN) for _ in range(4))
            for layer in self.layers:
                layer.multihead_attn = nn.MultiheadAttention(WIDTH, HEADS, kdim=96, vdim=128)

    attention = tfixup_(Decoder()).layers[3].multihead_attn
    assert_xavier(attention.q_proj_weight, 2**-0.5)
    assert_xavier(attention.k_proj_weight, 2**-0.5)
    assert_xavier(attention.v_proj_weight, decoder_gain(4))
    assert_xavier(attention.out_proj.weight, decoder_gain(4))


def test_same_seed_same_weights():
    def weights(seed):
        model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        tfixup_(model, generator=torch.Generator().manual_seed(seed))
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_global_generator_is_left_alone_when_one_is_given():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    before = torch.get_rng_state()
    tfixup_(model, generator=torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


def test_embedding():
    embedding = tfixup_embedding_(nn.Embedding(500, WIDTH, padding_idx=1), num_layers=6)
    assert not embedding.weight[1].any()
    rows = torch.cat([embedding.weight[:1], embedding.weight[2:]])
    assert_normal(rows, (9 * 6) ** -0.25 * WIDTH**-0.5)


def test_output_stays_bounded_where_xavier_explodes():
    """The toy of the T-Fixup account: linearised attention and feed-forward blocks, 200 layers deep."""

    def output_over_input(model):
        x = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(1))
        y = x
        for layer in find_stacks(model)[0].layers:
            y = y + y @ layer.self_attention.value.T @ layer.self_attention.output.T
            y = y + torch.relu(y @ layer.feed_forward.inner.T) @ layer.feed_forward.outer.T
        return (y.norm() / x.norm()).item()

    torch.manual_seed(0)
    model = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 128) for _ in range(200))
    with torch.no_grad():
        assert 1.0 < output_over_input(tfixup_(model)) < 1.5
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
        assert not math.isfinite(output_over_input(model)) or output_over_input(model) > 1e6


def test_no_layers_is_one_sentence():
    with pytest.raises(ValueError, match="no Transformer layers found in Linear"):
        tfixup_(nn.Linear(3, 3))


def test_flattened_weights_are_refused():
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    layer.linear1.weight = nn.Parameter(layer.linear1.weight.detach().flatten())
    with pytest.raises(ValueError, match="whole weight matrices"):
        tfixup_(nn.ModuleList([layer]))
