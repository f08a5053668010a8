"""GradInit, against a naive float64 iteration, closed forms, and everything that it must leave alone."""

import copy
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gradients import Checkpointed, Images, Language, Recurrent, assert_untouched, mean_square, snapshot
from test_gradients import squared_error as loss_fn
from torch import distributed, multiprocessing, nn
from torch.func import functional_call
from torch.nn import functional as F

from coldstart.gradinit import default_gamma, gradinit

NORM = {"adam": lambda g: g.abs().sum(), "sgd": lambda g: g.square().sum().sqrt()}
STEP = {"adam": torch.sign, "sgd": lambda g: g}


def mlp():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 2)).double()


def pairs_of_batches(count, rows=8):
    """S and S~, which share half of their examples."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        inputs, targets = (torch.randn(rows, n, dtype=torch.float64, generator=generator) for n in (3, 2))
        yield (inputs[: rows // 2], targets[: rows // 2]), (inputs[rows // 4 :], targets[rows // 4 :])


class NaiveAdam:
    def __init__(self, lr, betas):
        self.lr, self.betas, self.first, self.second, self.steps = lr, betas, 0, 0, 0

    def step(self, gradient):
        self.steps += 1
        self.first = self.betas[0] * self.first + (1 - self.betas[0]) * gradient
        self.second = self.betas[1] * self.second + (1 - self.betas[1]) * gradient**2
        first, second = (m / (1 - b**self.steps) for m, b in zip((self.first, self.second), self.betas, strict=True))
        return self.lr * first / (second**0.5 + 1e-8)


def naive_gradinit(model, pairs, *, optimizer, eta, gamma, lr, iterations, min_scale, grad_clip, betas):
    """Algorithm 1 of the paper on a copy, all at once: autograd goes through the scaling, twice, always."""
    model = copy.deepcopy(model).eval()
    initial = {name: parameter.detach() for name, parameter in model.named_parameters()}
    scales = torch.ones(len(initial), dtype=torch.float64)
    floors = torch.tensor([0.0 if name.endswith("bias") else min_scale for name in initial], dtype=torch.float64)
    adams = {constrained: NaiveAdam(lr, betas) for constrained in (True, False)}
    branches = []

    def loss(weights, batch):
        return F.mse_loss(functional_call(model, weights, batch[0]), batch[1])

    for batch, second_batch in itertools.islice(pairs, iterations):
        s = scales.clone().requires_grad_()
        weights = {name: scale * initial[name] for name, scale in zip(initial, s.unbind(), strict=True)}
        gradients = torch.autograd.grad(loss(weights, batch), list(weights.values()), create_graph=True)
        norm = NORM[optimizer](torch.cat([g.flatten() for g in gradients]))
        if constrained := norm.item() > gamma:
            objective = norm
        else:
            moves = zip(weights.items(), gradients, strict=True)
            moved = {name: w - eta * STEP[optimizer](g.detach()) for (name, w), g in moves}
            objective = loss(moved, second_batch) / eta
        slope = torch.autograd.grad(objective, s)[0]
        slope = slope if grad_clip is None else slope.clamp(-grad_clip, grad_clip)
        scales = torch.maximum(scales - adams[constrained].step(slope), floors)
        branches.append(constrained)
    return dict(zip(initial, scales.tolist(), strict=True)), branches


@settings(max_examples=30, deadline=None)
@given(
    optimizer=st.sampled_from(["adam", "sgd"]),
    eta=st.floats(1e-3, 0.3),
    gamma=st.floats(0.2, 6),
    lr=st.floats(1e-3, 0.2),
    min_scale=st.floats(0, 1),
    grad_clip=st.none() | st.floats(1e-2, 1),
    betas=st.tuples(st.floats(0, 0.95), st.floats(0.5, 0.999)),
)
def test_same_scales_as_the_naive_iteration(**options):
    model, pairs = mlp(), list(pairs_of_batches(8))
    initial = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected, branches = naive_gradinit(model, pairs, iterations=8, **options)
    result = gradinit(model, loss_fn, pairs, iterations=8, **options)
    assert [record.constrained for record in result.history] == branches
    assert result.scales == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert json.loads(json.dumps(result.settings)) == {**options, "iterations": 8, "betas": list(options["betas"])}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, result.scales[name] * initial[name])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_quadratic_in_closed_form(optimizer):
    """L = c w^2 / 2 has the gradient c w; Adam's first step moves a scale by lr, down where the slope is positive."""

    def run(gamma):
        model = nn.ParameterDict({"w": torch.tensor([3.0, -4.0], dtype=torch.float64)})
        options = {"optimizer": optimizer, "eta": 0.5, "gamma": gamma, "lr": 0.125, "iterations": 1}
        return gradinit(model, lambda model, c: c / 2 * model["w"].square().sum(), [(2.0, 3.0)], **options)

    norm = {"adam": 2 * (3 + 4), "sgd": 2 * 5}[optimizer]
    moved = {"adam": (2.5, -3.5), "sgd": (0.0, 0.0)}[optimizer]  # w - 0.5 sign(2 w), w - 0.5 * 2 w
    above, below = run(norm - 0.1), run(norm + 0.1)
    assert (above.history[0].constrained, below.history[0].constrained) == (True, False)
    assert above.history[0].gradient_norm == below.history[0].gradient_norm == pytest.approx(norm)
    assert above.history[0].loss == below.history[0].loss == 25
    assert above.history[0].updated_loss is None
    assert below.history[0].updated_loss == pytest.approx(1.5 * sum(w * w for w in moved))
    assert above.scales["w"] == pytest.approx(1 - 0.125)
    assert below.scales["w"] == pytest.approx(1 - 0.125 if optimizer == "adam" else 1)


