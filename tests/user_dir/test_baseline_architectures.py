"""The baselines, DeepNorm and Admin: their forward pass by hand, DeepNorm's law tensor by tensor, and the options."""

import math
from unittest.mock import MagicMock

import pytest
import torch
from architectures import SOURCE, TARGET, build_from_hydra, build_from_options, parse
from fairseq.data import Dictionary
from fairseq.trainer import Trainer
from law import assert_normal
from torch import Tensor, nn
from torch.nn import functional

from coldstart.blocks import WeightedResidual

WIDTH, HEADS = 64, 4
DECODER = ("--decoder-embed-dim", "64", "--decoder-ffn-embed-dim", "128", "--decoder-attention-heads", "4")
ENCODER = ("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-attention-heads", "4")
DEEPNORM, ADMIN = "transformer_deepnorm", "transformer_admin"
LM_DEEPNORM, LM_ADMIN = "transformer_lm_deepnorm", "transformer_lm_admin"
EVERY = (DEEPNORM, ADMIN, LM_DEEPNORM, LM_ADMIN)
TOKENS = torch.randint(4, 250, (3, 7), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.full((3,), 7)


def build(arch: str, *arguments: str, depths: tuple[int, int] = (3, 2), target: Dictionary | None = None) -> nn.Module:
    """A small model, no dropout, of the seed 1; the second depth is the decoder's."""
    torch.manual_seed(1)
    language = arch.startswith("transformer_lm")
    sizes = [*DECODER, "--decoder-layers", str(depths[1])]
    if not language:
        sizes += [*ENCODER, "--encoder-layers", str(depths[0])]
    elif arch == "transformer_lm":
        sizes += ["--decoder-input-dim", "64", "--decoder-output-dim", "64"]
    target = target or (SOURCE if language else TARGET)
    return build_from_options(arch, *sizes, "--dropout", "0", *arguments, target=target)


def inputs_of(model: nn.Module) -> tuple[Tensor, ...]:
    return (TOKENS, LENGTHS, TOKENS) if hasattr(model, "encoder") else (TOKENS,)


def omegas(model: nn.Module) -> dict[str, Tensor]:
    return {name: module.skip_weight for name, module in model.named_modules() if isinstance(module, WeightedResidual)}


# --- the forward pass, by hand ---


def attend(attention: nn.Module, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
    query, key, value = (
        project(source).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for project, source in ((attention.q_proj, x), (attention.k_proj, memory), (attention.v_proj, memory))
    )
    scores = query @ key.mT / math.sqrt(WIDTH / HEADS)
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
    return attention.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def add_and_norm(residual: WeightedResidual, skip_weight: Tensor | float, x: Tensor, branch: Tensor) -> Tensor:
    norm = residual.norm
    return functional.layer_norm(skip_weight * x + branch, (WIDTH,), norm.weight, norm.bias)


def run_by_hand(side: nn.Module, x: Tensor, alpha: float | None, memory: Tensor | None = None) -> Tensor:
    """Post-LN on (batch, length, width) with one weight for all branches, or with each branch's own."""
    causal = hasattr(side, "output_projection")
    for layer in side.layers:
        branches = [(layer.self_attn_layer_norm, lambda x, layer=layer: attend(layer.self_attn, x, x, causal))]
        if memory is not None:
            norm = layer.encoder_attn_layer_norm
            branches.append((norm, lambda x, layer=layer: attend(layer.encoder_attn, x, memory, False)))
        branches.append((layer.final_layer_norm, lambda x, layer=layer: layer.fc2(layer.fc1(x).relu())))
        for residual, branch in branches:
            x = add_and_norm(residual, residual.skip_weight if alpha is None else alpha, x, branch(x))
    return x


def embedded(side: nn.Module) -> Tensor:
    return math.sqrt(WIDTH) * side.embed_tokens(TOKENS) + side.embed_positions(TOKENS)


def randomise_(model: nn.Module) -> None:
    """Omegas, biases and norms that are all different."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.rand(parameter.shape))


@pytest.mark.parametrize("depths", [(3, 2), (1, 4)])
@pytest.mark.parametrize("arch", EVERY)
def test_forward_pass(arch, depths):
    model = build(arch, depths=depths).eval()
    randomise_(model)
    n, m = depths
    encoder_alpha, decoder_alpha = (0.81 * (n**4 * m) ** (1 / 16), (3 * m) ** 0.25)
    memory = None
    with torch.no_grad():
        if arch in (DEEPNORM, ADMIN):
            memory = run_by_hand(model.encoder, embedded(model.encoder), encoder_alpha if arch == DEEPNORM else None)
            encoded = model.encoder(TOKENS, LENGTHS)["encoder_out"][0].transpose(0, 1)
            torch.testing.assert_close(encoded, memory, atol=1e-5, rtol=1e-4)
        else:
            decoder_alpha = (2 * m) ** 0.25
        alpha = decoder_alpha if "deepnorm" in arch else None
        decoded = run_by_hand(model.decoder, embedded(model.decoder), alpha, memory)
        expected = decoded @ model.decoder.output_projection.weight.T
        torch.testing.assert_close(model(*inputs_of(model))[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", [ADMIN, LM_ADMIN])
def test_admin_begins_as_fairseq_s_post_ln_of_the_same_seed(arch):
    ours, stock = build(arch).eval(), build(arch.removesuffix("_admin")).eval()
    assert len(omegas(ours)) == (12 if arch == ADMIN else 4)
    assert all(isinstance(omega, nn.Parameter) and omega.shape == (WIDTH,) for omega in omegas(ours).values())
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs_of(ours))[0], stock(*inputs_of(ours))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", EVERY)
def test_gradients_are_the_same_when_activations_are_recomputed(arch):
    gradients = []
    for arguments in ((), ("--checkpoint-activations",)):
        model = build(arch, *arguments).train()
        randomise_(model)
        torch.manual_seed(2)
        model(*inputs_of(model))[0].square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert sum("skip_weight" in name for name in gradients[0]) == {ADMIN: 12, LM_ADMIN: 4}.get(arch, 0)
    for name, gradient in gradients[0].items():
        assert gradient.any() or name.endswith("k_proj.bias")
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("arch", EVERY)
def test_torchscript(arch):
    model = build(arch).eval()
    randomise_(model)
    inputs = inputs_of(model)
    if arch.startswith("transformer_lm"):  # fairseq's model of language itself cannot be scripted, but its decoder can
        model = model.decoder
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(model)(*inputs)[0], model(*inputs)[0])


@pytest.mark.parametrize("arch", [DEEPNORM, ADMIN])
def test_incremental_decoding(arch):
    """A word at a time gives the scores of all at once."""
    model = build(arch).eval()
    randomise_(model)
    with torch.no_grad():
        encoded = model.encoder(TOKENS, LENGTHS)
        whole, _ = model.decoder(TOKENS, encoder_out=encoded)
        state = {}
        steps = [model.decoder(TOKENS[:, : i + 1], encoder_out=encoded, incremental_state=state)[0] for i in range(7)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-4, rtol=1e-4)


# --- DeepNorm's law ---


def assert_xavier_normal(weight: Tensor, gain: float) -> None:
    assert_normal(weight, gain * math.sqrt(2 / sum(weight.shape)))


def check_side(side: nn.Module, layers: int, alpha: float, beta: float) -> None:
    """Every tensor of every layer, read by fairseq's own names."""
    assert len(side.layers._modules) == layers
    for layer in side.layers._modules.values():
        for attention in filter(None, (layer.self_attn, getattr(layer, "encoder_attn", None))):
            assert_xavier_normal(attention.q_proj.weight, 1.0)
            assert_xavier_normal(attention.k_proj.weight, 1.0)
            assert_xavier_normal(attention.v_proj.weight, beta)
            assert_xavier_normal(attention.out_proj.weight, beta)
        assert_xavier_normal(layer.fc1.weight, beta)
        assert_xavier_normal(layer.fc2.weight, beta)
    assert not [name for name, tensor in side.named_parameters() if name.endswith("bias") and tensor.any()]
    weights = omegas(side).values()
    assert len(weights) == layers * (3 if getattr(side.layers._modules["0"], "encoder_attn", None) else 2)
    assert all(weight.item() == pytest.approx(alpha, rel=1e-6) for weight in weights)


@pytest.mark.parametrize("depths", [(3, 2), (1, 5), (6, 1)], ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--encoder-layerdrop", "0.9", "--decoder-layerdrop", "0.9", "--quant-noise-pq", "0.1"),
        ("--checkpoint-activations", "--decoder-embed-dim", "96", "--share-decoder-input-output-embed"),
    ],
    ids=lambda arguments: "".join(arguments[:1]),
)
def test_deepnorm_of_translation(depths, arguments):
    n, m = depths
    model = build(DEEPNORM, *arguments, depths=depths)
    check_side(model.encoder, n, 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16))
    check_side(model.decoder, m, (3 * m) ** 0.25, (12 * m) ** -0.25)


