"""How a quantity depends on depth: a power of N, fitted, and the word for it.

That a sound initialisation keeps signal, gradient and first update independent of N is the claim of T-Fixup (Huang et
al., ICML 2020, theorem 3.1); N is the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldstart.probe import DepthProbe

__all__ = [
    "FLAT_EXPONENT",
    "KEPT_SPREAD",
    "SIGNIFICANT_ERRORS",
    "Fit",
    "Verdict",
    "fit_exponent",
    "verdict",
    "will_stall",
]

FLAT_EXPONENT = 0.25  # below this, 16 times the depth changes a quantity by less than a factor of 2
SIGNIFICANT_ERRORS = 2.0  # an exponent of fewer standard errors than this may be chance
KEPT_SPREAD = 0.2  # calibrated on trainings of 6 and 18 layers: examples/depth_study


@dataclass(frozen=True)
class Fit:
    """A power law, value ~ N^exponent: the exponent, and its standard error."""

    exponent: float
    error: float


@dataclass(frozen=True)
class Verdict:
    """What a quantity does with depth.

    Attributes:
        trend: "flat", "growing" or "shrinking".
        exponent: that of N; infinite where the quantity overflows, minus infinite where it vanishes.
        error: standard error of the exponent; NaN where that is infinite.
        broken_at: the least N at which the quantity is not finite, or zero; None where all of it can be fitted.
    """

    trend: str
    exponent: float
    error: float
    broken_at: int | None = None

    def __str__(self) -> str:
        if self.broken_at is not None:
            return f"{self.trend}: {'not finite' if self.trend == 'growing' else 'zero'} at N = {self.broken_at}"
        exponent = round(self.exponent, 2) + 0.0  # no -0.00
        return f"{self.trend}: N^({exponent:.2f} ± {self.error:.2f})"


def fit_exponent(depths: Sequence[int], values: Sequence[float]) -> Fit:
    """Least squares of log value against log N.

    Args:
        depths: N of each measurement; one N may occur several times, e.g. with several seeds.
        values: the measured quantity, of any unit.

    Raises:
        ValueError: there are fewer than 3 measurements, so that the error is unknown, or all of one N; the lengths
            differ; an N is below 1; or a value is not a positive finite number.
    """
    _check(depths, values)
    if not all(0 < value < math.inf for value in values):
        raise ValueError(f"a power law has positive finite values only, not all of {list(values)}")
    x, y = ([math.log(number) for number in numbers] for numbers in (depths, values))
    count, x_mean, y_mean = len(x), math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - x_mean) ** 2 for a in x)
    exponent = math.fsum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    residuals = (b - y_mean - exponent * (a - x_mean) for a, b in zip(x, y, strict=True))
    return Fit(exponent, math.sqrt(math.fsum(r * r for r in residuals) / (count - 2) / spread))


def verdict(depths: Sequence[int], values: Sequence[float]) -> Verdict:
    """Whether a quantity is flat, growing or shrinking with depth.

    It grows or shrinks where its exponent is further from 0 than :data:`FLAT_EXPONENT` and than
    :data:`SIGNIFICANT_ERRORS` standard errors. A value that is infinite or NaN is an overflow: growing. Failing that, a
    value of 0 is an underflow: shrinking.

    Args:
        depths: N of each measurement.
        values: the measured quantity, a norm or a ratio of norms.

    Raises:
        ValueError: as :func:`fit_exponent` does, but values that are 0 or not finite have a verdict.
    """
    _check(depths, values)
    for trend, exponent, broken in (
        ("growing", math.inf, [n for n, value in zip(depths, values, strict=True) if not math.isfinite(value)]),
        ("shrinking", -math.inf, [n for n, value in zip(depths, values, strict=True) if value == 0]),
    ):
        if broken:
            return Verdict(trend, exponent, math.nan, min(broken))
    fit = fit_exponent(depths, values)
    if abs(fit.exponent) <= max(FLAT_EXPONENT, SIGNIFICANT_ERRORS * fit.error):
        return Verdict("flat", fit.exponent, fit.error)
    return Verdict("growing" if fit.exponent > 0 else "shrinking", fit.exponent, fit.error)


def will_stall(probe: DepthProbe) -> bool:
    """Whether a training will stall or diverge, told from its first update.

    It will where the step leaves less than :data:`KEPT_SPREAD` of the differences between tokens, or overflows: a
    model that says the same whatever it reads has little gradient left to learn from.

    Args:
        probe: of the run's own model, optimiser and the learning rate of its first update, which of a warmup is small.
    """
    return not KEPT_SPREAD <= probe.kept_spread < math.inf


def _check(depths: Sequence[int], values: Sequence[float]) -> None:
    if len(depths) != len(values):
        raise ValueError(f"every value has its depth, but there are {len(depths)} depths and {len(values)} values")
    if len(depths) < 3 or len(set(depths)) < 2:
        raise ValueError(f"an exponent and its error need at least 3 measurements at 2 depths, not {list(depths)}")
    if min(depths) < 1:
        raise ValueError(f"a depth is a number of layers from 1 on, not {min(depths)}")