@given(st.floats(1e-6, 10))
def test_default_gamma_bounds_what_a_first_step_gains(eta):
    assert eta * default_gamma("adam", eta) == pytest.approx(0.1)
    assert eta * default_gamma("sgd", eta) ** 2 == pytest.approx(0.1)


def test_gamma_comes_from_eta_where_it_is_not_given():
    result = gradinit(mlp(), loss_fn, pairs_of_batches(1), optimizer="sgd", eta=0.4, lr=0.01, iterations=1)
    assert result.settings["gamma"] == pytest.approx(0.5)


def test_a_wrong_guess_costs_one_more_pass():
    model, calls = mlp(), []

    def counted(model, batch):
        calls.append(batch)
        return loss_fn(model, batch)

    options = {"eta": 0.05, "gamma": 3.2, "lr": 0.02, "iterations": 24}
    counts = []
    result = gradinit(model, counted, pairs_of_batches(24), progress=lambda _: counts.append(len(calls)), **options)
    branches = [record.constrained for record in result.history]
    wrong = [now and not before for before, now in itertools.pairwise([False, *branches])]
    assert 0 < sum(wrong) < sum(branches) < 24, "the run should see right and wrong guesses of both kinds"
    expected = [1 + guess if now else 2 for now, guess in zip(branches, wrong, strict=True)]
    assert [after - before for before, after in itertools.pairwise([0, *counts])] == expected


@pytest.mark.parametrize("gamma", [1e-6, 1e6])
@pytest.mark.parametrize("sparse", [False, True])
def test_tied_frozen_unused_and_zero_parameters(gamma, sparse):
    torch.manual_seed(2)
    model = Language(sparse).double().train()
    nn.init.zeros_(model.block[0].bias)
    before, tokens = copy.deepcopy(model), torch.randint(7, (4, 6, 3))
    pairs = [(batch, batch) for batch in tokens]
    scales = gradinit(model, mean_square, pairs, eta=1e-3, gamma=gamma, lr=0.1, iterations=4).scales
    assert "head.weight" not in scales
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, scales["embedding.weight"] * before.head.weight)
    assert scales["embedding.weight"] != 1
    assert scales["block.0.bias"] == scales["unused.weight"] == scales["unused.bias"] == 1
    assert torch.equal(model.frozen.weight, before.frozen.weight)
    assert snapshot(model)[1:] == snapshot(before)[1:]


@pytest.mark.parametrize("gamma", [1e-6, 1e6])
@pytest.mark.parametrize("training", [False, True])
def test_modes_and_running_statistics_stay(gamma, training):
    model = Images().double().train(training)
    before, images = snapshot(model), torch.randn(3, 6, 1, 4, 4, dtype=torch.float64)
    pairs = [(batch, batch) for batch in images]
    gradinit(model, mean_square, pairs, eta=1e-3, gamma=gamma, lr=0.1, iterations=3)
    after = snapshot(model)
    assert after[1:] == before[1:]
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in model.named_buffers())
    assert not torch.equal(model.end[2].weight, before[0]["end.2.weight"])


MODELS = {
    "encoder": lambda: nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True)),
    "LSTM": Recurrent,
    "MLP": lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gamma", [1e-6, 1e6])
