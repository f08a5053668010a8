"""Admin on fairseq's layers: what its profile finds, and what the omegas do to the model."""

import itertools
import math

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import LayerDropModuleList
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from coldstart.admin import add_skip_weights_, admin_, set_skip_weights_, skip_weight
from coldstart.blocks import find_stacks, weighted_residuals

WIDTH, LENGTH = 32, 9


def configuration(*, pre_ln: bool = False, dropout: float = 0.0) -> TransformerConfig:
    config = TransformerConfig(dropout=dropout)
    for side in (config.encoder, config.decoder):
        side.embed_dim, side.ffn_embed_dim, side.attention_heads, side.normalize_before = WIDTH, 64, 4, pre_ln
    return config


class Stacks(nn.Module):
    """An encoder and perhaps a decoder on vectors (length, batch, width)."""

    def __init__(self, layers: int, decoder_layers: int = 0, *, drop: float = 0.0, seed: int = 1, **settings) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = configuration(**settings)
        self.encoder = LayerDropModuleList(drop) if drop else nn.ModuleList()
        self.encoder.extend(TransformerEncoderLayerBase(config) for _ in range(layers))
        self.decoder = nn.ModuleList(TransformerDecoderLayerBase(config) for _ in range(decoder_layers))

    def forward(self, x: Tensor) -> Tensor:
        encoded = x
        for layer in self.encoder:
            encoded = layer(encoded, None)
        for layer in self.decoder:
            x = layer(x, encoded)[0]
        return x if len(self.decoder) else encoded