@pytest.mark.parametrize("layers", [1, 4])
def test_deepnorm_of_language(layers):
    check_side(build(LM_DEEPNORM, depths=(0, layers)).decoder, layers, (2 * layers) ** 0.25, (8 * layers) ** -0.25)


@pytest.mark.parametrize("arch", EVERY)
def test_what_is_around_the_layers_is_fairseq_s(arch):
    ours, stock = build(arch), dict(build(arch.replace("_deepnorm", "").replace("_admin", "")).named_parameters())
    around = {name: parameter for name, parameter in ours.named_parameters() if ".layers." not in name}
    assert around.keys() == {name for name in stock if ".layers." not in name}
    assert all(torch.equal(parameter, stock[name]) for name, parameter in around.items())


def test_deepnorm_s_weights_go_with_the_layers_that_are_loaded():
    """A model of fewer layers, as fairseq builds it to load some of those of another, works with those as they are."""
    six, two = build(DEEPNORM, depths=(6, 6)), build(DEEPNORM, depths=(2, 2))
    kept = {name: tensor for name, tensor in six.state_dict().items() if name in two.state_dict()}
    two.load_state_dict(kept)
    assert {weight.item() for weight in omegas(two.decoder).values()} == {torch.tensor(18**0.25).item()}


# --- Admin's profile ---


