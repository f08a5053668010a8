"""The probe of depth: against blocks run by hand, an optimiser on a copy, and a stack whose norms are known."""

import contextlib
import copy
import itertools
import math

import pytest
import torch
from architectures import SOURCE, TARGET, build_from_options
from fairseq.models.wav2vec.wav2vec2 import TransformerSentenceEncoderLayer
from test_gradients import Language, assert_untouched, snapshot
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from coldstart.blocks import remove_layer_norms_
from coldstart.probe import first_tensor, probe_depth

WIDTH, FFN, HEADS = 16, 24, 2
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
STEP = {"optimizer": "adam", "lr": 1e-3}


class Translator(nn.Module):
    """Embeddings, an encoder and a decoder of unequal depths, and an output projection tied to the embedding."""

    def __init__(self, norm_first=False):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        sizes = {"dim_feedforward": FFN, "dropout": 0.3, "norm_first": norm_first, "batch_first": True}
        self.body = nn.Transformer(WIDTH, HEADS, 2, 3, **sizes)
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.embedding.weight

    def forward(self, source, target):
        return self.head(self.body(self.embedding(source), self.embedding(target)))


class Encoder(nn.Module):
    """A stack on features, without embeddings."""

    def __init__(self, layers=2, norm_first=False, norms=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, 0.3, norm_first=norm_first, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        if not norms:
            remove_layer_norms_(self)

    def forward(self, features):
        return self.body(features)


def translate(model, batch):
    source, target = batch
    return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


def mean_square(model, batch):
    return model(batch).square().mean()


def half_sum_of_squares(model, batch):
    return model(batch).square().sum() / 2


def half_frozen():
    model = Translator()
    model.body.encoder.requires_grad_(False)
    return model


MODELS = {
    "Post-LN": Translator,
    "Pre-LN": lambda: Translator(norm_first=True),
    "no LN": lambda: remove_layer_norms_(Translator()),
    "frozen encoder": half_frozen,
}


@pytest.fixture
def tokens():
    torch.manual_seed(3)
    return torch.randint(11, (4, 5)), torch.randint(11, (4, 6))


# --- the first step, against an optimiser on a copy ---


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_step_is_that_of_the_optimiser(name, optimizer, tokens):
    torch.manual_seed(1)
    model = MODELS[name]().double()
    before = snapshot(model)
    probe = probe_depth(model, translate, tokens, optimizer=optimizer, lr=0.01)
    assert_untouched(model, before)

    reference = copy.deepcopy(model).eval()
    output, loss = reference(*tokens).detach(), translate(reference, tokens)
    loss.backward()
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    OPTIMIZERS[optimizer](trained, lr=0.01).step()
    changed = reference(*tokens).detach()
    squares = sum(parameter.grad.square().sum().item() for parameter in trained)
    assert probe.loss == pytest.approx(loss.item(), rel=1e-12)
    assert probe.updated_loss == pytest.approx(translate(reference, tokens).item(), rel=1e-9)
    assert probe.gradient_norm == pytest.approx(squares**0.5, rel=1e-9)
    assert probe.output_norm == pytest.approx(output.norm().item(), rel=1e-12)
    assert probe.function_change == pytest.approx((changed - output).norm().item(), rel=1e-9)
    assert probe.relative_change == probe.function_change / probe.output_norm
    for spread, values in ((probe.output_spread, output), (probe.updated_spread, changed)):
        variance = values.flatten(0, 1).var(dim=0, unbiased=False).sum().item()
        assert spread == pytest.approx((variance * 4 * 6) ** 0.5, rel=1e-9)
    assert probe.kept_spread == probe.updated_spread / probe.output_spread


def test_a_step_that_makes_all_tokens_alike_keeps_no_spread():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.scale = Encoder(), nn.Parameter(torch.ones(1))
            self.encoder.requires_grad_(False)

        def forward(self, features):
            return self.scale * self.encoder(features)

    features = torch.randn(2, 3, WIDTH)
    probe = probe_depth(Head(), lambda model, batch: model(batch).square().mean(), features, optimizer="adam", lr=1.0)
    assert probe.output_spread > 1
    assert probe.kept_spread == pytest.approx(0, abs=1e-6)


def test_unused_repeated_frozen_and_sparsely_trained_parameters_take_their_step():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.language, self.encoder = Language(sparse=True), Encoder()
            self.into = nn.Linear(7, WIDTH)

        def forward(self, tokens):
            return self.encoder(self.into(self.language(tokens)))

    model, tokens = Whole().double(), torch.randint(7, (6, 4))
    probe = probe_depth(model, mean_square, tokens, optimizer="sgd", lr=0.1)
    reference = copy.deepcopy(model).eval()
    output = reference(tokens).detach()
    mean_square(reference, tokens).backward()
    torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1).step()
    assert probe.function_change == pytest.approx((reference(tokens) - output).norm().item(), rel=1e-9)


