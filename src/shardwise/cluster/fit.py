"""Fits time = alpha + beta * bytes to measured transfers. Pure numbers; who measured them is not known here."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..errors import InputError

_ROUNDS = 30
_SMALLEST_RESIDUAL = 1e-6  # relative; keeps the weights of the reweighting finite


def fit_alpha_beta(samples: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of (bytes, seconds) samples, both at least 0.

    Minimises the sum of |alpha + beta * bytes - seconds| / seconds by iteratively reweighted least squares: the
    error is relative, so 4 KiB counts as much as 4 MiB, and absolute, so single outliers do not pull the line.
    Samples of one size only say nothing about latency: alpha is 0 then.
    """
    points = [(float(size), float(seconds)) for size, seconds in samples]
    if not points:
        raise InputError("fit_alpha_beta needs at least one sample of (bytes, seconds)")
    for size, seconds in points:
        if not (math.isfinite(size) and size >= 0 and math.isfinite(seconds) and seconds > 0):
            raise InputError(f"fit_alpha_beta: sample ({size}, {seconds}) needs bytes >= 0 and seconds > 0")
    weights = [1.0] * len(points)
    alpha_s, beta = 0.0, 0.0
    for _ in range(_ROUNDS):
        alpha_s, beta = _weighted_fit(points, weights)
        residuals = (abs(alpha_s + beta * size - seconds) / seconds for size, seconds in points)
        weights = [1.0 / max(residual, _SMALLEST_RESIDUAL) for residual in residuals]
    return alpha_s, beta


def _weighted_fit(points: list[tuple[float, float]], weights: list[float]) -> tuple[float, float]:
    """Least squares of the weighted relative error under alpha >= 0 and beta >= 0.

    With x = 1/t and y = b/t the error is alpha * x + beta * y - 1; the normal equations are 2 x 2.
    """
    xx = xy = yy = x1 = y1 = 0.0
    largest = max(size for size, _ in points) or 1.0  # scales bytes to about 1 for the conditioning
    for (size, seconds), weight in zip(points, weights, strict=True):
        x, y = 1.0 / seconds, size / largest / seconds
        xx, xy, yy = xx + weight * x * x, xy + weight * x * y, yy + weight * y * y
        x1, y1 = x1 + weight * x, y1 + weight * y
    if len({size for size, _ in points}) == 1:
        return (0.0, y1 / yy / largest) if yy > 0 else (x1 / xx, 0.0)
    determinant = xx * yy - xy * xy
    alpha_s, beta = (x1 * yy - y1 * xy) / determinant, (xx * y1 - xy * x1) / determinant
    # The constrained optimum of a convex problem in two unknowns lies on the violated border.
    if alpha_s < 0:
        alpha_s, beta = 0.0, y1 / yy
    elif beta < 0:
        alpha_s, beta = x1 / xx, 0.0
    return alpha_s, beta / largest
