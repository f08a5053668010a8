"""Architectures with mimetic attention, and the language models: what every tensor is, and what the options do."""

import pytest
import torch
from architectures import SOURCE, TARGET, build_from_hydra, build_from_options, parse
from fairseq.data import Dictionary
from fairseq.modules import AdaptiveInput
from law import assert_normal, assert_xavier
from torch import Tensor, nn

from coldstart.blocks import layer_norms
from coldstart.tfixup import decoder_gain, embedding_gain, encoder_gain

WIDTH, HEADS = 64, 4
DECODER = [
    *("--decoder-embed-dim", "64", "--decoder-ffn-embed-dim", "128", "--decoder-attention-heads", "4"),
    *("--decoder-layers", "2"),
]
ENCODER = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-attention-heads", "4"),
    *("--encoder-layers", "3"),
]
BANDS = ("--adaptive-input", "--adaptive-input-cutoff", "100,200", "--adaptive-input-factor", "2")
SOFTMAX = ("--adaptive-softmax-cutoff", "100,200", "--adaptive-softmax-factor", "2")
MIMETIC, TFIXUP = "transformer_mimetic", "transformer_tfixup"
LM_MIMETIC, LM_TFIXUP = "transformer_lm_mimetic", "transformer_lm_tfixup"
EVERY = (MIMETIC, TFIXUP, LM_MIMETIC, LM_TFIXUP)


def build(arch: str, *arguments: str, seed: int = 1, target: Dictionary | None = None) -> nn.Module:
    """A small model, no dropout."""
    torch.manual_seed(seed)
    language = arch.startswith("transformer_lm")
    sizes = DECODER if language else ENCODER + DECODER
    if arch == "transformer_lm":  # whose embeddings are 512 wide whatever the width of the model
        sizes = [*sizes, "--decoder-input-dim", "64", "--decoder-output-dim", "64"]
    target = target or (SOURCE if language else TARGET)
    return build_from_options(arch, *sizes, "--dropout", "0", *arguments, target=target)


def layers_of(model: nn.Module) -> list[nn.Module]:
    sides = filter(None, (getattr(model, "encoder", None), model.decoder))
    return [layer for side in sides for layer in side.layers._modules.values()]


def self_attentions(model: nn.Module) -> list[nn.Module]:
    return [layer.self_attn for layer in layers_of(model)]


def query_key_products(attention: nn.Module) -> Tensor:
    """What queries and keys of a head share, (heads, k, k), in the basis of the head."""
    query, key = (
        projection.weight.detach().unflatten(0, (attention.num_heads, -1))
        for projection in (attention.q_proj, attention.k_proj)
    )
    return query @ key.mT


def value_output_product(attention: nn.Module) -> Tensor:
    """W_V W_proj^T as the paper writes weights."""
    return attention.v_proj.weight.detach().T @ attention.out_proj.weight.detach().T


