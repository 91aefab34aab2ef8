"""Medians and ratios of paired rounds, with 95% intervals."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final

_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5% points of Student's t with 1 to 30 degrees of freedom."""

_NORMAL_975: Final = 1.960


def t_975(freedom: int) -> float:
    """The 97.5% point of Student's t, at most 0.002 off.

    Args:
        freedom: degrees of freedom, at least 1.
    """
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    # The first terms of its expansion in 1 / freedom (Abramowitz & Stegun 26.7.5).
    z = _NORMAL_975
    return z + (z**3 + z) / (4 * freedom)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% t interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = t_975(len(values) - 1) * error
    return mean - half, mean + half


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median, the 95% interval of the mean, and the values.

    Args:
        values: one per round, in one unit.
    """
    return {
        "median": statistics.median(values),
        "interval": _listed(mean_interval(values)),
        "values": list(values),
    }


def against(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """`values` over `base`, round by round: the median ratio and its 95% interval.

    The interval is the t interval of the mean log ratio, so that turning the ratio
    round turns the interval round.

    Args:
        values: one per round, positive.
        base: vanilla's of the same rounds, positive.

    Raises:
        ValueError: numbers of rounds differ, or a value is not positive.
    """
    logs = [math.log(v) - math.log(b) for v, b in zip(values, base, strict=True)]
    interval = mean_interval(logs)
    return {
        "ratio": math.exp(statistics.median(logs)),
        "interval": _listed(
            interval and (math.exp(interval[0]), math.exp(interval[1]))
        ),
        "rounds": len(logs),
    }


def percent(found: dict[str, Any]) -> str:
    """A ratio of `against` as "+0.12% [-0.05, +0.30]"."""
    text = f"{100 * (found['ratio'] - 1):+.2f}%"
    if found["interval"] is None:
        return text
    low, high = (100 * (end - 1) for end in found["interval"])
    return f"{text} [{low:+.2f}, {high:+.2f}]"


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)
