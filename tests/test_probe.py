"""Weight norms and gradient variances, against torch on stacked gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gradients import Language, assert_untouched, mean_square, snapshot
from torch import nn

from coldstart.gradients import trainable_parameters
from coldstart.probe import gradient_variance, weight_norms


def test_weight_norms():
    model = Language().double()
    norms = {name: parameter.square().sum().sqrt().item() for name, parameter in trainable_parameters(model).items()}
    assert weight_norms(model) == pytest.approx(norms, rel=1e-12)


@settings(max_examples=10, deadline=None)
@given(count=st.integers(2, 9), seed=st.integers(0, 2**31))
def test_variance_between_batches(count, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    batches = 5 + torch.randn(count, 6, 3, dtype=torch.float64)
    before = snapshot(model)
    measured = gradient_variance(model, mean_square, iter(batches))
    assert_untouched(model, before)
    model.eval()
    gradients = [torch.autograd.grad(mean_square(model, batch), model.parameters()) for batch in batches]
    variances = [torch.stack(tensors).var(0).mean().item() for tensors in zip(*gradients, strict=True)]
    assert measured == pytest.approx(dict(zip(trainable_parameters(model), variances, strict=True)), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_that_are_one_tensor_in_memory_or_none(dtype):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2))
            self.scalar = nn.Parameter(torch.zeros((), dtype=dtype))
            self.empty = nn.Parameter(torch.zeros(0, dtype=dtype))
            self.unused = nn.Parameter(torch.zeros(2, dtype=dtype))

        def forward(self, batch):
            return ((self.first + self.second) * batch).sum() + self.scalar * batch.sum() + self.empty.sum()

    batches = [torch.tensor(values, dtype=dtype) for values in ([1, 2, 3], [1, 4, 5], [1, 6, 1])]
    variances = {"first": 8 / 3, "second": 8 / 3, "scalar": 4.0, "empty": 0.0, "unused": 0.0}
    measured = gradient_variance(Sum(), lambda model, batch: model(batch), batches)
    assert measured == pytest.approx(variances, rel=1e-12)


def test_variance_under_inference_mode():
    model, batches = nn.Linear(3, 2), list(torch.randn(3, 4, 3))
    expected = gradient_variance(model, mean_square, batches)
    with torch.inference_mode():
        assert gradient_variance(model, mean_square, batches) == expected


@pytest.mark.parametrize("count", [0, 1])
def test_variance_needs_two_batches(count):
    with pytest.raises(ValueError, match=f"at least 2 batches, not {count}"):
        gradient_variance(nn.Linear(3, 2), mean_square, torch.randn(count, 4, 3))
