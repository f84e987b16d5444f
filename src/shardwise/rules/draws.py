"""Adversarial inputs for discovery: what a rule must survive before it is believed.

One random input is unsound (`any` looks like identity on almost all of them), so every candidate is tried on signed
values, on values with many ties and zeros, on positive ones, on sparse ones, on zeros but for one element, on no zero
but one (what `any` and `all` hang on) and on ones of either sign (operators that compare their operands); bools all
true and all false; integers over their whole range, and every index argument over a range of its own and, where asked,
in order (`ranges.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ir.graph import leaves
from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta

KINDS = ("signed", "ties", "positive", "sparse", "lone", "hole", "twins")
FULL_RANGE = 1000
"""Integers that are not indices are drawn from [-FULL_RANGE, FULL_RANGE)."""


@dataclass(frozen=True, slots=True)
class Ints:
    """What the integers of an operand are drawn from: [0, range), or any value where that is 0. `ascending`: sorted,
    the first of them 0, as the places are at which segments begin."""

    range: int
    ascending: bool = False


Spec = tuple[Ints, ...]
"""One for every operand; it says nothing about operands that hold no integers."""


@dataclass(frozen=True)
class Trial:
    """A call, inputs for it, and what the operator makes of them."""

    call: Call
    operands: list[np.ndarray]
    results: list[np.ndarray | None]


def draw(meta: TensorMeta, kind: str, int_range: int, rng: np.random.Generator) -> np.ndarray:
    """One operand. `int_range` 0 means that integers may have any value."""
    shape, dtype = meta.shape, np.dtype(meta.dtype)
    if dtype.kind == "b":
        if kind in ("sparse", "lone"):
            return _lone(np.full(shape, kind == "lone"), kind == "sparse", rng)
        fill = {"ties": True, "positive": False}.get(kind)
        return rng.random(shape) < 0.5 if fill is None else np.full(shape, fill)
    if dtype.kind in "iu":
        return _draw_ints(shape, dtype, kind, int_range, rng)
    values = _draw_floats(shape, kind, rng)
    if dtype.kind == "c":
        values = values + 1j * _draw_floats(shape, kind, rng)
    return values.astype(dtype)


def draw_all(call: Call, kind: str, spec: Spec, rng: np.random.Generator) -> list[np.ndarray]:
    """All operands of a call."""
    operands = []
    for meta, ints in zip(call.operands, spec):
        operand = draw(meta, kind, ints.range, rng)
        if ints.ascending and operand.ndim and operand.dtype.kind in "iu":
            operand = np.sort(operand, axis=-1)
            operand[..., :1] = 0
            if kind == "signed" and ints.range and operand.shape[-1] > 1:
                operand[..., -1] = ints.range - 1
        operands.append(operand)
    return operands


def uniform(call: Call, int_range: int) -> Spec:
    """The same range for all integers."""
    return (Ints(int_range),) * len(call.operands)


def _lone(array: np.ndarray, value: object, rng: np.random.Generator) -> np.ndarray:
    """The array with one element changed, so that only one of the pieces holds it."""
    if array.size:
        array.reshape(-1)[rng.integers(array.size)] = value
    return array


def _draw_floats(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    if kind == "ties":
        return rng.integers(-2, 3, shape).astype(np.float64)
    if kind == "twins":
        return rng.choice([-1.0, 1.0], shape)
    if kind == "positive":
        return rng.uniform(0.1, 2.0, shape)
    if kind == "lone":
        return _lone(np.zeros(shape), float(rng.choice([-3.0, 3.0])), rng)
    if kind == "hole":
        return _lone(rng.uniform(0.1, 2.0, shape), 0.0, rng)
    values = rng.standard_normal(shape)
    return values * (rng.random(shape) < 0.3) if kind == "sparse" else values


def _draw_ints(
    shape: tuple[int, ...], dtype: np.dtype, kind: str, int_range: int, rng: np.random.Generator
) -> np.ndarray:
    if int_range == 0:
        low = 0 if dtype.kind == "u" else -FULL_RANGE
        high = min(FULL_RANGE, np.iinfo(dtype).max)
        low = max(low, np.iinfo(dtype).min)
        if kind == "lone":
            return _lone(np.zeros(shape, dtype), high - 1, rng)
        if kind == "hole":
            return _lone(rng.integers(1, high, shape).astype(dtype), 0, rng)
        span = (low, high) if kind in ("signed", "positive") else (max(low, -1), 2)
        return rng.integers(*span, shape).astype(dtype)
    values = rng.integers(0, int_range, shape)
    if kind == "ties":
        values = rng.integers(0, min(2, int_range), shape) * (int_range - 1)
    if kind == "hole" and int_range > 1:
        values = _lone(rng.integers(1, int_range, shape), 0, rng)
    if kind == "sparse":
        values = np.where(rng.random(shape) < 0.5, values, 0)
    flat = values.reshape(-1)
    if flat.size and kind == "signed":
        flat[-1] = 0
        flat[0] = int_range - 1  # of a single number too: a range that the operator refuses would look accepted
    return values.astype(dtype)


def index_ranges(call: Call, runner: OpRunner) -> list[int]:
    """Ranges to try for integer operands: any value where no operand is a float, then every size, largest first."""
    sizes = {size for meta in call.operands for size in meta.shape}
    table = dict(leaves(call.args, call.kwargs))
    sizes |= {v for p in runner.size_leaves(call) if isinstance(v := table[p], int) and v < FULL_RANGE}
    floats = any(np.dtype(m.dtype).kind in "fc" for m in call.operands)
    whole = [] if floats else [0]
    return [*whole, *sorted((s for s in sizes if s > 1), reverse=True), 2, 1, *([0] if floats else [])]


def has_integers(call: Call) -> bool:
    """Whether any operand holds integers."""
    return any(np.dtype(m.dtype).kind in "iu" for m in call.operands)


class UnsteadyError(Exception):
    """An operator that does not repeat itself: it reads memory that is not its own, or draws at random."""


def trial(call: Call, kind: str, spec: Spec, runner: OpRunner, seed: int = 0) -> Trial | None:
    """Draws inputs and runs the operator; None where it refuses them. Raises UnsteadyError where two runs differ."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    operands = draw_all(call, kind, spec, rng)
    try:
        results = runner.run(call, operands)
        again = runner.run(call, operands)
    except OperatorError:
        return None
    for a, b in zip(results, again):
        if a is not None and (b is None or not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")):
            raise UnsteadyError(f"{call.op} does not repeat itself on {kind} inputs")
    return Trial(call, operands, results)


def trials(call: Call, spec: Spec, runner: OpRunner) -> list[Trial]:
    """None at all where one kind of input is not repeated: those that are left would tell less than they seem to."""
    try:
        return [t for kind in KINDS if (t := trial(call, kind, spec, runner)) is not None]
    except UnsteadyError:
        return []
