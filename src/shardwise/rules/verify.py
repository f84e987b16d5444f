"""Checks a rule on fresh inputs, as the lowering would use it: contiguous uneven pieces, shifted indices, summands.

Shares no code with the discovery beyond the drawing of inputs, so that an error there shows here. Where there are
integers several inputs are tried: of all kinds, with both ends of every range, in order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..ir.graph import Arg, Path, leaves
from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta
from .draws import KINDS, Spec, draw, draw_all, has_integers, uniform
from .rule import DimRef, Factor, IndexShift, Rule
from .sandbox import spec_of
from .verify_windows import Wrong, check_windows, equal

PARTS = (2, 3, 4)

Arrays = list[np.ndarray | None]


def verify_rule(call: Call, rule: Rule, runner: OpRunner, seed: int = 0, prober: OpRunner | None = None) -> list[str]:
    """What does not hold of the rule for this call, which must be small enough to run; empty where all holds.

    `prober` finds out in child processes which integers the operator accepts, by default `runner`: a device that
    cannot be used after a fork, or that an index out of range puts out of use, needs one on the CPU.
    """
    drawn = _draw(call, runner, seed, prober or runner)
    if not drawn:
        return [] if not rule.factors else [f"{call.op} accepts no input"]
    rng = np.random.default_rng(seed)
    errors: list[str] = []
    for operands in drawn:
        errors += _wrong_factors(call, rule, runner, operands, rng)
        if errors:
            break
    operands = drawn[0]
    whole = runner.run(call, operands)
    for group in rule.linear:
        try:
            _check_linear(call, group, runner, operands, whole, rng)
        except (Wrong, OperatorError) as error:
            errors.append(f"linear group {group}: {error}")
    if rule.moves_data:
        errors += _check_moves(call, runner, operands)
    return errors


def _wrong_factors(
    call: Call, rule: Rule, runner: OpRunner, operands: list[np.ndarray], rng: np.random.Generator
) -> list[str]:
    whole = runner.run(call, operands)
    errors = []
    for k, factor in enumerate(rule.factors):
        try:
            if factor.halo is not None:
                for parts in PARTS:
                    check_windows(call, factor, factor.halo, runner, operands, whole, parts)
                continue
            for cuts in _cuts(_length(call, factor, runner), factor, rng):
                _check_factor(call, factor, runner, operands, whole, cuts, rng)
        except (Wrong, OperatorError) as error:
            errors.append(f"factor {k} {factor}: {error}")
    return errors


def _draw(call: Call, runner: OpRunner, seed: int, prober: OpRunner) -> list[list[np.ndarray]]:
    """Inputs that the operator accepts: one of a kind, and where there are integers also extreme ones and ones in
    order."""
    spec = spec_of(call, prober) if has_integers(call) else uniform(call, 0)
    if spec is None:
        return []
    plans: list[tuple[str, Spec]] = [(KINDS[seed % len(KINDS)], spec), ("positive", spec)]
    if has_integers(call):
        plans += [("signed", spec), ("signed", tuple(replace(ints, ascending=True) for ints in spec))]
    drawn: list[list[np.ndarray]] = []
    for kind, ints in plans:
        rng = np.random.default_rng([seed, 99])
        operands = draw_all(call, kind, ints, rng)
        try:
            runner.run(call, operands)
        except OperatorError:
            continue
        drawn.append(operands)
        if not has_integers(call):
            break
    return drawn


def _length(call: Call, factor: Factor, runner: OpRunner) -> int:
    results = runner.meta(call)
    for meta, role in [*zip(call.operands, factor.operands), *zip(results, factor.results)]:
        if meta is not None and isinstance(role, DimRef):
            size, block = meta.shape[role.dim], role.outer * role.unit
            if size % block:
                raise Wrong(f"{block} does not divide the size {size}")
            return size // block
    raise Wrong("cuts no dim")


def _cuts(n: int, factor: Factor, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """Ways to cut range(n) into contiguous pieces: equal, by torch.chunk's convention, and at random."""
    found: list[list[int]] = []
    for parts in PARTS:
        if n % parts == 0:
            found.append([n // parts * k for k in range(parts + 1)])
        if factor.even:
            continue
        chunk = math.ceil(n / parts)
        found.append([min(chunk * k, n) for k in range(parts + 1)])
        if n > parts:
            inner = sorted(rng.choice(np.arange(1, n), parts - 1, replace=False).tolist())
            found.append([0, *inner, n])
    cuts = [list(pairwise(edges)) for edges in found]
    return cuts if factor.empty else [[(a, b) for a, b in cut if b > a] for cut in cuts]


def _piece(array: np.ndarray, ref: DimRef, low: int, high: int, pad: int = 0) -> np.ndarray:
    shape = array.shape
    n = shape[ref.dim] // (ref.outer * ref.unit)
    split = array.reshape(*shape[: ref.dim], ref.outer, n, ref.unit, *shape[ref.dim + 1 :])
    part = split[(slice(None),) * (ref.dim + 1) + (slice(low, high),)]
    if pad:
        part = np.concatenate([part, np.zeros_like(np.take(split, [0] * pad, axis=ref.dim + 1))], axis=ref.dim + 1)
    size = ref.outer * (high - low + pad) * ref.unit
    return part.reshape(*shape[: ref.dim], size, *shape[ref.dim + 1 :])


def _local_call(call: Call, factor: Factor, operands: list[np.ndarray], n: int, length: int) -> Call:
    table = dict(leaves(call.args, call.kwargs))
    new: dict[Path, Arg] = {}
    for path in factor.ints:
        value = table[path]
        assert isinstance(value, int)
        if value % n:
            raise Wrong(f"integer {value} at {path} is no multiple of {n}")
        new[path] = value // n * length
    metas = tuple(TensorMeta(a.shape, m.dtype) for a, m in zip(operands, call.operands))
    return call.with_leaves(new).with_operands(metas)


def _check_factor(
    call: Call,
    factor: Factor,
    runner: OpRunner,
    operands: list[np.ndarray],
    whole: Arrays,
    cuts: list[tuple[int, int]],
    rng: np.random.Generator,
) -> None:
    """Raises Wrong where the pieces do not give the whole."""
    n = cuts[-1][1]
    shift = factor.index
    operands = list(operands)
    if shift is not None and shift.wraps:
        negative = rng.random(operands[shift.operand].shape) < 0.3
        operands[shift.operand] = operands[shift.operand] - n * negative.astype(operands[shift.operand].dtype)
        whole = runner.run(call, operands)
    left = {k: operands[k] for k, role in enumerate(factor.operands) if isinstance(role, str)}
    pieces: list[Arrays] = []
    for low, high in cuts:
        pad = int(shift is not None and shift.mode == "pad")
        local = [
            _piece(a, role, low, high, pad) if isinstance(role, DimRef) else a
            for a, role in zip(operands, factor.operands)
        ]
        for k, rest in left.items():
            local[k] = rest if high == n else draw(call.operands[k], "signed", 0, rng)
            left[k] = rest - local[k]
        inside = None if shift is None else _shift(local, shift, low, high, n)
        results = runner.run(_local_call(call, factor, local, n, high - low + pad), local)
        if shift is not None and inside is not None:
            results = [_clean(r, k, factor, shift, inside, high - low) for k, r in enumerate(results)]
        pieces.append(results)
    for k, (role, result) in enumerate(zip(factor.results, whole)):
        if result is not None:
            _compare(result, [p[k] for p in pieces], role, cuts, f"result {k} of pieces {cuts}")


def _shift(local: list[np.ndarray], shift: IndexShift, low: int, high: int, n: int) -> np.ndarray:
    entries = local[shift.operand]
    if shift.wraps:
        entries = np.where(entries < 0, entries + n, entries)
    inside = (entries >= low) & (entries < high)
    outside = high - low if shift.mode == "pad" else 0
    local[shift.operand] = np.where(inside, entries - low, outside).astype(entries.dtype)
    return inside


def _clean(
    result: np.ndarray | None, k: int, factor: Factor, shift: IndexShift, inside: np.ndarray, length: int
) -> np.ndarray | None:
    """A result without what entries outside of the piece put there."""
    if result is None:
        return None
    role = factor.results[k]
    if shift.mode == "pad":
        return result.take(np.arange(length), axis=role.dim) if isinstance(role, DimRef) else result
    dims = shift.result_dims[k]
    index: list[int | slice] = [0 if d < 0 else slice(None) for d in dims]
    mask = inside[tuple(index)]
    order = np.argsort([d for d in dims if d >= 0], kind="stable")
    mask = mask.transpose(*order) if mask.ndim else mask
    shape = [1] * result.ndim
    for size, d in zip(mask.shape, sorted(d for d in dims if d >= 0)):
        shape[d] = size
    return np.where(mask.reshape(shape), result, np.zeros((), result.dtype))


def _compare(whole: np.ndarray, parts: Arrays, role: object, cuts: list[tuple[int, int]], where: str) -> None:
    arrays = [p for p in parts if p is not None]
    if len(arrays) < len(parts):
        raise Wrong(f"{where}: missing")
    if role is None:
        for part in arrays:
            equal(whole, part, where)
        return
    if isinstance(role, DimRef):
        for part, (low, high) in zip(arrays, cuts):
            if whole.shape[role.dim] != role.outer * cuts[-1][1] * role.unit:
                raise Wrong(f"{where}: shape {whole.shape} does not hold the factor")
            equal(_piece(whole, role, low, high), part, where)
        return
    combine = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "avg": np.mean}[str(role)]
    if any(part.shape != whole.shape for part in arrays):
        raise Wrong(f"{where}: shapes {[p.shape for p in arrays]} for {whole.shape}")
    equal(whole, np.asarray(combine(np.stack(arrays), axis=0)).astype(whole.dtype), where, parts)


def _check_linear(
    call: Call,
    group: tuple[int, ...],
    runner: OpRunner,
    operands: list[np.ndarray],
    whole: Arrays,
    rng: np.random.Generator,
) -> None:
    """Partial sums in, partial sums out: three summands of every operand of the group."""
    left = {k: operands[k] for k in group}
    total: Arrays = [None if w is None else np.zeros_like(w) for w in whole]
    runs: list[Arrays] = []
    for part in range(3):
        local = list(operands)
        for k in group:
            local[k] = left[k] if part == 2 else draw(call.operands[k], "signed", 0, rng)
            left[k] = left[k] - local[k]
        results = runner.run(call, local)
        with np.errstate(invalid="ignore"):
            total = [None if t is None or r is None else t + r for t, r in zip(total, results)]
        runs.append(results)
    for k, (want, got) in enumerate(zip(whole, total)):
        parts = [run[k] for run in runs]
        if want is not None and got is not None and all(p is None or np.isfinite(p).all() for p in parts):
            equal(want, got, f"sum of result {k}", parts)


def _check_moves(call: Call, runner: OpRunner, operands: list[np.ndarray]) -> list[str]:
    """The maximum passes through an operator that only moves elements."""
    if any(a.dtype.kind not in "fiu" for a in operands):
        return []
    one = runner.run(call, operands)
    two = runner.run(call, [-a for a in operands])
    both = runner.run(call, [np.maximum(a, -a) for a in operands])
    good = all(
        x is None or y is None or z is None or np.array_equal(np.maximum(x, y), z) for x, y, z in zip(one, two, both)
    )
    return [] if good else ["is said to move data, and changes it"]