def sample(model: nn.Module) -> dict:
    names = ("src_tokens", "src_lengths", "prev_output_tokens")
    return {"net_input": dict(zip(names, inputs_of(model), strict=False))}


@pytest.mark.parametrize("arguments", [(), ("--encoder-layerdrop", "0.9", "--decoder-layerdrop", "0.9"), ("--fp16",)])
@pytest.mark.parametrize("arch", [ADMIN, LM_ADMIN])
def test_admin_is_profiled_by_the_batches_that_it_is_shown(arch, arguments):
    if arch == LM_ADMIN:
        arguments = [argument.replace("encoder-", "decoder-") for argument in arguments]
    model = build(arch, *arguments)
    if "--fp16" in arguments:
        model.half()
    assert model.wants_training_data
    model.see_training_data([sample(model)])
    assert not model.wants_training_data
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, WeightedResidual):
            module.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[0]}))
    with torch.no_grad():
        model.eval()(*inputs_of(model))
    for side in ("encoder", "decoder"):
        total = None
        for name, (branch, stream) in seen.items():
            if name.startswith(side):
                omega = 1.0 if total is None else math.sqrt(total)
                torch.testing.assert_close(omegas(model)[name].float(), torch.full((WIDTH,), omega), rtol=2e-3, atol=0)
                total = (stream.float().var().item() if total is None else total) + branch.float().var().item()
    assert len(seen) == len(omegas(model)) == (12 if arch == ADMIN else 4)


@pytest.mark.parametrize("arch", [ADMIN, LM_ADMIN])
def test_a_loaded_model_wants_no_training_data(arch):
    model = build(arch)
    model.load_state_dict(model.state_dict())
    assert not model.wants_training_data


