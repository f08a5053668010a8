"""The gradient of a training loss, against autograd on a model that may be touched."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from coldstart.gradients import TrainingLoss, trainable_parameters


def squared_error(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def mean_square(model, batch):
    return model(batch).square().mean()


def snapshot(model):
    """All that must survive: values, modes and what is trained."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return tensors, [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]


def assert_untouched(model, before):
    tensors, modes, trained = snapshot(model)
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in tensors.items())
    assert modes == before[1]
    assert trained == before[2]
    assert all(parameter.grad is None for parameter in model.parameters())


def scaled(model, scale=1.0):
    return {name: (scale * p.detach()).requires_grad_() for name, p in trainable_parameters(model).items()}


def assert_close(gradients, references, rtol=1e-10):
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=rtol, atol=1e-12)


class Language(nn.Module):
    """Embeddings, a block that is used twice, a frozen layer, a head tied to the embedding, and an unused layer."""

    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 5, sparse=sparse)
        self.positions = nn.Embedding(9, 5, sparse=sparse)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens):
        states = self.embedding(tokens) + self.positions(torch.arange(tokens.size(-1)))
        return self.head(self.frozen(self.block(self.block(states))))


class Images(nn.Module):
    """Every normalisation."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        norms = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, track_running_stats=True)
        self.norms = nn.ModuleList([*norms, nn.SyncBatchNorm(4)])
        self.end = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))

    def forward(self, images):
        states = self.convolution(images)
        for norm in self.norms:
            states = norm(states).tanh()
        return self.end(states)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, inputs):
        return self.lstm(inputs)[0]


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, inputs):
        return checkpoint(self.block, inputs, use_reentrant=False)


def test_parameters_are_the_trainable_ones_each_once():
    layers = ["embedding.weight", "positions.weight", "block.0.weight", "block.0.bias", "head.bias"]
    assert list(trainable_parameters(Language())) == [*layers, "unused.weight", "unused.bias"]


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_of_tied_frozen_repeated_and_unused_parameters(sparse):
    model, tokens = Language(sparse).double(), torch.randint(7, (6, 4))
    before = snapshot(model)
    loss, gradients = TrainingLoss(model, mean_square).gradient(scaled(model, 0.5), tokens)
    assert_untouched(model, before)

    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in trainable_parameters(reference).values():
            parameter.mul_(0.5)
    expected = mean_square(reference, tokens)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert not loss.requires_grad
    parameters = trainable_parameters(reference).values()
    assert_close(gradients, [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters])


def test_value_is_the_loss_without_graph():
    model, tokens = Language().double(), torch.randint(7, (6, 4))
    before, loss = snapshot(model), TrainingLoss(model, mean_square)
    value = loss.value(scaled(model, 0.5), tokens)
    assert_untouched(model, before)
    assert value == loss.gradient(scaled(model, 0.5), tokens)[0]
    assert not value.requires_grad
    with pytest.raises(ValueError, match="must return a scalar tensor"):
        TrainingLoss(model, lambda model, tokens: model(tokens)).value(scaled(model), tokens)


def test_norms_use_the_batch_and_keep_their_running_statistics():
    model, images = Images().double(), torch.randn(6, 1, 4, 4, dtype=torch.float64)
    reference = copy.deepcopy(model)
    mean_square(reference, images).backward()
    model.eval()
    before = snapshot(model)
    gradients = TrainingLoss(model, mean_square).gradient(scaled(model), images)[1]
    assert_close(gradients, [parameter.grad for parameter in reference.parameters()])
    assert_untouched(model, before)


def test_model_is_untouched_when_the_loss_raises():
    model = nn.Sequential(Images().eval(), nn.Dropout(0.5))
    before = snapshot(model)

    def interrupted(model, images):
        model(images)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrainingLoss(model, interrupted).gradient(scaled(model), torch.randn(6, 1, 4, 4))
    assert_untouched(model, before)


def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, dropout=0.5, batch_first=True).double()


MODELS = {
    "MLP": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
    "LSTM": Recurrent,
    "encoder": lambda: nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.5, batch_first=True)),
    "piecewise linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1, bias=False)),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_second_gradient_is_the_derivative_of_the_first(name, checkpointed):
    """Against a central difference of first gradients, at weights other than the model's own."""
    torch.manual_seed(1)
    model = MODELS[name]().double()
    inputs = torch.randn(2, 5, 3, dtype=torch.float64)
    loss = TrainingLoss(Checkpointed(model) if checkpointed else model, mean_square)
    weights = scaled(loss.model, 0.7)
    direction = [torch.randn_like(weight) for weight in weights.values()]
    before = snapshot(model)
    gradients = loss.gradient(weights, inputs, differentiable=True)[1]
    products = loss.second_gradient(weights, gradients, direction)
    assert_untouched(model, before)

    def gradients_beside(step):
        pairs = zip(weights.items(), direction, strict=True)
        moved = {name: (w + step * d).detach().requires_grad_() for (name, w), d in pairs}
        return loss.gradient(moved, inputs)[1]

    step = 1e-5
    sides = zip(gradients_beside(step), gradients_beside(-step), strict=True)
    for product, (after, behind) in zip(products, sides, strict=True):
        torch.testing.assert_close(product, (after - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_second_gradient_of_a_linear_loss_is_zero():
    model = nn.Linear(3, 1)
    loss, weights = TrainingLoss(model, lambda model, batch: model(batch).sum()), scaled(model)
    gradients = loss.gradient(weights, torch.randn(2, 3), differentiable=True)[1]
    assert not any(product.any() for product in loss.second_gradient(weights, gradients, gradients))


@pytest.mark.parametrize("differentiable", [False, True])
def test_only_a_second_derivative_needs_the_math_kernel_of_attention(differentiable):
    model, states = transformer(), torch.randn(2, 3, 8, dtype=torch.float64)
    fused = []

    def loss_fn(model, states):
        fused.append(torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.mem_efficient_sdp_enabled())
        return model(states, states).square().mean()

    before, loss, weights = snapshot(model), TrainingLoss(model, loss_fn), scaled(model)
    gradients = loss.gradient(weights, states, differentiable=differentiable)[1]
    assert_untouched(model, before)
    assert fused == [not differentiable]
    assert torch.backends.cuda.flash_sdp_enabled()
    assert_close(gradients, torch.autograd.grad(loss_fn(model.eval(), states), model.parameters()))


def test_recurrent_layers_do_without_cudnn():
    """Its kernels have no derivative in evaluation, and no second one at all."""
    used = []

    def loss_fn(model, batch):
        used.append(torch.backends.cudnn.enabled)
        return mean_square(model, batch)

    enabled = torch.backends.cudnn.enabled
    for model, inputs in ((Recurrent(), torch.randn(2, 5, 3)), (nn.Linear(3, 2), torch.randn(2, 3))):
        TrainingLoss(model, loss_fn).gradient(scaled(model), inputs)
    assert used == [False, enabled]
    assert torch.backends.cudnn.enabled == enabled


def test_a_loss_that_is_a_module_is_no_part_of_the_model():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, model, batch):
            assert self.training
            return self.weight * mean_square(model, batch)

    model, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    once, twice = (TrainingLoss(model, loss_fn) for loss_fn in (mean_square, Loss()))
    assert_close(
        twice.gradient(scaled(model), inputs)[1], [2 * g for g in once.gradient(scaled(model), inputs)[1]], rtol=1e-6
    )


def test_weights_changed_in_place_are_seen_under_the_caller_s_autocast():
    model, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    loss, weights = TrainingLoss(model, mean_square), scaled(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss.gradient(weights, inputs)
        with torch.no_grad():
            for weight in weights.values():
                weight.zero_()
        assert loss.gradient(weights, inputs)[0] == 0


def test_gradient_under_no_grad():
    model, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad():
        gradients = TrainingLoss(model, mean_square).gradient(scaled(model), inputs)[1]
    assert_close(gradients, torch.autograd.grad(mean_square(model, inputs), model.parameters()))


@pytest.mark.parametrize(
    ("loss_fn", "sentence"),
    [
        (lambda model, batch: model(batch), r"must return a scalar tensor, not a tensor of shape \(4, 2\)"),
        (lambda model, batch: model(batch).sum().item(), "must return a scalar tensor, not float"),
        (lambda model, batch: model(batch).sum().detach(), r"parameters of the model \(Linear\) that it is given"),
        (lambda model, batch: nn.Linear(3, 1)(batch).sum(), "but this one depends on none"),
    ],
)
def test_bad_losses_are_one_sentence(loss_fn, sentence):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=sentence):
        TrainingLoss(model, loss_fn).gradient(scaled(model), torch.randn(4, 3))


class SharedEmbedding(nn.Module):
    """One embedding module under two names, and an output projection tied to it, as fairseq shares all embeddings."""

    def __init__(self):
        super().__init__()
        self.source = self.target = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.source.weight

    def forward(self, tokens):
        return self.output(self.source(tokens) + self.target(tokens))


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_module_with_two_names_is_substituted_everywhere_and_put_back(differentiable):
    model, reference = SharedEmbedding().double(), SharedEmbedding().double()
    weight, tokens = model.source.weight, torch.arange(4)
    reference.source.weight.data = 2 * weight.data
    loss, (gradient,) = TrainingLoss(model, mean_square).gradient(
        scaled(model, 2.0), tokens, differentiable=differentiable
    )
    expected = mean_square(reference, tokens)
    assert loss == expected
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, reference.source.weight)[0])
    assert model.source.weight is model.target.weight is model.output.weight is weight
