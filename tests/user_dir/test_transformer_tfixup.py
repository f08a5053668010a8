"""The plugin's architectures, built in-process through fairseq's own parser and registry."""

import pytest
import torch
from architectures import SOURCE, TARGET, build_from_hydra, build_from_options, parse
from fairseq.data import Dictionary
from law import assert_normal, assert_xavier
from torch import nn

from coldstart.blocks import layer_norms
from coldstart.tfixup import decoder_gain, embedding_gain, encoder_gain

SMALL = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4"),
    *("--encoder-layers", "3", "--decoder-layers", "2"),
]


def build(*arguments: str, arch: str = "transformer_tfixup", target: Dictionary = TARGET) -> nn.Module:
    return build_from_options(arch, *(SMALL if arch == "transformer_tfixup" else ()), *arguments, target=target)


def check_law(model: nn.Module, encoder_layers: int = 3, decoder_layers: int = 2) -> None:
    """Every tensor of every layer of the model, read by fairseq's own names."""
    for side, layers, gain in (
        (model.encoder, encoder_layers, encoder_gain(encoder_layers)),
        (model.decoder, decoder_layers, decoder_gain(decoder_layers)),
    ):
        assert len(side.layers._modules) == layers
        for layer in side.layers._modules.values():
            for attention in filter(None, (layer.self_attn, getattr(layer, "encoder_attn", None))):
                assert_xavier(attention.q_proj.weight, 2**-0.5)
                assert_xavier(attention.k_proj.weight, 2**-0.5)
                assert_xavier(attention.v_proj.weight, gain)
                assert_xavier(attention.out_proj.weight, gain)
            assert_xavier(layer.fc1.weight, gain)
            assert_xavier(layer.fc2.weight, gain)
    assert not [name for name, tensor in model.named_parameters() if name.endswith("bias") and tensor.any()]


def check_embedding(embedding: nn.Embedding, gain: float) -> None:
    width, padding = embedding.embedding_dim, embedding.padding_idx
    assert not embedding.weight[padding].any()
    assert_normal(torch.cat([embedding.weight[:padding], embedding.weight[padding + 1 :]]), gain * width**-0.5)


def assert_no_layer_norm(model: nn.Module) -> None:
    assert not layer_norms(model)
    assert not [name for name, _ in model.named_parameters() if "norm" in name]


def test_separate_embeddings():
    model = build()
    check_law(model)
    assert_no_layer_norm(model)
    check_embedding(model.encoder.embed_tokens, embedding_gain(3))
    check_embedding(model.decoder.embed_tokens, embedding_gain(2))
    assert_normal(model.decoder.output_projection.weight, 64**-0.5)


def test_tied_output_projection_is_the_scaled_embedding():
    model = build("--share-decoder-input-output-embed")
    check_embedding(model.decoder.embed_tokens, embedding_gain(2))
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight


def test_one_shared_embedding_is_scaled_once_with_the_encoder_s_depth():
    model = build("--share-all-embeddings", target=SOURCE)
    assert model.encoder.embed_tokens is model.decoder.embed_tokens
    check_embedding(model.encoder.embed_tokens, embedding_gain(3))


def test_encoder_embedding_gain_option():
    model = build("--tfixup-encoder-embedding-gain", "encoder")
    check_embedding(model.encoder.embed_tokens, encoder_gain(3))
    check_embedding(model.decoder.embed_tokens, embedding_gain(2))