def test_checkpointed_activations_and_random_numbers_change_nothing(name, gamma):
    def scales(wrap, seed):
        torch.manual_seed(1)
        model = wrap(MODELS[name]().double())
        batches = torch.randn(4, 2, 5, 3, dtype=torch.float64)
        torch.manual_seed(seed)
        result = gradinit(model, mean_square, zip(batches, batches, strict=True), gamma=gamma, **options)
        return list(result.scales.values())

    options = {"eta": 1e-2, "lr": 0.1, "iterations": 4}
    assert scales(Checkpointed, 3) == pytest.approx(scales(nn.Sequential, 4), rel=1e-9)


@pytest.mark.parametrize("gamma", [1e-6, 1e6])
def test_decoder(gamma):
    def attending(model, states):
        return model(states, states).square().mean()

    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.5, batch_first=True), 2)
    pairs = [(states, states) for states in torch.randn(3, 2, 3, 8)]
    scales = gradinit(model, attending, pairs, eta=1e-3, gamma=gamma, lr=0.01, iterations=3).scales
    assert scales["layers.0.self_attn.in_proj_weight"] != 1
    assert scales["layers.1.multihead_attn.out_proj.weight"] != 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions(dtype):
    def scales(dtype):
        model = mlp().to(dtype)
        pairs = [[[tensor.to(dtype) for tensor in batch] for batch in pair] for pair in pairs_of_batches(6)]
        return gradinit(model, loss_fn, pairs, eta=0.05, gamma=2.0, lr=0.02, iterations=6).scales

    assert scales(dtype) == pytest.approx(scales(torch.float64), abs=1e-4 if dtype == torch.float32 else 0.05)