def stream(seed: int = 1, std: float = 1.3, length: int = LENGTH) -> Tensor:
    """As embeddings are, of a variance of their own."""
    return std * torch.randn(length, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def omegas(model: nn.Module) -> list[Tensor]:
    """Of all branches, the encoder's first."""
    branches = itertools.chain.from_iterable(weighted_residuals(model, stack) for stack in find_stacks(model))
    return [branch.skip_weight for branch in branches]


def summands(model: nn.Module, x: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
    """(f_i, x_(i-1)) of every branch of every stack, in a forward pass."""
    seen = []
    for stack in find_stacks(model):
        branches = []
        seen.append(branches)
        for residual in weighted_residuals(model, stack):
            residual.register_forward_pre_hook(lambda module, inputs, branches=branches: branches.append(inputs[0]))
    with torch.no_grad():
        model(x)
    return seen


def variance(tensor: Tensor) -> float:
    return tensor.var(correction=0).item()


def test_law():
    assert skip_weight(1.5, []) == 1.0
    assert skip_weight(1.5, [0.5, 2.0]) == 2.0


@pytest.mark.parametrize("depths", [(3, 0), (2, 3)])
def test_each_omega_is_what_the_branches_before_it_add_up_to(depths):
    """The condition of the paper, in the model that is to be trained, by every branch that a forward pass shows."""
    model = add_skip_weights_(Stacks(*depths))
    found = admin_(model, model, [stream()])
    assert len(found) == 2 * depths[0] + 3 * depths[1]
    expected = []
    for branches in summands(model, stream()):
        variances = [variance(branches[0][1]), *(variance(output) for output, _ in branches)]
        assert variances[0] == pytest.approx(1.69, rel=0.1)
        expected += [1.0, *(math.sqrt(total) for total in itertools.accumulate(variances))][: len(branches) + 1]
        del expected[len(expected) - len(branches)]  # the root of Var[x_0] alone is of no branch
    assert list(found.values()) == pytest.approx(expected, rel=1e-5)
    for omega, value in zip(omegas(model), found.values(), strict=True):
        assert isinstance(omega, nn.Parameter)
        assert omega.requires_grad
        torch.testing.assert_close(omega.detach(), torch.full((WIDTH,), value))


def test_the_stream_has_the_variance_of_a_sum_without_layer_norm():
    """Each sum has the variance that the next omega restores, up to what branch and stream have in common."""
    model = add_skip_weights_(Stacks(12))
    admin_(model, model, [stream()])
    (branches,) = summands(model, stream())
    weights = [omega.detach() for omega in omegas(model)]
    for (output, skip), omega, following in zip(branches, weights, weights[1:], strict=False):
        assert variance(output + omega * skip) == pytest.approx(following[0].item() ** 2, rel=0.25)


def test_a_branch_has_the_share_that_it_has_in_pre_ln():
    model = add_skip_weights_(Stacks(12))
    admin_(model, model, [stream()])
    (branches,) = summands(model, stream())
    shares = [variance(output) / variance(o * skip) for (output, skip), o in zip(branches, omegas(model), strict=True)]

    pre_ln = Stacks(12, pre_ln=True)
    seen = []
    for layer in pre_ln.encoder:
        layer.residual_connection = lambda x, residual: seen.append(variance(x) / variance(residual)) or x + residual
    with torch.no_grad():
        pre_ln(stream())
    assert len(shares) == len(seen) == 24
    # of which the first differs: x_0 goes into its branch as it is, not normalised
    for share, expected in list(zip(shares, seen, strict=True))[1:]:
        assert 0.6 < share / expected < 1.6


@torch.no_grad()
def mean_change(layers: int, *, profiled: bool) -> float:
    """The mean square of what a small random change of all matrices does to the output of an encoder."""
    changes, x = [], stream(std=0.3)
    for seed in range(4):
        model = add_skip_weights_(Stacks(layers, seed=seed))
        if profiled:
            admin_(model, model, [x])
        before = model(x)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(1e-3 * parameter.std() * torch.randn(parameter.shape))
        changes.append((model(x) - before).square().mean().item())
    return sum(changes) / len(changes)


def test_the_change_of_the_output_grows_slower_with_depth():
    """The paper's theorem: in proportion to the depth with Post-LN, to its logarithm with Admin."""
    admin, post_ln = (mean_change(64, profiled=p) / mean_change(4, profiled=p) for p in (True, False))
    assert admin < 4
    assert post_ln > 8


def test_omegas_of_one_are_post_ln():
    x = stream()
    torch.testing.assert_close(add_skip_weights_(Stacks(2, 2))(x), Stacks(2, 2)(x))


def test_nothing_but_the_omegas_changes():
    model = add_skip_weights_(Stacks(2, 2)).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    admin_(model, model, [stream()])
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed <= {name for name in before if name.endswith("skip_weight")}
    assert len(changed) == 8  # the first of each stack stays 1
    assert not model.encoder.training
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_several_batches_are_averaged():
    def profile(*batches):
        model = add_skip_weights_(Stacks(2))
        return list(admin_(model, model, batches).values())

    short, long = stream(1, length=3), stream(2, length=30)
    for mean, first, second in zip(profile(short, long), profile(short), profile(long), strict=True):
        assert mean**2 == pytest.approx((first**2 + second**2) / 2)
    assert profile(short) != profile(long)


def test_dropout_is_part_of_a_branch():
    rate = 0.3
    with_dropout, without = (add_skip_weights_(Stacks(1, dropout=rate)) for rate in (rate, 0.0))
    x = stream(length=200)
    first, second = (list(admin_(model, model, [x]).values()) for model in (with_dropout, without))
    added = [omega**2 - variance(x) for omega in (first[1], second[1])]
    assert added[0] / added[1] == pytest.approx(1 / (1 - rate), rel=0.05)


def test_layers_that_layer_drop_would_leave_out_are_profiled():
    model = add_skip_weights_(Stacks(6, drop=0.9)).train()
    everything = add_skip_weights_(Stacks(6))
    assert list(admin_(model, model, [stream()]).values()) == list(admin_(everything, everything, [stream()]).values())
    assert all(module.training for module in model.modules())


def test_omegas_are_set_from_what_was_found():
    model, other = add_skip_weights_(Stacks(2)), add_skip_weights_(Stacks(2))
    found = admin_(model, model, [stream()])
    assert set_skip_weights_(other, found) is other
    for ours, theirs in zip(omegas(other), omegas(model), strict=True):
        assert torch.equal(ours, theirs)


def test_omegas_are_trained():
    model = add_skip_weights_(Stacks(2, 2))
    admin_(model, model, [stream()])
    model(stream()).square().mul(torch.randn(WIDTH)).sum().backward()
    assert all(omega.grad.abs().max() > 0 for omega in omegas(model))


def test_what_is_refused():
    model = add_skip_weights_(Stacks(2))
    with pytest.raises(
        ValueError, match=r"for encoder\.0\.self_attn_layer_norm: every branch must run on the profiled"
    ):
        admin_(model, model, [])
    with pytest.raises(ValueError, match="no finite variance for"):
        admin_(model, model, [stream() * math.inf])
    with pytest.raises(ValueError, match="call add_skip_weights_ first"):
        admin_(Stacks(1), None, [])
    with pytest.raises(ValueError, match="residual connections of the model have weights already"):
        add_skip_weights_(add_skip_weights_(Stacks(1)))
    with pytest.raises(ValueError, match="TransformerEncoderLayerBase normalises before its branches"):
        add_skip_weights_(Stacks(1, pre_ln=True))
    with pytest.raises(ValueError, match="residual weights need fairseq's layers"):
        add_skip_weights_(nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32)]))