@pytest.mark.parametrize(
    ("law", "gains", "embedding"),
    [
        ("adam", [encoder_gain(12) * 0.5**0.75, decoder_gain(2)], [embedding_gain(12), embedding_gain(2)]),
        ("none", [1.0, 1.0], [1.0, 1.0]),
    ],
)
def test_other_laws(law, gains, embedding):
    model = build("--tfixup-law", law, "--encoder-layers", "12")
    for side, gain in zip((model.encoder, model.decoder), gains, strict=True):
        assert_xavier(side.layers[1].fc1.weight, gain)
        assert_xavier(side.layers[1].self_attn.v_proj.weight, gain)
        assert_xavier(side.layers[1].self_attn.k_proj.weight, 2**-0.5)
    for side, gain in zip((model.encoder, model.decoder), embedding, strict=True):
        check_embedding(side.embed_tokens, gain)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--encoder-layerdrop", "0.9", "--decoder-layerdrop", "0.9"),
        ("--checkpoint-activations",),
        ("--quant-noise-pq", "0.1"),
        ("--no-scale-embedding", "--activation-fn", "gelu"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_layer_with(arguments):
    model = build(*arguments)
    check_law(model)
    assert_no_layer_norm(model)


def test_different_widths():
    model = build("--decoder-embed-dim", "96", "--decoder-ffn-embed-dim", "160")
    check_law(model)
    check_embedding(model.decoder.embed_tokens, embedding_gain(2))
    assert model.decoder.layers[0].encoder_attn.v_proj.weight.shape == (96, 64)


def test_learned_positions_keep_fairseq_s_initialisation():
    torch.manual_seed(5)
    ours = build("--encoder-learned-pos", "--decoder-learned-pos")
    check_law(ours)
    # fairseq: N(0, d^-1/2) for learned positions, the padding row zero
    for side in (ours.encoder, ours.decoder):
        check_embedding(side.embed_positions, 1.0)


def test_layer_norm_can_be_kept():
    model = build("--tfixup-layer-norm", "--encoder-normalize-before", "--layernorm-embedding")
    assert model.encoder.layer_norm is not None
    assert len(layer_norms(model)) == 3 * 2 + 2 * 3 + 1 + 2
    for layer in model.encoder.layers:
        assert_xavier(layer.fc1.weight, encoder_gain(3))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--encoder-normalize-before"], "--encoder-normalize-before needs LayerNorm"),
        (["--decoder-normalize-before"], "--decoder-normalize-before needs LayerNorm"),
        (["--layernorm-embedding"], "--layernorm-embedding needs LayerNorm"),
        (["--encoder-layers", "0"], "--encoder-layers must be at least 1"),
        (["--decoder-layers", "-1"], "--decoder-layers must be at least 1"),
        (["--base-layers", "1"], "--base-layers has feed-forward experts"),
        (["--base-layers", "1", "--tfixup-layer-norm"], "--base-layers has feed-forward experts"),
        (["--tfixup-law", "none", "--tfixup-encoder-embedding-gain", "encoder"], "scales nothing, .*: leave one out"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_cannot_hold_together(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(*arguments)


def test_unknown_gain_from_hydra_is_one_sentence():
    with pytest.raises(ValueError, match="is 'embedding' or 'encoder', not 'foo'"):
        build_from_hydra("transformer_tfixup", tfixup_encoder_embedding_gain="foo")


def test_unknown_law_from_hydra_is_one_sentence():
    with pytest.raises(ValueError, match="--tfixup-law is 'paper' or 'adam' or 'none', not 'foo'"):
        build_from_hydra("transformer_tfixup", tfixup_law="foo")


def test_kept_layers_set_the_depth():
    check_law(build("--encoder-layers-to-keep", "0,2", "--decoder-layers-to-keep", "1"), 2, 1)


def test_pretrained_embeddings_are_scaled_and_not_drawn_again(tmp_path):
    rows = {word: torch.randn(64) for word in ("word0", "word7")}
    lines = [f"{word} " + " ".join(f"{x:.6f}" for x in row.tolist()) for word, row in rows.items()]
    (tmp_path / "vectors").write_text(f"{len(rows)} 64\n" + "\n".join(lines) + "\n")
    embedding = build("--encoder-embed-path", str(tmp_path / "vectors")).encoder.embed_tokens
    for word, row in rows.items():
        found = embedding.weight[SOURCE.index(word)].detach()
        torch.testing.assert_close(found, embedding_gain(3) * row, rtol=1e-5, atol=1e-5)
    assert not embedding.weight[SOURCE.pad()].any()


def test_same_seed_same_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in build().parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_depth_scales_the_stream_as_the_law_says():
    """The encoder's output stays near its input at any depth: the point of the law, on fairseq's own forward."""
    ratios = []
    for layers in ("2", "60"):
        torch.manual_seed(0)
        model = build("--encoder-layers", layers).eval()
        tokens = torch.randint(4, 300, (8, 12), generator=torch.Generator().manual_seed(0))
        embedded, _ = model.encoder.forward_embedding(tokens)
        with torch.no_grad():
            output = model.encoder(tokens, torch.full((8,), 12))["encoder_out"][0]
        ratios.append((output.norm() / embedded.norm()).item())
    assert all(0.9 < ratio < 1.6 for ratio in ratios)


@pytest.mark.parametrize(
    ("arch", "layers", "sizes"),
    [
        ("transformer_tfixup_iwslt_de_en", (6, 6), (512, 1024, 4)),
        ("transformer_tfixup_wmt_en_de", (6, 6), (512, 2048, 8)),
        ("transformer_tfixup_wmt_en_de_big", (6, 6), (1024, 4096, 16)),
        ("transformer_tfixup_200l", (200, 200), (64, 128, 2)),
    ],
)
def test_named_architectures(arch, layers, sizes):
    args = parse(arch)
    assert (args.encoder_layers, args.decoder_layers) == layers
    assert (args.encoder_embed_dim, args.encoder_ffn_embed_dim, args.encoder_attention_heads) == sizes
    assert (args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads) == sizes


def test_200_layers_follow_the_law_to_the_last():
    check_law(build(arch="transformer_tfixup_200l"), 200, 200)


def test_named_architecture_yields_to_options():
    args = parse("transformer_tfixup_iwslt_de_en", "--encoder-layers", "12", "--tfixup-layer-norm")
    assert args.encoder_layers == 12
    assert args.decoder_layers == 6
    assert args.tfixup_layer_norm


def test_closed_configuration_as_hydra_gives_it():
    model = build_from_hydra("transformer_tfixup_iwslt_de_en", encoder_layers=2)
    assert len(model.encoder.layers) == 2
    assert len(model.decoder.layers) == 6
    assert_no_layer_norm(model)


def test_torchscript_wherever_the_stock_model_allows_it():
    torch.jit.script(build(*SMALL, arch="transformer"))
    model = build().eval()
    scripted = torch.jit.script(model)
    tokens = torch.randint(4, 200, (2, 7))
    inputs = (tokens, torch.tensor([7, 7]), tokens)
    with torch.no_grad():
        torch.testing.assert_close(scripted(*inputs)[0], model(*inputs)[0])
