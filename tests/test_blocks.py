"""Finding the weights: the right ones, all of them, as views of the parameters."""

import pytest
import torch
from torch import nn

from coldstart.blocks import find_stacks, layer_norms, remove_layer_norms_


def test_stacks_of_torch_transformer():
    encoder, decoder = find_stacks(nn.Transformer(16, 2, 3, 2, 32, batch_first=True))
    assert (encoder.name, len(encoder.layers), encoder.has_cross_attention) == ("encoder", 3, False)
    assert (decoder.name, len(decoder.layers), decoder.has_cross_attention) == ("decoder", 2, True)
    assert encoder.layers[2].self_attention.name == "encoder.layers.2.self_attn"
    assert decoder.layers[1].cross_attention.name == "decoder.layers.1.multihead_attn"


def test_packed_projections_are_views_of_thirds():
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    attention = find_stacks(nn.ModuleList([layer]))[0].layers[0].self_attention
    with torch.no_grad():
        attention.query.fill_(1.0)
        attention.key.fill_(2.0)
        attention.value.fill_(3.0)
    assert layer.self_attn.in_proj_weight[:, 0].tolist() == [1.0] * 16 + [2.0] * 16 + [3.0] * 16


def test_every_weight_and_bias_is_found_once():
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)
    found = 0
    for stack in find_stacks(model):
        for layer in stack.layers:
            for attention in layer.attentions:
                weights = (attention.query, attention.key, attention.value, attention.output)
                found += sum(tensor.numel() for tensor in (*weights, *attention.biases))
            block = layer.feed_forward
            found += sum(tensor.numel() for tensor in (block.inner, block.outer, *block.biases))
    norms = sum(p.numel() for parent, name in layer_norms(model) for p in getattr(parent, name).parameters())
    assert found + norms == sum(p.numel() for p in model.parameters())


def test_unknown_layer_between_known_ones_is_refused():
    mixed = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32), nn.Linear(16, 16)])
    with pytest.raises(ValueError, match="layer 1 is a Linear"):
        find_stacks(mixed)


def test_layer_outside_of_any_container_is_refused():
    model = nn.ModuleDict({"deep": nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)})
    assert len(find_stacks(model)) == 1
    holder = nn.Module()
    holder.first, holder.rest = nn.TransformerEncoderLayer(16, 2, 32), model
    with pytest.raises(ValueError, match=r"layer 'first' .* is in no container"):
        find_stacks(holder)


def test_module_dict_is_a_stack():
    stack = nn.ModuleDict({name: nn.TransformerEncoderLayer(16, 2, 32) for name in "ab"})
    assert [layer.self_attention.name for layer in find_stacks(stack)[0].layers] == ["a.self_attn", "b.self_attn"]


def test_padded_batches_without_layer_norm():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = remove_layer_norms_(nn.TransformerEncoder(layer, 2))
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    trained, evaluated = (model.train(mode)(x, src_key_padding_mask=padding) for mode in (True, False))
    torch.testing.assert_close(trained, evaluated)


@pytest.mark.parametrize("training", [True, False])
def test_removed_layer_norm_leaves_nothing_and_computes_plain_residuals(training):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = remove_layer_norms_(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16))).train(training)
    assert not layer_norms(model)
    assert not [name for name, _ in model.named_parameters() if "norm" in name]

    x = torch.randn(3, 5, 16)
    expected = x
    for layer in model.layers:
        expected = expected + layer.self_attn(expected, expected, expected)[0]
        expected = expected + layer.linear2(torch.relu(layer.linear1(expected)))
    torch.testing.assert_close(model(x), expected)


def branches_of(model):
    return [[(branch.kind, branch.modules) for branch in layer.branches] for layer in find_stacks(model)[-1].layers]


def test_branches_are_the_modules_called_between_two_places_of_the_stream():
    post, pre = (nn.TransformerDecoderLayer(16, 2, 32, norm_first=norm_first) for norm_first in (False, True))
    assert branches_of(nn.ModuleList([post, pre])) == [
        [
            ("self-attention", ("0.self_attn",)),
            ("cross-attention", ("0.multihead_attn",)),
            ("feed-forward", ("0.linear1", "0.linear2")),
        ],
        [
            ("self-attention", ("1.norm1", "1.self_attn")),
            ("cross-attention", ("1.norm2", "1.multihead_attn")),
            ("feed-forward", ("1.norm3", "1.linear1", "1.linear2")),
        ],
    ]
    encoder = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)])
    feed_forward = ("feed-forward", ("0.norm2", "0.linear1", "0.linear2"))
    assert branches_of(encoder) == [[("self-attention", ("0.norm1", "0.self_attn")), feed_forward]]


class Block(nn.Module):
    """timm's Pre-LN block, by its names."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(4), nn.Module(), nn.Identity()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(4), nn.Module(), nn.Identity()
        self.attn.num_heads, self.attn.qkv, self.attn.proj = 1, nn.Linear(4, 12), nn.Linear(4, 4)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)


class ResPostBlock(Block):
    """timm's block that normalises its branches."""


def test_branches_of_timm_end_behind_what_scales_or_normalises_them():
    assert branches_of(nn.Sequential(Block(), ResPostBlock())) == [
        [("self-attention", ("0.norm1", "0.attn", "0.ls1")), ("feed-forward", ("0.norm2", "0.mlp", "0.ls2"))],
        [("self-attention", ("1.attn", "1.norm1")), ("feed-forward", ("1.mlp", "1.norm2"))],
    ]
