"""Executes a combination of placements: pieces in, the operator on each, pieces put together, compared with the whole.

Nothing of a rule is believed here. Where integers in the arguments have to shrink with a cut (a size), every set of
them that could is tried, as a lowering would have to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ..ir.graph import Arg, Path, leaves
from ..ir.placement import Partial, Placement, Shard, chunk
from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta
from .combine import RTOL, close
from .draws import KINDS, Trial, UnsteadyError, draw, has_integers, trial, uniform
from .sandbox import spec_of

MAX_SHOWN = 16
"""Elements of a tensor that an example prints."""


@dataclass(frozen=True)
class Failure:
    """Where a combination does not hold: the inputs, and the first result that differs."""

    reason: str
    operands: tuple[np.ndarray, ...] = ()
    expected: np.ndarray | None = None
    got: np.ndarray | None = None


def drawn(call: Call, runner: OpRunner) -> tuple[Trial, ...]:
    """A trial of every kind of input that the operator accepts; none where it does not repeat itself."""
    spec = spec_of(call, runner) if has_integers(call) else uniform(call, 0)
    if spec is None:
        return ()
    found = []
    for seed, kind in enumerate((*KINDS, "signed")):
        try:
            one = trial(call, kind, spec, runner, seed)
        except UnsteadyError:
            return ()
        if one is not None:
            found.append(one)
    return tuple([*found, *_altered(found, np.zeros_like, runner)])


def in_order(trials: Sequence[Trial], runner: OpRunner) -> tuple[Trial, ...]:
    """The trials with all numbers of every operand in order, as the operator may demand."""
    return tuple(t for one in trials for t in _altered([one], lambda a: np.sort(a, axis=-1) if a.ndim else a, runner))


def _altered(trials: Sequence[Trial], change: Callable[[np.ndarray], np.ndarray], runner: OpRunner) -> list[Trial]:
    """The first trial with its floats changed; none where the operator refuses."""
    for one in trials[:1]:
        operands = [change(a) if a.dtype.kind == "f" else a for a in one.operands]
        try:
            return [Trial(one.call, operands, runner.run(one.call, operands))]
        except OperatorError:
            return []
    return []


def unwritten(trials: Sequence[Trial]) -> bool:
    """Whether the operator leaves its results as the memory was: filled with NaN by the runner."""
    arrays = [r for one in trials for r in one.results if r is not None and r.size]
    return bool(arrays) and all(a.dtype.kind in "fc" and np.isnan(a).all() for a in arrays)


def int_choices(call: Call, runner: OpRunner, sizes: set[int]) -> list[tuple[Path, ...]]:
    """Sets of integers in the arguments that could shrink with a cut of dims of these sizes."""
    table = dict(leaves(call.args, call.kwargs))
    paths = [p for p in runner.size_leaves(call) if isinstance(v := table.get(p), int) and not isinstance(v, bool)]
    equal = tuple(p for p in paths if table[p] in sizes)
    multiple = tuple(p for p in paths if any(s > 1 and _int(table[p]) >= s and _int(table[p]) % s == 0 for s in sizes))
    return list(dict.fromkeys([(), equal, multiple, *((p,) for p in multiple)]))


def _int(leaf: Arg) -> int:
    assert isinstance(leaf, int)
    return leaf


def holds(
    call: Call,
    operands: tuple[Placement, ...],
    results: tuple[Placement | None, ...],
    runner: OpRunner,
    trials: Sequence[Trial],
    pieces: Sequence[int],
) -> Failure | None:
    """None where the operator, run on pieces that lie so, gives the whole on every trial and at every number of
    pieces that cuts all dims evenly; else what goes wrong with the integers as they are."""
    sizes = {m.shape[p.dim] for m, p in zip(call.operands, operands) if isinstance(p, Shard)}
    sizes |= {1} if not sizes else set()
    first: Failure | None = None
    for ints in int_choices(call, runner, sizes):
        failure = None
        for count, one in product(pieces, trials):
            if count > min(pieces) and any(s % count for s in sizes if s > 1):
                continue
            failure = _fails(call, operands, results, runner, one, count, ints)
            if failure is not None:
                break
        if failure is None:
            return None
        first = first or failure
    return first


def _fails(
    call: Call,
    operands: tuple[Placement, ...],
    results: tuple[Placement | None, ...],
    runner: OpRunner,
    one: Trial,
    count: int,
    ints: tuple[Path, ...],
) -> Failure | None:
    rng = np.random.default_rng([count, 17])
    local: list[list[np.ndarray]] = [[] for _ in range(count)]
    for array, meta, placement in zip(one.operands, call.operands, operands):
        for part, piece in zip(local, scattered(array, meta, placement, count, rng)):
            part.append(piece)
    table = dict(leaves(call.args, call.kwargs))
    if any(_int(table[p]) % count for p in ints):
        return Failure("a size in the arguments does not divide")
    given: list[list[np.ndarray | None]] = []
    for part in local:
        metas = tuple(TensorMeta(a.shape, m.dtype) for a, m in zip(part, call.operands))
        here = call.with_leaves({p: _int(table[p]) // count for p in ints}).with_operands(metas)
        try:
            given.append(runner.run(here, part))
        except OperatorError as error:
            return Failure(f"on a piece: {error}", tuple(one.operands))
    for k, (whole, placement) in enumerate(zip(one.results, results)):
        if whole is None or placement is None:
            continue
        parts = [g[k] for g in given]
        arrays = [p for p in parts if p is not None]
        if len(arrays) < count:
            return Failure(f"result {k} is missing on a piece", tuple(one.operands))
        got = gathered(arrays, placement)
        if got is None or not agrees(whole, got, arrays, placement):
            return Failure(f"result {k} differs as {placement} on {count} pieces", tuple(one.operands), whole, got)
    return None


def agrees(whole: np.ndarray, got: np.ndarray, parts: Sequence[np.ndarray], placement: Placement) -> bool:
    """Whether what was put together is the whole, to rounding; summands may be larger than their sum."""
    if got.shape != whole.shape:
        return False
    if close(whole, got.astype(whole.dtype)):
        return True
    if not isinstance(placement, Partial) or placement.op not in ("sum", "avg") or whole.dtype.kind not in "fc":
        return False
    finite = np.isfinite(got) & np.isfinite(whole)  # summands may have no value where their sum has one
    largest = max((float(np.abs(p[np.isfinite(p)]).max(initial=0.0)) for p in parts), default=0.0)
    return bool(np.abs(got[finite] - whole[finite]).max(initial=0.0) <= RTOL * largest)


def scattered(
    array: np.ndarray, meta: TensorMeta, placement: Placement, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """What each of `count` devices holds of an operand that lies so."""
    if isinstance(placement, Shard):
        spans = [chunk(array.shape[placement.dim], count, k) for k in range(count)]
        return [array.take(np.arange(*span), axis=placement.dim) for span in spans]
    if isinstance(placement, Partial):
        return _summands(array, meta, placement.op, count, rng)
    return [array] * count


def _summands(array: np.ndarray, meta: TensorMeta, op: str, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Arrays that give this one when they are reduced. Of a maximum every element lies on a device of its own."""
    noise = [draw(meta, "signed", 0, rng) for _ in range(count)]
    if op in ("sum", "avg"):
        scale = count if op == "avg" else 1
        rest = np.asarray(array * scale, array.dtype)
        for k in range(count - 1):
            rest = rest - noise[k]
        return [*noise[: count - 1], np.asarray(rest)]
    owner = rng.integers(0, count, array.shape)
    if op == "prod":
        return [np.where(owner == k, array, np.ones((), array.dtype)) for k in range(count)]
    sign = -1 if op == "max" else 1
    return [np.where(owner == k, array, array + sign * np.abs(n)).astype(array.dtype) for k, n in enumerate(noise)]


