"""The exponent of N and the verdict, against exact power laws and NumPy's least squares."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.depth import (
    FLAT_EXPONENT,
    KEPT_SPREAD,
    SIGNIFICANT_ERRORS,
    Fit,
    Verdict,
    fit_exponent,
    verdict,
    will_stall,
)
from coldstart.probe import DepthProbe

DEPTHS = [6, 12, 24, 48, 96]
many_depths = st.lists(st.integers(1, 1000), min_size=3, max_size=9).filter(
    lambda depths: max(depths) >= 2 * min(depths)
)
exponents = st.floats(-4, 4).filter(lambda exponent: abs(abs(exponent) - FLAT_EXPONENT) > 1e-6)


def power_law(depths, exponent, factor=1.0, noise=0.0, seed=0):
    noises = np.random.default_rng(seed).normal(0, noise, len(depths))
    return [factor * n**exponent * math.exp(e) for n, e in zip(depths, noises, strict=True)]


@given(many_depths, exponents, st.floats(-8, 8))
def test_an_exact_power_law_has_its_exponent_and_no_error(depths, exponent, magnitude):
    values = power_law(depths, exponent, 10**magnitude)
    fit = fit_exponent(depths, values)
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.error == pytest.approx(0, abs=1e-9)
    trend = "flat" if abs(exponent) < FLAT_EXPONENT else "growing" if exponent > 0 else "shrinking"
    assert verdict(depths, values) == Verdict(trend, fit.exponent, fit.error)


@given(many_depths, st.floats(-4, 4), st.floats(0.01, 2), st.integers(0, 2**31))
def test_a_noisy_one_has_the_least_squares_of_numpy(depths, exponent, noise, seed):
    values = power_law(depths, exponent, noise=noise, seed=seed)
    (slope, _), covariance = np.polyfit(np.log(depths), np.log(values), 1, cov=True)
    fit = fit_exponent(depths, values)
    assert fit.exponent == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert fit.error == pytest.approx(covariance[0, 0] ** 0.5, rel=1e-6)


def test_the_truth_is_within_two_errors_as_often_as_student_says():
    """Ten points leave 8 degrees of freedom: two errors hold 92 of 100 truths."""
    depths = [2**power for power in range(1, 11)]
    fits = [fit_exponent(depths, power_law(depths, 0.5, noise=0.4, seed=seed)) for seed in range(400)]
    within = sum(abs(fit.exponent - 0.5) <= 2 * fit.error for fit in fits) / len(fits)
    assert within == pytest.approx(0.92, abs=0.05)


@given(st.floats(0, 1), st.integers(0, 1000))
def test_noise_alone_is_flat(noise, seed):
    """Beyond both thresholds, or flat: whatever is called growing or shrinking is significant."""
    values = power_law(DEPTHS, 0.0, noise=noise, seed=seed)
    found, fit = verdict(DEPTHS, values), fit_exponent(DEPTHS, values)
    assert (found.exponent, found.error) == (fit.exponent, fit.error)
    significant = abs(fit.exponent) > max(FLAT_EXPONENT, SIGNIFICANT_ERRORS * fit.error)
    assert (found.trend != "flat") == significant


@given(st.floats(-2, 2), st.floats(0, 0.3), st.integers(0, 1000), st.floats(-8, 8))
def test_the_unit_does_not_matter_and_the_reciprocal_has_the_opposite_verdict(exponent, noise, seed, magnitude):
    values = power_law(DEPTHS, exponent, noise=noise, seed=seed)
    opposite = {"flat": "flat", "growing": "shrinking", "shrinking": "growing"}
    found = verdict(DEPTHS, values)
    if abs(abs(found.exponent) - max(FLAT_EXPONENT, SIGNIFICANT_ERRORS * found.error)) > 1e-6:
        assert verdict(DEPTHS, [value * 10**magnitude for value in values]).trend == found.trend
        assert verdict(DEPTHS, [1 / value for value in values]).trend == opposite[found.trend]


@pytest.mark.parametrize("overflow", [math.nan, math.inf])
def test_overflow_is_growth(overflow):
    found = verdict(DEPTHS, [1.0, 1.0, overflow, overflow, 0.0])
    assert (found.trend, found.exponent, found.broken_at) == ("growing", math.inf, 24)
    assert math.isnan(found.error)
    assert str(found) == "growing: not finite at N = 24"


def test_zero_is_shrinking():
    found = verdict([48, 24, 12], [0.0, 0.0, 1.0])
    assert (found.trend, found.exponent, found.broken_at) == ("shrinking", -math.inf, 24)
    assert str(found) == "shrinking: zero at N = 24"


def test_a_verdict_in_words():
    assert str(Verdict("growing", 0.5, 0.041)) == "growing: N^(0.50 ± 0.04)"
    assert str(Verdict("flat", -0.001, 0.1)) == "flat: N^(0.00 ± 0.10)"
    assert fit_exponent([1, 10, 100], [5.0, 5.0, 5.0]) == Fit(0.0, 0.0)


@pytest.mark.parametrize("function", [fit_exponent, verdict])
@pytest.mark.parametrize(
    ("depths", "values", "sentence"),
    [
        ([6, 12], [1.0, 2.0], r"at least 3 measurements at 2 depths, not \[6, 12\]"),
        ([6, 6, 6], [1.0, 2.0, 3.0], r"at least 3 measurements at 2 depths, not \[6, 6, 6\]"),
        ([6, 12, 24], [1.0, 2.0], "3 depths and 2 values"),
        ([0, 12, 24], [1.0, 2.0, 3.0], "layers from 1 on, not 0"),
        ([6, 12, 24], [1.0, -2.0, 3.0], "positive finite values only"),
    ],
)
def test_what_has_no_exponent(function, depths, values, sentence):
    with pytest.raises(ValueError, match=sentence):
        function(depths, values)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_no_fit_of_zero_or_overflow(value):
    with pytest.raises(ValueError, match="positive finite values only"):
        fit_exponent([6, 12, 24], [1.0, value, 3.0])


@pytest.mark.parametrize(
    ("before", "after", "stalls"),
    [
        (1.0, 1.0, False),
        (1.0, KEPT_SPREAD, False),
        (1.0, 0.9 * KEPT_SPREAD, True),
        (5.0, 0.0, True),
        (1.0, 30.0, False),
        (1.0, math.inf, True),
        (1.0, math.nan, True),
        (math.inf, math.inf, True),
    ],
)
def test_a_training_stalls_whose_first_step_makes_tokens_alike_or_overflows(before, after, stalls):
    probe = DepthProbe((), 1.0, 1.0, 1.0, 1.0, 1.0, output_spread=before, updated_spread=after)
    assert will_stall(probe) is stalls
