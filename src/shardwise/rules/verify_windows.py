"""Checks a factor whose pieces overlap: windows on every device, cropped and summed as the lowering does it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir.placement import chunk
from ..ir.runner import Call, OpRunner, TensorMeta
from .rule import DimRef, Factor, Halo
from .window import overlap_of

TOLERANCE = 1e-8
"""float64, relative to the largest element: sums over pieces are rounded in another order."""
SINGLE_TOLERANCE = 1e-4
"""float32, in which only operators are tried that know no float64 or make it of integers."""


class Wrong(Exception):
    """What does not hold."""


def check_windows(
    call: Call,
    factor: Factor,
    halo: Halo,
    runner: OpRunner,
    operands: list[np.ndarray],
    whole: list[np.ndarray | None],
    parts: int,
) -> None:
    """Raises Wrong where the windows of so many devices do not give the whole."""
    overlap = overlap_of(factor, [a.shape for a in operands], [None if w is None else w.shape for w in whole])
    if overlap is None:
        raise Wrong("no result and no operand says which piece is whose")
    made: list[list[np.ndarray]] = [[] for _ in whole]
    for rank, window in enumerate(overlap.windows(parts)):
        if window is None:
            continue
        local = list(operands)
        for k, role in enumerate(factor.operands):
            if isinstance(role, DimRef):
                rows = np.arange(operands[k].shape[role.dim])
                low, high = window.span(len(rows), halo.operands[k])
                local[k] = np.take(operands[k], rows[low:high], axis=role.dim)
                if k in halo.zeros:
                    start, stop = chunk(len(rows), parts, rank)
                    outside = (rows[low:high] < start) | (rows[low:high] >= stop)
                    np.moveaxis(local[k], role.dim, 0)[outside] = 0
        metas = tuple(TensorMeta(a.shape, m.dtype) for a, m in zip(local, call.operands))
        results = runner.run(call.with_operands(metas), local)
        for r, (want, got, role) in enumerate(zip(whole, results, factor.results)):
            if want is None or got is None:
                continue
            if isinstance(role, DimRef):
                low, high = window.span(want.shape[role.dim], halo.results[r])
                if got.shape[role.dim] != high - low:
                    raise Wrong(f"result {r} of device {rank} of {parts}: {got.shape} for window {window}")
                start, stop = chunk(want.shape[role.dim], parts, rank)
                got = np.take(got, np.arange(start - low, stop - low), axis=role.dim)
            made[r].append(got)
    for r, (want, pieces, role) in enumerate(zip(whole, made, factor.results)):
        if want is not None:
            total = np.concatenate(pieces, role.dim) if isinstance(role, DimRef) else np.sum(pieces, axis=0)
            equal(want, total.astype(want.dtype), f"result {r} of {parts} windows", pieces)


def equal(want: np.ndarray, got: np.ndarray, where: str, parts: Sequence[np.ndarray | None] = ()) -> None:
    if want.shape != got.shape or want.dtype != got.dtype:
        raise Wrong(f"{where}: {got.dtype}{got.shape} for {want.dtype}{want.shape}")
    if want.dtype.kind not in "fc":
        same = np.array_equal(want, got)
    else:
        scale = max(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in (want, *parts) if a is not None)
        tolerance = SINGLE_TOLERANCE if want.dtype in (np.float32, np.complex64) else TOLERANCE
        same = np.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if not same:
        raise Wrong(f"{where}: values differ")