class Odd(nn.Module):
    """Parameters of no, one and two dimensions, of two types, in lists; one empty and one not contiguous."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 2).t())
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.shifts = nn.ParameterList([torch.randn(2), torch.randn(2).double()])

    def forward(self, inputs):
        outputs = self.temperature * nn.functional.linear(inputs, self.matrix).tanh() + self.empty.sum()
        return outputs + sum(self.shifts)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("gamma", [1e-6, 1e6])
def test_odd_parameters(optimizer, gamma):
    options = {"optimizer": optimizer, "eta": 1e-3, "gamma": gamma, "lr": 0.1, "iterations": 2}
    pairs = [((inputs.float(), targets),) * 2 for (inputs, targets), _ in pairs_of_batches(2)]
    scales = gradinit(Odd(), loss_fn, pairs, **options).scales
    assert scales.pop("empty") == 1
    assert all(scale != 1 for scale in scales.values())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_caller_s_grad_mode_does_not_matter(context):
    options = {"eta": 0.05, "gamma": 3.0, "lr": 0.02, "iterations": 6}
    expected = gradinit(mlp(), loss_fn, pairs_of_batches(6), **options)
    model = mlp()
    with context():
        assert gradinit(model, loss_fn, pairs_of_batches(6), **options) == expected


def test_scales_stop_at_their_lower_bounds_and_a_bias_may_come_back():
    def scales(signs):
        model = nn.ParameterDict({"weight": torch.ones(2), "bias": torch.ones(2)})
        pairs = [(sign, sign) for sign in signs]
        options = {"eta": 1e-3, "gamma": 1e6, "lr": 0.6, "iterations": len(signs)}
        return gradinit(model, lambda model, sign: sign * (model["weight"] + model["bias"]).sum(), pairs, **options)

    assert scales([1, 1]).scales == {"weight": pytest.approx(0.01), "bias": 0}
    assert scales([1, 1, -9]).scales["bias"] > 0.1


def not_a_number(model, batch):
    return loss_fn(model, batch) * math.nan


def infinite_norm(model, batch):
    """sqrt(x^2) has no derivative in 0."""
    return loss_fn(model, batch) + (model[3].bias - model[3].bias.detach()).pow(2).sum().sqrt()


class Unstable:
    """A loss that breaks at its n-th call."""

    def __init__(self, calls, value):
        self.calls, self.value = calls, value

    def __call__(self, model, batch):
        self.calls -= 1
        if self.calls == 0 and isinstance(self.value, BaseException):
            raise self.value
        return loss_fn(model, batch) + (self.value if self.calls == 0 else 0.0)


@pytest.mark.parametrize(
    ("gamma", "loss", "error", "sentence"),
    [
        (1e6, not_a_number, FloatingPointError, r"iteration 1: the loss is nan, and so is the gradient of 0\.weight"),
        (1e6, Unstable(3, math.inf), FloatingPointError, "iteration 2: the loss is inf$"),
        (1e6, Unstable(4, -math.inf), FloatingPointError, "iteration 2: the loss after the first step is -inf$"),
        (1e6, infinite_norm, FloatingPointError, r"iteration 1: the gradient norm is nan, .* gradient of 3\.bias, the"),
        (1e-6, Unstable(3, RuntimeError("out of memory")), RuntimeError, "out of memory"),
        (1e6, Unstable(3, KeyboardInterrupt("stop")), KeyboardInterrupt, "stop"),
        (1e6, loss_fn, ValueError, "was to take 4 iterations, but got only 3 pairs of batches"),
    ],
)
def test_whatever_is_raised_the_model_is_untouched(gamma, loss, error, sentence):
    model = mlp()
    before = snapshot(model)
    with pytest.raises(error, match=sentence):
        gradinit(model, copy.copy(loss), pairs_of_batches(3), eta=0.05, gamma=gamma, lr=0.02, iterations=4)
    assert_untouched(model, before)


def test_a_slope_that_is_not_finite_names_its_parameter():
    """|x|^1.5 has a derivative in 0, but no second one."""

    def cusp(model, batch):
        return loss_fn(model, batch) + (model[3].weight - 1).abs().pow(1.5).sum()

    model = mlp()
    nn.init.ones_(model[3].weight)
    before = snapshot(model)
    with pytest.raises(FloatingPointError, match=r"iteration 1: the gradient of the scale of 3\.weight is not finite"):
        gradinit(model, cusp, pairs_of_batches(3), optimizer="sgd", eta=0.05, gamma=1e-6, lr=0.02, iterations=3)
    assert_untouched(model, before)


def test_an_interrupt_in_progress_leaves_the_model_untouched():
    model = mlp()
    before = snapshot(model)

    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradinit(model, loss_fn, pairs_of_batches(1), eta=0.05, lr=0.02, iterations=1, progress=interrupt)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"optimizer": "lamb"}, "optimizer must be 'adam' or 'sgd', not 'lamb'"),
        ({"eta": 0}, "eta must be a positive number, not 0"),
        ({"gamma": -1.0}, "gamma must be a positive number, not -1.0"),
        ({"lr": math.nan}, "lr must be a positive number, not nan"),
        ({"grad_clip": math.inf}, "grad_clip must be a positive number, not inf"),
        ({"iterations": 0}, "iterations must be a whole number from 1 on, not 0"),
        ({"iterations": 2.0}, "iterations must be a whole number from 1 on, not 2.0"),
        ({"min_scale": 1.5}, "min_scale must be between 0 and 1, where the scales start, not 1.5"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers from 0 to below 1, not \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers from 0 to below 1, not \(0.9,\)"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "Linear has no trainable parameter to scale"),
    ],
)
def test_a_bad_setting_is_one_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        gradinit(**{"model": mlp(), "loss_fn": loss_fn, "batches": [], "eta": 0.1, "lr": 0.1, "iterations": 1} | wrong)


OPTIONS = {"eta": 0.05, "gamma": 2.0, "lr": 0.02, "iterations": 12}


def results_of_process(rank, folder):
    """Work on rows 0 to 4 or 5 to 7 of every batch, weighted so that the mean over processes is that over rows."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rows = slice(0, 5) if rank == 0 else slice(5, None)

    def weighted(model, batch):
        inputs, targets = batch
        return loss_fn(model, (inputs[rows], targets[rows])) * 2 * len(inputs[rows]) / len(inputs)

    for optimizer in ("adam", "sgd"):
        pairs, group = pairs_of_batches(12, rows=16), distributed.group.WORLD
        result = gradinit(mlp(), weighted, pairs, optimizer=optimizer, process_group=group, **OPTIONS)
        branches = [record.constrained for record in result.history]
        torch.save((result.scales, branches), f"{folder}/{optimizer}{rank}.pt")
    distributed.destroy_process_group()


def test_two_processes_find_the_scales_of_one(tmp_path):
    multiprocessing.spawn(results_of_process, (str(tmp_path),), nprocs=2)
    for optimizer in ("adam", "sgd"):
        first, second = (torch.load(tmp_path / f"{optimizer}{rank}.pt") for rank in range(2))
        assert first == second
        alone = gradinit(mlp(), loss_fn, pairs_of_batches(12, rows=16), optimizer=optimizer, **OPTIONS)
        scales, branches = first
        assert branches == [record.constrained for record in alone.history]
        assert scales == pytest.approx(alone.scales, rel=1e-9)
