"""How the results of pieces may make up the result of the whole: identity, reductions, concatenation."""

from __future__ import annotations

import numpy as np

RTOL, ATOL = 1e-8, 1e-10
"""For float64. Sums over pieces are rounded in another order than the whole: a few ulps of the largest element."""
SINGLE_RTOL, SINGLE_ATOL = 1e-4, 1e-5
"""For float32, in which only operators are tried that know no float64."""

REDUCTIONS = {
    "sum": lambda parts: np.sum(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
    "prod": lambda parts: np.prod(parts, axis=0),
    "avg": lambda parts: np.mean(parts, axis=0),
}


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two results agree: exactly for integers and bools, to rounding for floats; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind not in "fc":
        return bool(np.array_equal(a, b))
    finite = np.abs(a[np.isfinite(a)])
    scale = float(finite.max()) if finite.size else 0.0
    single = a.dtype in (np.float32, np.complex64)
    rtol, atol = (SINGLE_RTOL, SINGLE_ATOL) if single else (RTOL, ATOL)
    return bool(np.allclose(a, b, rtol=rtol, atol=atol * max(scale, 1e-30), equal_nan=True))


def adds_up(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> bool:
    """Whether a + b is the total, to rounding of the larger summand: they may cancel."""
    scale = max((float(np.abs(x).max()) for x in (a, b) if x.size), default=0.0)
    single = total.dtype in (np.float32, np.complex64)
    return bool(np.allclose(total, a + b, rtol=0.0, atol=(SINGLE_RTOL if single else RTOL) * scale))


def reductions(whole: np.ndarray, parts: list[np.ndarray], even: bool) -> set[str]:
    """Names of the reductions under which the parts give the whole; "same" where every part already is the whole."""
    found = set()
    if any(p.shape != whole.shape or p.dtype != whole.dtype for p in parts):
        return found
    if all(close(whole, p) for p in parts):
        found.add("same")
    with np.errstate(all="ignore"):
        for name, reduce in REDUCTIONS.items():
            if name == "avg" and (not even or whole.dtype.kind not in "fc"):
                continue
            if whole.dtype.kind == "b" and name in ("sum", "prod", "avg"):
                continue
            if whole.dtype.kind == "c" and name in ("max", "min"):
                continue
            if close(whole, reduce(np.stack(parts)).astype(whole.dtype)):
                found.add(name)
    return found


def take(array: np.ndarray, dim: int, outer: int, unit: int, index: np.ndarray) -> np.ndarray:
    """The piece of `array` whose factor n of dim = (outer, n, unit) is restricted to `index`."""
    shape = array.shape
    n = shape[dim] // (outer * unit)
    split = array.reshape(*shape[:dim], outer, n, unit, *shape[dim + 1 :])
    piece = np.take(split, index, axis=dim + 1)
    return piece.reshape(*shape[:dim], outer * len(index) * unit, *shape[dim + 1 :])


def concatenates(
    whole: np.ndarray, parts: list[np.ndarray], dim: int, outer: int, unit: int, partition: list[np.ndarray]
) -> bool:
    """Whether each part is the whole restricted to its piece of the factor at (outer, n, unit) of `dim`."""
    n = sum(len(index) for index in partition)
    if dim >= whole.ndim or whole.shape[dim] != outer * n * unit:
        return False
    return all(close(take(whole, dim, outer, unit, index), part) for index, part in zip(partition, parts))
