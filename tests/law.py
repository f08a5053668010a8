"""The law of T-Fixup as a person would check it by hand: what every tensor of a model should look like."""

import math

from torch import Tensor

SIGMAS = 5  # of the sampling error of a standard deviation: one false alarm in a million tensors


def assert_xavier(weight: Tensor, gain: float) -> None:
    """Entries uniform on (-a, a), a = gain * sqrt(6 / (fan_in + fan_out)): right deviation, right bound, mean zero."""
    fan_out, fan_in = weight.shape
    std = gain * math.sqrt(2 / (fan_in + fan_out))
    _assert_std(weight, std, kurtosis=1.8)
    assert weight.abs().max() <= std * math.sqrt(3) * 1.0001
    assert weight.abs().max() > std * math.sqrt(3) * 0.95


def assert_normal(weight: Tensor, std: float) -> None:
    """Entries normal with mean zero and standard deviation ``std``."""
    _assert_std(weight, std, kurtosis=3.0)
    assert weight.abs().max() > 2.5 * std, "not normal: no tails"


def _assert_std(weight: Tensor, std: float, kurtosis: float) -> None:
    weight = weight.detach().double()
    n = weight.numel()
    error = math.sqrt((kurtosis - 1) / (4 * n))
    assert abs(weight.std().item() / std - 1) < SIGMAS * error
    assert abs(weight.mean().item()) < SIGMAS * std / math.sqrt(n)
