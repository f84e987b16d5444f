"""What the integer operands of a call may hold: a range for each, and whether they have to be in order.

An operator with several of them may point into several things (rows, groups, positions in a plane), so that each has a
range of its own. The search starts from the largest common range with which most kinds of input run; where some kinds
are refused, operands are drawn in order, as the places are at which segments begin. Then every range grows through the
sizes of the call and their products (positions in a plane count rows and columns at once) until the operator refuses.
A range whose end the operator does not tell is left as it was: what lies beyond may be memory of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Protocol, TypeVar

import numpy as np

from ..ir.graph import leaves
from ..ir.runner import Call, OperatorError, OpRunner
from .draws import KINDS, Ints, Spec, Trial, UnsteadyError, has_integers, index_ranges, trial, trials, uniform

MAX_POSITIONS = 1 << 14
"""Products of sizes beyond this are no ranges to try."""
MAX_ORDERED = 3
"""Of so many operands, from the last, it is tried whether they have to be in order."""
FRESH = (("signed", 1, False), ("ties", 2, False), ("positive", 3, False), ("signed", 4, True), ("positive", 5, True))
"""Further inputs for a call with integers: kind, seed, and whether all integers are in order."""

RISKY = "far"
"""An attempt whose tag begins so may well crash: it is made in a process of its own in any case."""
FAR = {"int64": 1 << 40, "int32": 1 << 30}

T = TypeVar("T")


class Attempt(Protocol):
    """Runs work that may crash the process. None where it did: then that attempt is lost, and only that."""

    def __call__(self, tag: str, work: Callable[[], T]) -> T | None: ...


def directly(tag: str, work: Callable[[], T]) -> T | None:
    """An attempt in this process, which dies with it."""
    return work()


def find_spec(call: Call, runner: OpRunner, attempt: Attempt) -> tuple[Spec, list[Trial]] | None:
    """What to draw integers from, with the trials of it; None where no input is accepted."""
    common = index_ranges(call, runner) if has_integers(call) else [0]
    wide = [r for r in common if r != 1]
    best = _best([uniform(call, r) for r in wide], None, call, runner, attempt)
    if not has_integers(call):
        return best
    if best is None or len(best[1]) < len(KINDS):
        lines = [k for k in _integers(call) if call.operands[k].shape][-MAX_ORDERED:]
        for picked in (*combinations(lines, 1), *combinations(lines, 2)):
            specs = [tuple(replace(i, ascending=k in picked) for k, i in enumerate(uniform(call, r))) for r in wide]
            best = _best(specs, best, call, runner, attempt)
            if best is not None and len(best[1]) == len(KINDS):
                break
        # Where all integers are zero most kinds of input run, and tell little.
        best = best or _best([uniform(call, 1)], best, call, runner, attempt)
    if best is None:
        return None
    for operand in _integers(call):
        best = _widen(best, operand, call, runner, attempt)
    return best


def fresh_trials(call: Call, spec: Spec, runner: OpRunner) -> list[Trial]:
    """Further trials that a candidate has to pass: integers differ from draw to draw more than numbers do."""
    found = []
    for kind, seed, ascending in FRESH if has_integers(call) else FRESH[:1]:
        drawn = tuple(replace(ints, ascending=True) for ints in spec) if ascending else spec
        try:
            one = trial(call, kind, drawn, runner, seed)
        except UnsteadyError:
            continue
        if one is not None:
            found.append(one)
    return found


def _integers(call: Call) -> list[int]:
    return [k for k, meta in enumerate(call.operands) if np.dtype(meta.dtype).kind in "iu"]


def _best(
    specs: list[Spec],
    best: tuple[Spec, list[Trial]] | None,
    call: Call,
    runner: OpRunner,
    attempt: Attempt,
) -> tuple[Spec, list[Trial]] | None:
    """The first of those with which most kinds of input run."""
    for spec in specs:
        found = _tried(spec, call, runner, attempt)
        if found and (best is None or len(found) > len(best[1])):
            best = spec, found
        if found and len(found) == len(KINDS):
            break
    return best


def _tried(spec: Spec, call: Call, runner: OpRunner, attempt: Attempt) -> list[Trial] | None:
    tag = "whole " + ",".join(f"{i.range}{'^' if i.ascending else ''}" for i in spec)
    return attempt(tag, lambda: trials(call, spec, runner))


def _widen(
    best: tuple[Spec, list[Trial]], operand: int, call: Call, runner: OpRunner, attempt: Attempt
) -> tuple[Spec, list[Trial]]:
    """With the largest range of this operand, where the operator tells where it ends."""
    spec, count = best[0], len(best[1])
    grown = best
    if spec[operand].range == 0:
        return best
    if not attempt(f"{RISKY} {operand}", lambda: _tells_its_end(best, operand, call, runner)):
        return best
    for bound in _bounds(call, runner):
        if bound <= spec[operand].range:
            continue
        wider = (*spec[:operand], Ints(bound, spec[operand].ascending), *spec[operand + 1 :])

        def work(wider: Spec = wider) -> list[Trial]:
            found = trials(call, wider, runner)
            return found if len(found) >= count and _takes_last(call, runner, found[0], wider, operand) else []

        found = attempt(f"whole {operand} in {bound}", work)
        if found is None:
            return best
        if not found:
            return grown
        grown = wider, found
    return best


def _tells_its_end(best: tuple[Spec, list[Trial]], operand: int, call: Call, runner: OpRunner) -> bool:
    """Whether the operator refuses an index so far away that using it would crash, rather than harm memory."""
    operands = list(best[1][0].operands)
    far = operands[operand].copy()
    far[... if not best[0][operand].ascending else (..., slice(-1, None))] = FAR.get(far.dtype.name, 0)
    operands[operand] = far
    try:
        runner.run(call, operands)
    except OperatorError:
        return True
    return False


def _takes_last(call: Call, runner: OpRunner, first: Trial, spec: Spec, operand: int) -> bool:
    """Whether the last number of the range is accepted everywhere: few draws of few numbers hold it."""
    if spec[operand].ascending:
        return True
    operands = list(first.operands)
    operands[operand] = np.full_like(operands[operand], spec[operand].range - 1)
    try:
        results = [runner.run(call, operands) for _ in range(2)]
    except OperatorError:
        return False
    return all(
        a is None or (b is not None and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")) for a, b in zip(*results)
    )


def _bounds(call: Call, runner: OpRunner) -> list[int]:
    """Numbers where a range may end: sizes and products of neighbouring sizes, and one more than each."""
    table = dict(leaves(call.args, call.kwargs))
    runs: list[list[int]] = [list(meta.shape) for meta in call.operands]
    lists: dict[tuple, list[int]] = {}
    for path in runner.size_leaves(call):
        value = table[path]
        if isinstance(value, int) and 0 < value < MAX_POSITIONS:
            lists.setdefault(tuple(path[:-1]), []).append(value)
    runs += lists.values()
    found: set[int] = set()
    for run in runs:
        for start in range(len(run)):
            product = 1
            for size in run[start:]:
                product *= size
                if 0 < product <= MAX_POSITIONS:
                    found |= {product, product + 1}
    return sorted(found)