def test_shards_cannot_be_profiled(plugin):
    trainer = MagicMock(is_fsdp=True, _optimizer=None)
    trainer.get_model.return_value = build(ADMIN)
    with pytest.raises(ValueError, match="--ddp-backend fully_sharded shards the weights before the model can be init"):
        Trainer.get_train_iterator(trainer, epoch=1)


# --- options ---


@pytest.mark.parametrize("arch", EVERY)
def test_pre_ln_is_refused(arch):
    law = "DeepNorm" if "deepnorm" in arch else "Admin"
    for side in ("decoder",) if "lm" in arch else ("encoder", "decoder"):
        with pytest.raises(ValueError, match=f"--{side}-normalize-before is Pre-LN, but {law} is a law of Post-LN"):
            build(arch, f"--{side}-normalize-before")
        with pytest.raises(ValueError, match=f"--{side}-layers must be at least 1 for {law}, not 0"):
            build(arch, f"--{side}-layers", "0")


def test_gradinit_of_admin_is_refused(plugin):
    from user_dir.models.transformer_admin import refuse_gradinit
    from user_dir.tasks.gradinit import GradInitTranslationTask

    with pytest.raises(ValueError, match="Admin and GradInit both choose the weights of the skip connections"):
        refuse_gradinit(GradInitTranslationTask.__new__(GradInitTranslationTask))


@pytest.mark.parametrize("arch", EVERY)
def test_mimetic_attention_is_off_until_it_is_asked_for(arch):
    """Values and output have the product of the paper times what the law does to two matrices."""
    model = build(arch, "--mimetic-qk", "0,0.5", "--mimetic-vo", "0,0.4", "--position-scale", "2")
    beta = {DEEPNORM: 24**-0.25, LM_DEEPNORM: 16**-0.25}.get(arch, 1.0)
    attention = model.decoder.layers[0].self_attn
    product = attention.v_proj.weight.T @ attention.out_proj.weight.T
    torch.testing.assert_close(product, -0.4 * beta**2 * torch.eye(WIDTH), atol=1e-5, rtol=0)
    torch.testing.assert_close(attention.q_proj.weight, attention.k_proj.weight, atol=1e-5, rtol=0)
    query = build(arch).decoder.layers[0].self_attn.q_proj.weight
    assert not torch.allclose(query, attention.q_proj.weight, atol=1e-2)
    scaled, plain = (built.decoder.embed_positions(TOKENS) for built in (model, build(arch)))
    torch.testing.assert_close(scaled, 2 * plain)


@pytest.mark.parametrize(
    ("size", "layers", "widths"),
    [
        ("", 6, (512, 2048, 8)),
        ("_iwslt_de_en", 6, (512, 1024, 4)),
        ("_wmt_en_de", 6, (512, 2048, 8)),
        ("_wmt_en_de_big", 6, (1024, 4096, 16)),
        ("_200l", 200, (64, 128, 2)),
    ],
)
@pytest.mark.parametrize("arch", [DEEPNORM, ADMIN])
def test_sizes(arch, size, layers, widths):
    args = parse(f"{arch}{size}")
    for side in ("encoder", "decoder"):
        found = (getattr(args, f"{side}_{name}") for name in ("embed_dim", "ffn_embed_dim", "attention_heads"))
        assert tuple(found) == widths
        assert getattr(args, f"{side}_layers") == layers
    assert (args.mimetic_qk, args.mimetic_vo, args.mimetic_vo_sign, args.position_scale) == ("none", "none", -1, 1)


@pytest.mark.parametrize("arch", EVERY)
def test_closed_configuration_as_hydra_gives_it(arch):
    sides = ("decoder",) if "lm" in arch else ("encoder", "decoder")
    model = build_from_hydra(arch, target=SOURCE if "lm" in arch else TARGET, **{f"{side}_layers": 1 for side in sides})
    assert len(omegas(model)) == (2 if "lm" in arch else 5)
