"""Factors that an integer operand points into: the indexed dim of embedding, gather, scatter and their gradients.

The operand is shifted by the offset of the piece. Entries that point outside of it are dealt with in one of two ways,
whichever holds when executed: "mask" lets them read anything and sets their part of the results to zero; "pad" gives
the cut operands and results one more row, lets them point there, and drops it afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..ir.runner import OperatorError
from .classes import Group, resize, result_growth
from .combine import close, concatenates, reductions, take
from .draws import Trial
from .rule import DimRef, Factor, IndexShift, ResultRole

if TYPE_CHECKING:
    from .discover import Subject


def indexed_factors(subject: Subject, failed: list[Group], found: list[Factor]) -> list[Factor]:
    """Factors for groups that do not split plainly but whose range an integer operand points into."""
    factors: list[Factor] = []
    known: set[tuple[tuple[int, int], ...]] = {_dims(f) for f in found}
    for group in failed:
        if group.dims in known and group.dims:
            continue
        for operand, meta in enumerate(subject.call.operands):
            if meta.dtype not in ("int64", "int32") or any(o == operand for o, _ in group.dims):
                continue
            factor = _try_modes(subject, group, operand, found)
            if factor is not None:
                factors.append(factor)
                known.add(group.dims)
                break
    return factors


def _dims(factor: Factor) -> tuple[tuple[int, int], ...]:
    return tuple((o, ref.dim) for o, ref in enumerate(factor.operands) if isinstance(ref, DimRef))


def _try_modes(subject: Subject, group: Group, operand: int, found: list[Factor]) -> Factor | None:
    if group.size != subject.spec[operand].range or group.outers:
        return None
    refs: list[DimRef | None] = [None] * len(subject.call.operands)
    for o, dim in group.dims:
        refs[o] = DimRef(dim)
    growth = result_growth(subject.call, group, subject.runner)
    if growth is None or any(g is not None and len(g) > 1 for g in growth):
        return None
    wraps = bool(subject.attempt(f"negative {operand}", lambda: _wraps(subject, operand)))
    for mode in ("mask", "pad"):
        dims = _result_dims(subject, operand, found) if mode == "mask" else ()
        if dims is None:
            continue
        shift = IndexShift(operand, mode, wraps, dims)

        def work(shift: IndexShift = shift) -> tuple[ResultRole, ...] | None:
            return _shifted_roles(subject, group, shift, growth)

        roles = subject.attempt(f"index {group.dims} {group.ints} {operand} {mode}", work)
        if roles is not None:
            return Factor(tuple(refs), roles, group.ints, index=shift)
    return None


def _wraps(subject: Subject, operand: int) -> bool:
    """Whether negative entries count from the end."""
    attempt = subject.trials[0]
    operands = list(attempt.operands)
    operands[operand] = operands[operand] - subject.spec[operand].range
    try:
        results = subject.runner.run(subject.call, operands)
    except OperatorError:
        return False
    return all(a is None or (b is not None and close(a, b)) for a, b in zip(attempt.results, results))


def _result_dims(subject: Subject, operand: int, found: list[Factor]) -> tuple[tuple[int, ...], ...] | None:
    """For every result, where each dim of the index operand appears in it (-1 for dims of size 1)."""
    shape = subject.call.operands[operand].shape
    table: list[tuple[int, ...]] = []
    for r, result in enumerate(subject.trials[0].results):
        dims = []
        for d, size in enumerate(shape):
            places = [
                role.dim for f in found if f.operands[operand] == DimRef(d) and isinstance(role := f.results[r], DimRef)
            ]
            if size > 1 and (result is None or not places):
                return None
            dims.append(places[0] if size > 1 else -1)
        table.append(tuple(dims))
    return tuple(table)


def expand_mask(mask: np.ndarray, dims: tuple[int, ...], rank: int) -> np.ndarray:
    """The mask of an index operand, laid along the dims of a result of this rank."""
    kept = sorted((d for d in range(mask.ndim) if dims[d] >= 0), key=lambda d: dims[d])
    dropped = [d for d in range(mask.ndim) if dims[d] < 0]
    shape = [1] * rank
    for d in kept:
        shape[dims[d]] = mask.shape[d]
    return mask.transpose(*kept, *dropped).reshape(shape)


def _shifted_roles(
    subject: Subject, group: Group, shift: IndexShift, growth: list[dict[int, int] | None]
) -> tuple[ResultRole, ...] | None:
    n = group.size
    index = np.arange(n)
    splits = [[index[:1], index[1:]], [index[: n - 1], index[n - 1 :]]]
    if n >= 4:
        splits.append([index[:2], index[2:3], index[3:]])
    alive: list[ResultRole] | None = None
    for attempt in (*subject.trials, *subject.fresh):
        for partition in splits:
            pieces = []
            for part in partition:
                piece = _run_shifted(subject, group, shift, attempt, part, growth)
                if piece is None:
                    return None
                pieces.append(piece)
            roles: list[ResultRole] = []
            for r, whole in enumerate(attempt.results):
                role = _fit(whole, [p[r] for p in pieces], growth[r], partition)
                if role == "none":
                    return None
                roles.append(role)
            if alive is not None and roles != alive:
                return None
            alive = roles
    return tuple(alive) if alive else None


def _fit(
    whole: np.ndarray | None, parts: list[np.ndarray | None], grows: dict[int, int] | None, partition: list[np.ndarray]
) -> ResultRole:
    """Sum or concatenation; the string "none" where neither fits."""
    arrays = [p for p in parts if p is not None]
    if whole is None or grows is None:
        return None
    if not grows:
        return "sum" if "sum" in reductions(whole, arrays, False) else "none"
    ((dim, factor),) = grows.items()
    return DimRef(dim) if factor == 1 and concatenates(whole, arrays, dim, 1, 1, partition) else "none"


def _run_shifted(
    subject: Subject,
    group: Group,
    shift: IndexShift,
    attempt: Trial,
    part: np.ndarray,
    growth: list[dict[int, int] | None],
) -> list[np.ndarray | None] | None:
    """One contiguous piece with the index operand shifted."""
    low, length = int(part[0]), len(part)
    padded = shift.mode == "pad"
    operands = list(attempt.operands)
    for operand, dim in group.dims:
        piece = take(operands[operand], dim, 1, 1, part)
        if padded:
            widths = [(0, 1) if d == dim else (0, 0) for d in range(piece.ndim)]
            piece = np.pad(piece, widths)
        operands[operand] = piece
    entries = operands[shift.operand]
    inside = (entries >= low) & (entries < low + length)
    fill = length if padded else 0
    operands[shift.operand] = np.where(inside, entries - low, fill).astype(entries.dtype)
    try:
        results = subject.runner.run(resize(subject.call, group, length, int(padded)), operands)
    except OperatorError:
        return None
    for r, result in enumerate(results):
        if result is None:
            continue
        if padded and growth[r]:
            ((dim, _),) = growth[r].items()  # type: ignore[union-attr]
            results[r] = result.take(np.arange(length), axis=dim)
        elif not padded:
            mask = expand_mask(inside, shift.result_dims[r], result.ndim)
            results[r] = np.where(mask, result, np.zeros((), result.dtype))
    return results