# --- the blocks, against blocks run by hand ---


def blocks_by_hand(layer, stream, memory=None):
    """Kind, stream before and branch of each block of a layer of torch.nn, and the stream behind the last."""
    norms = iter([getattr(layer, name) for name in ("norm1", "norm2", "norm3") if hasattr(layer, name)])
    branches = {"self-attention": lambda x: layer.self_attn(x, x, x)[0]}
    if memory is not None:
        branches["cross-attention"] = lambda x: layer.multihead_attn(x, memory, memory)[0]
    branches["feed-forward"] = lambda x: layer.linear2(torch.relu(layer.linear1(x)))
    found = []
    for kind, branch_of in branches.items():
        norm = next(norms)
        branch = branch_of(norm(stream) if layer.norm_first else stream)
        found.append((kind, stream, branch))
        stream = stream + branch if layer.norm_first else norm(stream + branch)
        stream.retain_grad()
    return found, stream


@pytest.mark.parametrize("norm_first", [False, True])
def test_blocks_are_those_run_by_hand(norm_first, tokens):
    torch.manual_seed(1)
    model = Translator(norm_first).double()
    probe = probe_depth(model, translate, tokens, **STEP)

    reference = copy.deepcopy(model).eval()
    expected, memory = [], None
    for path, ids in zip(("encoder", "decoder"), tokens, strict=True):
        stack, stream = getattr(reference.body, path), reference.embedding(ids)
        for number, layer in enumerate(stack.layers):
            found, end = blocks_by_hand(layer, stream, memory)
            leaving = [*(stream for _, stream, _ in found[1:]), end]
            places = (f"body.{path}", f"body.{path}.layers.{number}")
            expected += [(*places, *block, after) for block, after in zip(found, leaving, strict=True)]
            stream = end
        memory = stream = stack.norm(stream)
    F.cross_entropy(reference.head(stream).flatten(0, 1), tokens[1].flatten()).backward()

    assert len(probe.blocks) == 2 * 2 + 3 * 3
    for block, (stack, layer, kind, stream, branch, after) in zip(probe.blocks, expected, strict=True):
        assert (block.stack, block.layer, block.kind) == (stack, layer, kind)
        norms = [tensor.norm().item() for tensor in (stream, branch, after, after.grad)]
        measured = [block.stream_before, block.branch, block.stream_after, block.stream_gradient]
        assert measured == pytest.approx(norms, rel=1e-9)
        assert block.branch_ratio == pytest.approx(norms[1] / norms[0], rel=1e-9)
        assert block.stream_ratio == pytest.approx(norms[2] / norms[0], rel=1e-9)
    parts = {
        "self-attention": ("self_attn",),
        "cross-attention": ("multihead_attn",),
        "feed-forward": ("linear1", "linear2"),
    }
    norms_of = {"self-attention": "norm1", "cross-attention": "norm2", "feed-forward": "norm3"}
    for block in probe.blocks[4:]:
        layer = reference.get_submodule(block.layer)
        modules = [*parts[block.kind], *([norms_of[block.kind]] if norm_first else [])]
        gradients = [p.grad.norm().item() for name in modules for p in getattr(layer, name).parameters()]
        assert block.weight_gradient == pytest.approx(math.hypot(*gradients), rel=1e-9)