def gathered(parts: Sequence[np.ndarray], placement: Placement) -> np.ndarray | None:
    """The whole that pieces that lie so make up; None where they make up none."""
    if isinstance(placement, Shard):
        if placement.dim >= parts[0].ndim:
            return None
        try:
            return np.concatenate(parts, axis=placement.dim)
        except ValueError:
            return None
    if any(p.shape != parts[0].shape for p in parts):
        return None
    if isinstance(placement, Partial):
        combine = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "avg": np.mean}.get(placement.op)
        if combine is None or (parts[0].dtype.kind == "b" and placement.op == "avg"):
            return None
        try:
            with np.errstate(all="ignore"):
                return np.asarray(combine(np.stack(parts), axis=0))
        except TypeError:
            return None
    return parts[0] if all(close(parts[0], p) for p in parts[1:]) else None


def shown(array: np.ndarray | None) -> str:
    """A small tensor as a list; of a larger one the shape and its first elements."""
    if array is None:
        return "nothing that fits together"
    rounded = np.round(array, 4) if array.dtype.kind in "fc" else array
    if array.size <= MAX_SHOWN:
        return str(rounded.tolist())
    beginning = ", ".join(map(str, rounded.reshape(-1)[:MAX_SHOWN].tolist()))
    return f"{list(array.shape)} {beginning}, ..."
