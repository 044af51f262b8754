"""Estimates with 95% intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

RESAMPLES = 2000


class Estimate(NamedTuple):
    """A value with its 95% interval; NaN bounds without one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        value, low, high = (f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in self)
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"

    def __neg__(self) -> "Estimate":
        return Estimate(-self.value, -self.high, -self.low)

    def fixed(self, sign: str = "", digits: int = 2) -> str:
        """Returns the estimate with `digits` decimals; `sign` "+" for a difference."""
        value, low, high = (f"{x:{sign}.{digits}f}" for x in self)
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"


def bootstrap(groups: Sequence[Float[np.ndarray, "n"]], seed: int = 0) -> Estimate:
    """Returns the mean over groups of their means, with a percentile interval.

    Args:
        groups: one array per task, with a value per document. Documents are resampled within their group.
        seed: seed of the resampling.

    Returns:
        The estimate; without interval if every group has a single value.
    """
    value = float(np.mean([np.mean(group) for group in groups]))
    if all(len(group) < 2 for group in groups):
        return Estimate(value)
    rng = np.random.default_rng(seed)
    means = [group[rng.integers(len(group), size=(RESAMPLES, len(group)))].mean(axis=1) for group in groups]
    low, high = np.quantile(np.mean(means, axis=0), (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def mean_interval(samples: Float[np.ndarray, "n"]) -> Estimate:
    """Returns the mean of independent samples with Student's interval.

    Raises:
        ValueError: for fewer than two samples.
    """
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples have no interval; measure at least 2 seeds")
    mean, error = float(np.mean(samples)), float(stats.sem(samples))
    half = float(stats.t.ppf(0.975, len(samples) - 1)) * error
    return Estimate(mean, mean - half, mean + half)


def median_interval(samples: Float[np.ndarray, "n"]) -> Estimate:
    """Returns the median with the narrowest 95% interval of order statistics, for timings with one-sided outliers.

    Raises:
        ValueError: for fewer than six samples.
    """
    low, high = stats.quantile_test(samples, p=0.5).confidence_interval()
    if not math.isfinite(low):
        raise ValueError(f"{len(samples)} samples have no 95% interval of the median; measure at least 6")
    return Estimate(float(np.median(samples)), float(low), float(high))


def log_slope(sizes: Sequence[float], measured: Float[np.ndarray, "n S"]) -> Estimate:
    """Returns the exponent b of measured ~ sizes^b: the mean of the least-squares slopes of n independent series."""
    return mean_interval(np.polyfit(np.log(sizes), np.log(measured).T, 1)[0])