@pytest.mark.parametrize("layers", [1, 4])
def test_a_stack_whose_branches_are_constants(layers):
    """Weights of zero leave the biases, here 0.5 and 2: stream, gradient and step have closed forms."""
    model, (batch, length) = Encoder(layers, norms=False).double(), (3, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for layer in model.body.layers:
            layer.self_attn.out_proj.bias.fill_(0.5)
            layer.linear2.bias.fill_(2.0)
    features = torch.ones(batch, length, WIDTH, dtype=torch.float64)
    probe = probe_depth(model, half_sum_of_squares, features, optimizer="sgd", lr=0.01)

    whole, end, positions = (batch * length * WIDTH) ** 0.5, 1 + 2.5 * layers, batch * length
    for index, block in enumerate(probe.blocks):
        start, constant = (1 + 2.5 * (index // 2), 0.5) if index % 2 == 0 else (1.5 + 2.5 * (index // 2), 2.0)
        assert block.stream_before == pytest.approx(start * whole)
        assert block.branch == pytest.approx(constant * whole)
        assert block.stream_after == pytest.approx((start + constant) * whole)
        assert block.stream_gradient == pytest.approx(end * whole)
        assert block.weight_gradient == pytest.approx(positions * end * WIDTH**0.5)
    assert len(probe.blocks) == 2 * layers
    assert probe.signal == {"body": pytest.approx(end)}
    assert probe.gradient_norm == pytest.approx(positions * end * WIDTH**0.5 * (2 * layers) ** 0.5)
    assert probe.function_change == pytest.approx(0.01 * positions * end * 2 * layers * whole)


def test_overflow_is_measured_not_raised():
    model = Encoder(30, norms=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)
    probe = probe_depth(model, mean_square, torch.randn(2, 3, WIDTH), **STEP)
    assert not math.isfinite(probe.signal["body"])
    assert not math.isfinite(probe.function_change)


# --- the model is left as it was ---


class Interrupted(Exception):
    pass


def raising(at):
    """A loss that raises after the model's pass number ``at``."""
    passes = itertools.count(1)

    def loss_fn(model, batch):
        loss = translate(model, batch)
        if next(passes) == at:
            raise Interrupted
        return loss

    return {"loss_fn": loss_fn}


def broken_outputs(_):
    raise Interrupted


INTERRUPTIONS = {
    "none": dict,
    "in the first pass": lambda: raising(1),
    "in the last pass": lambda: raising(3),
    "in outputs": lambda: {"outputs": broken_outputs},
}


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(interruption, training, tokens):
    model = half_frozen().train(training)
    model.body.decoder.train(not training)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    identities = [(id(p), p.data_ptr(), id(p.grad)) for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    before, random = snapshot(model), torch.get_rng_state()
    arguments = {"loss_fn": translate, **STEP, **INTERRUPTIONS[interruption]()}
    with contextlib.nullcontext() if interruption == "none" else pytest.raises(Interrupted):
        probe_depth(model, batch=tokens, **arguments)
    after = snapshot(model)
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert after[1:] == before[1:]
    assert [(id(p), p.data_ptr(), id(p.grad)) for p in model.parameters()] == identities
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.backends.mha.get_fastpath_enabled()


def test_blocks_are_seen_where_torch_would_take_its_fused_path(tokens):
    model = half_frozen().eval()
    blocks = probe_depth(model, translate, tokens, **STEP).blocks
    assert len(blocks) == 2 * 2 + 3 * 3
    assert all(block.branch > 0 for block in blocks)
    assert [block.weight_gradient > 0 for block in blocks] == [False] * 4 + [True] * 9


def test_randomness_is_the_same_before_and_after_the_step():
    class Noisy(Encoder):
        def forward(self, features):
            return super().forward(features + torch.randn_like(features))

    model, features = Noisy().double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    probe = probe_depth(model, mean_square, features, optimizer="sgd", lr=1e-12)
    assert probe.function_change < 1e-9 * probe.output_norm


# --- types, memory ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_float32(dtype):
    torch.manual_seed(1)
    model = Encoder(norms=False).to(dtype)
    model.body.layers[0].requires_grad_(False)
    model.register_buffer("shift", torch.ones((), dtype=dtype))
    model.register_forward_pre_hook(lambda model, args: args[0] + model.shift)
    features = torch.randn(2, 3, WIDTH).to(dtype)
    probe = probe_depth(model, mean_square, features, **STEP)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    expected = probe_depth(copy.deepcopy(model).float(), mean_square, features.float(), **STEP)
    for name in ("loss", "updated_loss", "gradient_norm", "function_change"):
        assert getattr(probe, name) == pytest.approx(getattr(expected, name), rel=1e-6)
    assert [b.branch for b in probe.blocks] == pytest.approx([b.branch for b in expected.blocks], rel=1e-6)


def test_the_caller_s_autocast_is_off():
    torch.manual_seed(1)
    model, features = Encoder(), torch.randn(2, 3, WIDTH)
    expected = probe_depth(model, mean_square, features, **STEP)
    with torch.autocast("cpu", torch.bfloat16):
        assert probe_depth(model, mean_square, features, **STEP) == expected


def test_checkpointed_activations_change_nothing():
    class Checkpointed(Encoder):
        def forward(self, features):
            for layer in self.body.layers:
                features = checkpoint(layer, features, use_reentrant=False)
            return features

    torch.manual_seed(1)
    model, features = Checkpointed(norms=False), torch.randn(2, 3, WIDTH)
    plain = Encoder()
    plain.body = model.body
    assert probe_depth(model, mean_square, features, **STEP) == probe_depth(plain, mean_square, features, **STEP)


def peak_memory(work):
    """The most bytes that were allocated at once beyond those there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()) if event.name() == "[memory]"
    ]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(1, 2), (64, 32)], ids=["weights", "activations"])
def test_memory_is_below_that_of_a_training_step(optimizer, shape):
    """Where the weights, and where the activations are the most of it."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    features = torch.randn(*shape, 128)
    stepping = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3, foreach=False)

    def train():
        mean_square(model, features).backward()
        stepping.step()

    def probe():
        probe_depth(model, mean_square, features, optimizer=optimizer, lr=1e-3)

    probed, trained = peak_memory(probe), peak_memory(train)
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    largest = max(4 * parameter.numel() for parameter in model.parameters())
    numbers = 2**14  # bytes, for the norms
    assert trained > weights
    assert probed <= trained + numbers + (largest if optimizer == "sgd" else 0)


# --- fairseq ---


def fairseq_batch():
    source, target = torch.randint(4, len(SOURCE), (3, 7)), torch.randint(4, len(TARGET), (3, 5))
    source[1, 5:] = SOURCE.pad()
    inputs = {"src_tokens": source, "src_lengths": torch.tensor([7, 5, 7]), "prev_output_tokens": target}
    return inputs, target


def fairseq_loss(model, batch):
    inputs, target = batch
    logits = model(**inputs)[0]
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


SMALL = (
    *("--encoder-embed-dim=32", "--encoder-ffn-embed-dim=48", "--encoder-attention-heads=2", "--encoder-layers=3"),
    *("--decoder-embed-dim=32", "--decoder-ffn-embed-dim=48", "--decoder-attention-heads=2", "--decoder-layers=2"),
)


@pytest.mark.parametrize(
    "options",
    [
        ("transformer_tfixup", *SMALL),
        ("transformer", *SMALL),
        ("transformer", *SMALL, "--encoder-normalize-before", "--decoder-normalize-before"),
    ],
    ids=["T-Fixup", "Post-LN", "Pre-LN"],
)
def test_fairseq_models(options):
    torch.manual_seed(1)
    model, batch = build_from_options(*options), fairseq_batch()
    before = snapshot(model)
    probe = probe_depth(model, fairseq_loss, batch, **STEP)
    assert_untouched(model, before)
    assert [block.kind for block in probe.blocks[6:]] == ["self-attention", "cross-attention", "feed-forward"] * 2
    assert [block.layer for block in probe.blocks[:6:2]] == [f"encoder.layers.{number}" for number in range(3)]
    assert set(probe.signal) == {"encoder", "decoder"}
    assert all(block.stream_gradient > 0 and block.weight_gradient > 0 for block in probe.blocks)
    for block, following in zip(probe.blocks, probe.blocks[1:], strict=False):
        if block.stack == following.stack:
            assert block.stream_after == following.stream_before

    reference = copy.deepcopy(model).eval()
    output = reference(**batch[0])[0].detach()
    fairseq_loss(reference, batch).backward()
    torch.optim.Adam(reference.parameters(), lr=1e-3).step()
    change = (reference(**batch[0])[0] - output).norm().item()
    assert probe.function_change == pytest.approx(change, rel=1e-2)  # Adam steps along rounding, where a gradient is 0


def test_a_fairseq_language_model():
    def loss_fn(model, tokens):
        return F.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten())

    options = (
        "--decoder-embed-dim=32",
        "--decoder-ffn-embed-dim=48",
        "--decoder-attention-heads=2",
        "--decoder-layers=3",
    )
    model = build_from_options("transformer_lm_tfixup", *options)
    probe = probe_depth(model, loss_fn, torch.randint(4, len(TARGET), (2, 6)), **STEP)
    assert [block.kind for block in probe.blocks] == ["self-attention", "feed-forward"] * 3
    assert set(probe.signal) == {"decoder"}


@pytest.mark.parametrize("norm_first", [False, True])
def test_fairseq_s_layer_of_wav2vec_has_another_name_for_pre_ln(norm_first):
    class Audio(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [TransformerSentenceEncoderLayer(WIDTH, FFN, HEADS, layer_norm_first=norm_first)]
            )

        def forward(self, features):
            return self.layers[0](features)[0]

    torch.manual_seed(1)
    model, features = Audio().double(), torch.randn(5, 2, WIDTH, dtype=torch.float64)
    first, second = probe_depth(model, half_sum_of_squares, features, **STEP).blocks
    layer = copy.deepcopy(model).eval().layers[0]
    norm = layer.self_attn_layer_norm
    branch = layer.self_attn(*[norm(features) if norm_first else features] * 3)[0]
    middle = features + branch if norm_first else norm(features + branch)
    measured = [first.stream_before, first.branch, first.stream_after, second.stream_before]
    expected = [tensor.norm().item() for tensor in (features, branch, middle, middle)]
    assert measured == pytest.approx(expected, rel=1e-9)


def test_a_fairseq_stream_without_layer_norm_is_the_sum_of_its_branches():
    torch.manual_seed(1)
    model = build_from_options("transformer_tfixup", *SMALL).double()
    streams, branches = [], []
    model.encoder.layers[0].self_attn.register_forward_hook(lambda _, __, output: branches.append(output[0]))
    model.encoder.layers[0].fc2.register_forward_hook(lambda _, __, output: branches.append(output))
    model.encoder.layers[0].register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    blocks = probe_depth(model, fairseq_loss, fairseq_batch(), **STEP).blocks[:2]
    middle, end = streams[0] + branches[0], streams[0] + branches[0] + branches[1]
    measured = [blocks[0].stream_before, blocks[1].stream_before, blocks[1].stream_after]
    assert measured == pytest.approx([t.norm().item() for t in (streams[0], middle, end)], rel=1e-9)


# --- what cannot be measured ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"optimizer": "lion"}, "optimizer must be 'adam' or 'sgd', not 'lion'"),
        ({"lr": 0.0}, "lr must be a positive number, not 0.0"),
        ({"lr": math.nan}, "lr must be a positive number, not nan"),
        ({"model": nn.Linear(2, 2)}, "no Transformer layers found in Linear"),
        ({"loss_fn": lambda model, batch: model(*batch)}, "must return a scalar tensor, not a tensor of shape"),
        ({"loss_fn": lambda model, _: model.head.bias.sum()}, "must call the Transformer layers of the model"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(arguments, sentence, tokens):
    given = {"model": Translator(), "loss_fn": translate, "batch": tokens, **STEP} | arguments
    with pytest.raises(ValueError, match=sentence):
        probe_depth(**given)


def test_a_loss_that_goes_past_the_model(tokens):
    def around(model, batch):
        return model.body(*map(model.embedding, batch)).square().mean()

    with pytest.raises(ValueError, match="must call the model that it is given"):
        probe_depth(Translator(), around, tokens, **STEP)


def test_first_tensor():
    tensor = torch.ones(2)
    for output in (tensor, (tensor, None), [None, tensor], {"logits": tensor, "extra": 3}):
        assert first_tensor(output) is tensor
    for nothing in (None, 3, (), {"loss": 1.0}):
        with pytest.raises(TypeError, match="give outputs="):
            first_tensor(nothing)