def assert_queries_and_keys(attention: nn.Module, beta: float) -> None:
    """Without noise, W_Q = W_K = sqrt(beta) times an orthonormal basis of its own for each head."""
    expected = beta * torch.eye(attention.head_dim).expand(attention.num_heads, -1, -1)
    torch.testing.assert_close(query_key_products(attention), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(attention.q_proj.weight, attention.k_proj.weight, atol=1e-5, rtol=0)
    first, second = attention.q_proj.weight.detach().unflatten(0, (attention.num_heads, -1))[:2]
    assert (first @ second.T).abs().max() > 0.01 * beta  # one basis for all heads would have them orthogonal, or equal
    assert not torch.allclose(first, second, atol=0.1)
    assert not attention.q_proj.bias.any()
    assert not attention.k_proj.bias.any()


def assert_values_and_output(attention: nn.Module, alpha: float, beta: float, gain: float = 1.0) -> None:
    """The product is beta times the identity, and noise of variance alpha^2 / d."""
    width = attention.embed_dim
    noise = value_output_product(attention) / gain**2 - beta * torch.eye(width)
    if alpha:
        assert_normal(noise, alpha * width**-0.5)
    else:
        torch.testing.assert_close(noise, torch.zeros(width, width), atol=1e-5, rtol=0)
    assert not attention.v_proj.bias.any()
    assert not attention.out_proj.bias.any()


def differing(ours: nn.Module, stock: nn.Module) -> set[str]:
    """The names of the parameters in which two models of the same parameters differ."""
    ours, stock = dict(ours.named_parameters()), dict(stock.named_parameters())
    assert ours.keys() == stock.keys()
    return {name for name in ours if not torch.equal(ours[name], stock[name])}


def parameters_of_self_attention(model: nn.Module, *projections: str) -> set[str]:
    """Their names, but the bias of the output, which is zero in fairseq too."""
    names = [name.split(".") for name, _ in model.named_parameters() if not name.endswith("out_proj.bias")]
    return {".".join(name) for name in names if "self_attn" in name and name[-2] in projections}


# --- the law ---


PRE_LN = ("--encoder-normalize-before", "--decoder-normalize-before", "--layernorm-embedding")


@pytest.mark.parametrize(
    ("arch", "arguments"),
    [
        (MIMETIC, ()),
        (MIMETIC, PRE_LN),
        (MIMETIC, ("--encoder-layerdrop", "0.9", "--decoder-layerdrop", "0.9", "--quant-noise-pq", "0.1")),
        (MIMETIC, ("--checkpoint-activations", "--share-decoder-input-output-embed", "--decoder-embed-dim", "96")),
        (LM_MIMETIC, ()),
        (LM_MIMETIC, ("--decoder-normalize-before", "--share-decoder-input-output-embed")),
        (LM_MIMETIC, (*BANDS, *SOFTMAX, "--tie-adaptive-weights", "--tie-adaptive-proj")),
    ],
    ids=str,
)
def test_self_attention_is_mimetic_and_all_else_is_fairseq_s(arch, arguments):
    """Cross-attention too is that of the stock model of the same seed."""
    ours, stock = build(arch, *arguments), build(arch.removesuffix("_mimetic"), *arguments)
    for attention in self_attentions(ours):
        assert_queries_and_keys(attention, 0.5)
        assert_values_and_output(attention, 0.2, -0.2)
    assert differing(ours, stock) == parameters_of_self_attention(ours, "q_proj", "k_proj", "v_proj", "out_proj")
    assert len(layer_norms(ours)) == len(layer_norms(stock)) > 0


def test_noise_of_queries_and_keys():
    """One head is of full rank, so the product is alpha Z + beta I itself."""
    model = build(MIMETIC, "--mimetic-qk", "0.6,0.3", "--encoder-attention-heads", "1")
    for layer in model.encoder.layers:
        query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        assert_normal(query.T @ key - 0.3 * torch.eye(WIDTH), 0.6 * WIDTH**-0.5)


def test_layers_are_drawn_independently():
    weights = torch.stack([attention.v_proj.weight for attention in self_attentions(build(MIMETIC))])
    assert len(torch.unique(weights.flatten(1), dim=0)) == 5


@pytest.mark.parametrize("arch", EVERY)
def test_same_seed_same_weights(arch):
    arguments = ("--mimetic-qk", "0.3,0.4", "--mimetic-vo", "0.2,0.1", "--word-dropout", "0.1")[
        : None if "lm" in arch else 4
    ]
    assert not differing(build(arch, *arguments), build(arch, *arguments))
    assert differing(build(arch, *arguments), build(arch, *arguments, seed=2))


# --- options ---


@pytest.mark.parametrize("half", ["qk", "vo"])
@pytest.mark.parametrize("arch", [MIMETIC, LM_MIMETIC])
def test_none_leaves_a_half_as_it_is(arch, half):
    replaced = {"qk": ("v_proj", "out_proj"), "vo": ("q_proj", "k_proj")}[half]
    ours, stock = build(arch, f"--mimetic-{half}", "none"), build(arch.removesuffix("_mimetic"))
    assert differing(ours, stock) == parameters_of_self_attention(ours, *replaced)


@pytest.mark.parametrize("arch", [MIMETIC, LM_MIMETIC])
def test_none_of_both_is_the_stock_model(arch):
    ours = build(arch, "--mimetic-qk", "none", "--mimetic-vo", "none")
    assert not differing(ours, build(arch.removesuffix("_mimetic")))


@pytest.mark.parametrize("arch", [TFIXUP, LM_TFIXUP])
def test_t_fixup_alone_by_default(arch):
    for attention in self_attentions(build(arch)):
        assert_xavier(attention.q_proj.weight, 2**-0.5)
        assert_xavier(attention.k_proj.weight, 2**-0.5)


@pytest.mark.parametrize(
    ("arguments", "sign"), [((), -1), (("--mimetic-vo-sign", "-1"), -1), (("--mimetic-vo-sign", "1"), 1)]
)
@pytest.mark.parametrize("arch", [MIMETIC, LM_MIMETIC])
def test_sign_of_the_identity(arch, arguments, sign):
    for attention in self_attentions(build(arch, "--mimetic-vo", "0,0.4", *arguments)):
        assert_values_and_output(attention, 0, sign * 0.4)


@pytest.mark.parametrize("kept", [(), ("--tfixup-layer-norm",)], ids=["bare", "layer norm"])
@pytest.mark.parametrize("arch", [TFIXUP, LM_TFIXUP])
def test_t_fixup_multiplies_mimetic_values_and_output_by_its_gain(arch, kept):
    model = build(arch, "--mimetic-qk", "0,0.5", "--mimetic-vo", "0,0.4", *kept)
    assert bool(layer_norms(model)) == bool(kept)
    stacks = [(model.decoder, encoder_gain(2) if "lm" in arch else decoder_gain(2))]
    if "lm" not in arch:
        stacks.append((model.encoder, encoder_gain(3)))
    for side, gain in stacks:
        for layer in side.layers:
            assert_queries_and_keys(layer.self_attn, 0.5)
            assert_values_and_output(layer.self_attn, 0, -0.4, gain)
            for factor in (layer.self_attn.v_proj.weight, layer.self_attn.out_proj.weight):
                torch.testing.assert_close(factor @ factor.T, 0.4 * gain**2 * torch.eye(WIDTH), atol=1e-5, rtol=0)
            assert_xavier(layer.fc1.weight, gain)
            assert_xavier(layer.fc2.weight, gain)
            if getattr(layer, "encoder_attn", None) is not None:
                assert_xavier(layer.encoder_attn.q_proj.weight, 2**-0.5)
                assert_xavier(layer.encoder_attn.v_proj.weight, gain)
                assert_xavier(layer.encoder_attn.out_proj.weight, gain)


@pytest.mark.parametrize(
    ("arch", "arguments", "sentence"),
    [
        *(
            (arch, *refused)
            for arch in EVERY
            for refused in [
                (["--mimetic-qk", "much"], "--mimetic-qk is 'none' or two numbers between 0 and 1.* not 'much'"),
                (["--mimetic-qk", "0.5"], "--mimetic-qk is 'none' or two numbers between 0 and 1.* not '0.5'"),
                (["--mimetic-vo", "0,0.5,1"], "--mimetic-vo is 'none' or two numbers between 0 and 1"),
                (["--mimetic-vo", "0,1.5"], "--mimetic-vo is 'none' or two numbers between 0 and 1"),
                (["--mimetic-vo", "nan,0"], "--mimetic-vo is 'none' or two numbers between 0 and 1"),
                (["--mimetic-vo-sign", "0"], "--mimetic-vo-sign is -1 or 1, not 0"),
                (["--position-scale", "-1"], "--position-scale must be a number of at least 0, not -1.0"),
                (["--position-scale", "inf"], "--position-scale must be a number of at least 0, not inf"),
                (
                    ["--mimetic-qk", "0,0.5", "--decoder-attention-heads", "5"],
                    "--decoder-attention-heads must divide --decoder-embed-dim, but 5 does not 64",
                ),
            ]
        ),
        (MIMETIC, ["--encoder-attention-heads", "3"], "--encoder-attention-heads must divide --encoder-embed-dim"),
        *(
            (arch, ["--word-dropout", rate], "--word-dropout must be at least 0 and below 1")
            for arch in (LM_MIMETIC, LM_TFIXUP)
            for rate in ("1", "-0.1", "nan")
        ),
        (LM_TFIXUP, ["--decoder-layers", "0"], "--decoder-layers must be at least 1"),
        (LM_TFIXUP, ["--base-layers", "1"], "--base-layers has feed-forward experts"),
        *(
            (LM_TFIXUP, [f"--{option}"], f"--{option} needs LayerNorm, which T-Fixup removes")
            for option in ("decoder-normalize-before", "layernorm-embedding")
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_are_refused(arch, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(arch, *arguments)


@pytest.mark.parametrize("shares", [[0, 0.5], None])
def test_shares_that_are_no_text_are_refused(shares):
    with pytest.raises(ValueError, match="--mimetic-qk is 'none' or two numbers between 0 and 1"):
        build_from_hydra(MIMETIC, mimetic_qk=shares)


def test_layers_that_are_sharded_already_are_refused(plugin):
    from user_dir.models.mimetic import refuse_sharded

    class FullyShardedDataParallel(nn.Linear):
        pass

    with pytest.raises(ValueError, match="shards the layers before T-Fixup can initialise them: use --ddp-backend"):
        refuse_sharded(nn.Sequential(FullyShardedDataParallel(1, 1)), "T-Fixup")


# --- positions ---


@pytest.mark.parametrize(
    ("arch", "arguments", "sides"),
    [
        (MIMETIC, ("--encoder-learned-pos",), ("encoder",)),
        (MIMETIC, ("--encoder-learned-pos", "--decoder-learned-pos", "--mimetic-qk", "none"), ("encoder", "decoder")),
        (MIMETIC, ("--decoder-learned-pos", "--mimetic-qk", "none", "--mimetic-vo", "none"), ()),
        (MIMETIC, (), ()),
        (TFIXUP, ("--encoder-learned-pos", "--decoder-learned-pos"), ()),
        (LM_MIMETIC, ("--decoder-learned-pos",), ("decoder",)),
        (LM_TFIXUP, ("--decoder-learned-pos",), ()),
        (LM_TFIXUP, ("--decoder-learned-pos", "--mimetic-vo", "0.2,0.2"), ("decoder",)),
    ],
    ids=str,
)
def test_learned_positions_with_mimetic_attention_are_warned_of(arch, arguments, sides, caplog):
    build(arch, *arguments)
    warnings = [record.message for record in caplog.records if record.name == "user_dir.models.mimetic"]
    assert [warning.split()[0] for warning in warnings] == [f"--{side}-learned-pos" for side in sides]
    assert all("lost 2.7 points of accuracy" in warning for warning in warnings)


def first_input(model: nn.Module, side: str, *inputs: Tensor, **more: object) -> Tensor:
    """What the first layer of the encoder or decoder is given, (length, batch, width)."""
    seen = []
    hook = getattr(model, side).layers[0].register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    with torch.no_grad():
        model(*inputs, **more)
    hook.remove()
    return seen[0]


TOKENS = torch.randint(4, 250, (3, 7), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.full((3,), 7)


@pytest.mark.parametrize("learned", [False, True], ids=["sinusoidal", "learned"])
@pytest.mark.parametrize("arch", EVERY)
def test_position_scale_multiplies_positions_and_nothing_else(arch, learned):
    sides = ("decoder",) if "lm" in arch else ("encoder", "decoder")
    learned = [f"--{side}-learned-pos" for side in sides] if learned else []
    plain, scaled = (build(arch, *learned, *scale).eval() for scale in ((), ("--position-scale", "3")))
    assert not differing(plain, scaled)
    inputs = (TOKENS,) if "lm" in arch else (TOKENS, LENGTHS, TOKENS)
    for side in sides:
        positions = getattr(plain, side).embed_positions(TOKENS).transpose(0, 1)
        added = first_input(scaled, side, *inputs) - first_input(plain, side, *inputs)
        assert positions.abs().max() > 0.1
        torch.testing.assert_close(added, 2 * positions, atol=1e-5, rtol=0)


@pytest.mark.parametrize("learned", [False, True], ids=["sinusoidal", "learned"])
def test_position_scale_in_incremental_decoding(learned):
    """A word at a time gives the scores of all at once."""
    learned = ["--decoder-learned-pos"] if learned else []
    model = build(MIMETIC, "--position-scale", "3", "--decoder-normalize-before", *learned).eval()
    with torch.no_grad():
        encoded = model.encoder(TOKENS, LENGTHS)
        whole, _ = model.decoder(TOKENS, encoder_out=encoded)
        state = {}
        steps = [model.decoder(TOKENS[:, : i + 1], encoder_out=encoded, incremental_state=state)[0] for i in range(7)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_no_positions_have_no_scale():
    build(MIMETIC, "--position-scale", "3", "--no-token-positional-embeddings")(TOKENS, LENGTHS, TOKENS)


# --- dropout of words ---


def embedded(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.decoder.embed_tokens(tokens)


@pytest.mark.parametrize(("arch", "more"), [(LM_MIMETIC, ()), (LM_TFIXUP, BANDS)], ids=["plain", "adaptive"])
def test_word_dropout_takes_whole_words_out_of_a_batch(arch, more):
    rate, draws = 0.3, 200
    model = build(arch, "--word-dropout", str(rate), *more).train()
    tokens = torch.arange(4, 300).repeat_interleave(2).view(2, -1).roll(1, dims=1)  # every word twice, here and there
    everything = embedded(model.eval(), tokens)
    torch.testing.assert_close(everything, embedded(build(arch, *more), tokens))
    model.train()
    counts = torch.zeros(300)
    for _ in range(draws):
        output = embedded(model, tokens)
        kept = output.abs().sum(-1) > 0
        torch.testing.assert_close(output, everything * kept.unsqueeze(-1) / (1 - rate))
        by_word = torch.zeros(300, dtype=torch.long).index_add_(0, tokens.flatten(), kept.flatten().long())
        assert set(by_word[4:].tolist()) == {0, 2}
        counts += by_word / 2
    # Each word is kept as often as a fair draw keeps it, on its own.
    share, error = counts[4:] / draws, (rate * (1 - rate) / draws) ** 0.5
    assert (share - (1 - rate)).abs().max() < 5 * error
    assert (share.mean() - (1 - rate)).abs() < 5 * error / 296**0.5
    assert share.std().item() == pytest.approx(error, rel=0.25)


def test_word_dropout_keeps_the_expected_embedding():
    model = build(LM_MIMETIC, "--word-dropout", "0.3").train()
    draws = torch.stack([embedded(model, TOKENS) for _ in range(2000)])
    error = (0.3 / 0.7 / 2000) ** 0.5 * embedded(model.eval(), TOKENS).abs()
    assert ((draws.mean(0) - embedded(model, TOKENS)).abs() <= 5 * error).all()


def test_word_dropout_leaves_the_tied_output_alone():
    model = build("transformer_lm_mimetic_ptb", "--word-dropout", "0.9").train()
    features = torch.randn(3, 7, WIDTH)
    weight = model.decoder.embed_tokens.weight
    torch.testing.assert_close(model.decoder.output_layer(features), features @ weight.T)


def test_word_dropout_is_part_of_the_forward_pass():
    model = build(LM_TFIXUP, "--word-dropout", "0.5").train()
    model.zero_grad()
    model(TOKENS)[0].sum().backward()
    touched = model.decoder.embed_tokens.weight.grad.abs().sum(1) > 0
    words = torch.unique(TOKENS)
    assert 0 < touched.sum() < len(words)
    assert set(touched.nonzero().flatten().tolist()) < set(words.tolist())


# --- embeddings of language models ---


def test_language_model_of_t_fixup_follows_the_law_of_an_encoder():
    model = build(LM_TFIXUP, "--share-decoder-input-output-embed")
    assert not layer_norms(model)
    for layer in model.decoder.layers:
        assert layer.encoder_attn is None
        assert_xavier(layer.self_attn.q_proj.weight, 2**-0.5)
        for matrix in (layer.self_attn.v_proj, layer.self_attn.out_proj, layer.fc1, layer.fc2):
            assert_xavier(matrix.weight, encoder_gain(2))
    assert not [name for name, tensor in model.named_parameters() if name.endswith("bias") and tensor.any()]
    embedding = model.decoder.embed_tokens.weight
    assert model.decoder.output_projection.weight is embedding
    assert not embedding[SOURCE.pad()].any()
    assert_normal(torch.cat((embedding[: SOURCE.pad()], embedding[SOURCE.pad() + 1 :])), embedding_gain(2) / WIDTH**0.5)


def test_language_model_of_xavier_s_weights():
    model = build(LM_TFIXUP, "--tfixup-law", "none")
    assert_xavier(model.decoder.layers[1].fc2.weight, 1.0)


@pytest.mark.parametrize(
    "tied", [(), ("--tie-adaptive-weights",), ("--tie-adaptive-weights", "--tie-adaptive-proj")], ids=len
)
def test_bands_of_an_adaptive_input_follow_t_fixup_one_by_one(tied):
    model = build(LM_TFIXUP, *BANDS, *SOFTMAX, *tied)
    stock = build("transformer_lm", *BANDS, *SOFTMAX, *tied)
    bands, softmax = model.decoder.embed_tokens.embeddings, model.decoder.adaptive_softmax
    assert [tuple(band[0].weight.shape) for band in bands] == [(100, 64), (100, 32), (100, 16)]
    for number, (embedding, projection) in enumerate(bands):
        words = embedding.weight
        if number == 0:
            assert not words[SOURCE.pad()].any()
            words = torch.cat((words[: SOURCE.pad()], words[SOURCE.pad() + 1 :]))
        assert_normal(words, embedding_gain(2) * embedding.embedding_dim**-0.5)
        assert words.any(dim=1).all(), "a word, not the padding"
        assert_xavier(projection.weight, 1.0)
    assert not embedded(model, torch.tensor([SOURCE.pad()])).any()
    embeddings, projections = ([band[i].weight for band in bands] for i in (0, 1))
    if tied:
        assert softmax.head.word_proj.weight is embeddings[0] or softmax.head.word_proj[-1].weight is embeddings[0]
        assert [tail[2].weight is weight for tail, weight in zip(softmax.tail, embeddings[1:], strict=True)] == [
            True
        ] * 2
    assert [tail[0].weight is weight for tail, weight in zip(softmax.tail, projections[1:], strict=True)] == [
        "--tie-adaptive-proj" in tied
    ] * 2
    # What is not tied is fairseq's own.
    own = {id(p) for p in model.decoder.embed_tokens.parameters()}
    ours, theirs = (dict(m.decoder.adaptive_softmax.named_parameters()) for m in (model, stock))
    assert [name for name in ours if id(ours[name]) not in own and not torch.equal(ours[name], theirs[name])] == []
    for layer in model.decoder.layers:
        assert_xavier(layer.fc1.weight, encoder_gain(2))


@pytest.mark.parametrize("arch", [LM_MIMETIC, LM_TFIXUP])
def test_embeddings_are_as_wide_as_the_model_by_default(arch):
    model = build(arch)
    assert model.decoder.embed_tokens.embedding_dim == model.decoder.output_embed_dim == WIDTH
    assert model.decoder.project_in_dim is model.decoder.project_out_dim is None
    adaptive = build(arch, *BANDS)
    assert [band[0].embedding_dim for band in adaptive.decoder.embed_tokens.embeddings] == [64, 32, 16]


def test_narrower_embeddings_are_projected():
    model = build(LM_TFIXUP, "--decoder-input-dim", "32", "--decoder-output-dim", "48")
    assert_xavier(model.decoder.project_in_dim.weight, 1.0)
    assert_xavier(model.decoder.project_out_dim.weight, 1.0)
    assert model.decoder.project_in_dim.weight.shape == (64, 32)
    assert model.decoder.project_out_dim.weight.shape == (48, 64)
    embedding = model.decoder.embed_tokens.weight
    assert_normal(torch.cat((embedding[: SOURCE.pad()], embedding[SOURCE.pad() + 1 :])), embedding_gain(2) / 32**0.5)


# --- architectures and sizes ---


@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("transformer_mimetic", (512, 2048, 8)),
        ("transformer_mimetic_iwslt_de_en", (512, 1024, 4)),
        ("transformer_mimetic_wmt_en_de", (512, 2048, 8)),
        ("transformer_mimetic_wmt_en_de_big", (1024, 4096, 16)),
    ],
)
def test_sizes_of_translation(arch, sizes):
    args = parse(arch)
    assert (args.encoder_layers, args.decoder_layers) == (6, 6)
    for side in ("encoder", "decoder"):
        found = (getattr(args, f"{side}_{name}") for name in ("embed_dim", "ffn_embed_dim", "attention_heads"))
        assert tuple(found) == sizes
        assert not getattr(args, f"{side}_normalize_before")
    assert (args.mimetic_qk, args.mimetic_vo, args.mimetic_vo_sign, args.position_scale) == ("0,0.5", "0.2,0.2", -1, 1)


@pytest.mark.parametrize("arch", ["transformer_tfixup", "transformer_tfixup_iwslt_de_en", "transformer_tfixup_200l"])
def test_mimetic_attention_is_off_with_t_fixup(arch):
    args = parse(arch)
    assert (args.mimetic_qk, args.mimetic_vo, args.mimetic_vo_sign, args.position_scale) == ("none", "none", -1, 1)


LANGUAGE_SIZES = {
    "transformer_lm_mimetic_wikitext103": (16, 410, 10),
    "transformer_lm_mimetic_ptb": (12, 384, 8),
}


def check_language_size(model: nn.Module, layers: int, width: int, heads: int) -> None:
    decoder = model.decoder
    assert len(decoder.layers) == layers
    assert decoder.embed_tokens.weight.shape == (300, width)
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert type(decoder.embed_positions).__name__ == "SinusoidalPositionalEmbedding"
    assert all(layer.normalize_before and layer.nh == heads for layer in decoder.layers)
    for attention in self_attentions(model)[:2]:
        assert_queries_and_keys(attention, 0.5)
        assert_values_and_output(attention, 0.2, -0.2)


@pytest.mark.parametrize(("arch", "sizes"), LANGUAGE_SIZES.items())
def test_sizes_of_language(arch, sizes):
    check_language_size(build_from_options(arch, target=SOURCE), *sizes)


@pytest.mark.parametrize(("arch", "sizes"), LANGUAGE_SIZES.items())
def test_sizes_of_language_from_hydra(arch, sizes):
    """Which gives a named size nothing but what the user wrote."""
    model = build_from_hydra(arch, target=SOURCE, decoder_layers=1, position_scale=2.0)
    check_language_size(model, 1, *sizes[1:])


def test_a_named_size_yields_to_options():
    arguments = ("--decoder-layers", "1", *BANDS, *SOFTMAX, "--mimetic-vo", "0,0.4", "--word-dropout", "0.2")
    model = build("transformer_lm_mimetic_wikitext103", *arguments)
    assert len(model.decoder.layers) == 1
    assert isinstance(model.decoder.embed_tokens, AdaptiveInput)
    assert not model.decoder.share_input_output_embed
    assert_values_and_output(model.decoder.layers[0].self_attn, 0, -0.4)


@pytest.mark.parametrize("arch", ["transformer_mimetic_iwslt_de_en", "transformer_tfixup_iwslt_de_en"])
def test_a_configuration_that_is_older_than_the_options(arch):
    """A checkpoint of transformer_tfixup may name none of them."""
    assert len(build_from_hydra(arch, encoder_layers=1, decoder_layers=1).encoder.layers) == 1


def test_torchscript():
    model = build(MIMETIC).eval()
    scripted = torch.jit.script(model)
    with torch.no_grad():
        torch.testing.assert_close(scripted(TOKENS, LENGTHS, TOKENS)[0], model(TOKENS, LENGTHS, TOKENS)[0])
