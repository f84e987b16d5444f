"""ShardCombine: finds out how an operator splits by running it.

For every group of dims that may be cut together (`classes.py`, on shapes alone), the operator is run on each piece
and its results are compared with those of the whole: equal (identity), equal after a reduction (sum, max, min, prod;
avg only for equal pieces), or the whole cut along one dim (`combine.py`). A candidate must hold for every
adversarial input (`draws.py`), at 2 and at 3 pieces, uneven ones, one-element ones, and interleaved ones, so that it
holds for any way of dealing out the indices. Pieces without elements are tried last, since they may crash.

Where a group fails but an integer operand points into it, the pieces are tried with that operand shifted (embedding,
gather, scatter with the indexed dim split). Linearity is tested so that Partial sums pass through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from math import prod

import numpy as np

from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta
from .classes import Group, find_groups, resize, result_growth
from .combine import adds_up, close, concatenates, reductions, take
from .draws import Spec, Trial, draw, draw_all, has_integers, index_ranges, trials, uniform
from .indexed import indexed_factors
from .ranges import Attempt, directly, find_spec, fresh_trials
from .rule import DimRef, Factor, OperandRole, ResultRole, Rule

REFUSED = "no input accepted"
"""`found_on` of a stand-in that the operator refuses to run."""
UNREPEATABLE = "other results every time"
"""`found_on` of an operator that makes other results from the same operands: it draws random numbers."""
REDUCTION_ORDER = ("same", "sum", "max", "min", "prod")


@dataclass(frozen=True)
class Subject:
    """A proxy call with the trials that every candidate has to pass: one of every kind, and fresh ones."""

    call: Call
    trials: tuple[Trial, ...]
    fresh: tuple[Trial, ...]
    spec: Spec
    runner: OpRunner
    attempt: Attempt


def partitions(n: int) -> list[list[np.ndarray]]:
    """Ways to deal out n indices: 1 + rest, three uneven pieces, interleaved."""
    index = np.arange(n)
    found = [[index[:1], index[1:]]]
    if n >= 4:
        found.append([index[:2], index[2:3], index[3:]])
    if n >= 3:
        found.append([index[::2], index[1::2]])
    return found


def discover(call: Call, runner: OpRunner, attempt: Attempt = directly) -> Rule:
    """The rule of a proxy call. `sandbox.discover_all` gives attempts that survive crashes."""
    subject = _subject(call, runner, attempt)
    if subject is None:
        # Memory that a made-up operand leads an operator to read is no random number.
        draws = runner.may_draw(call) and attempt("again", partial(_draws, call, runner))
        return Rule(found_on=UNREPEATABLE if draws else REFUSED)
    found: list[Factor] = []
    failed: list[Group] = []
    for group in find_groups(call, runner):
        if any(_covers(f, group) for f in found):
            continue
        factor = _try_group(subject, group)
        if factor is None:
            failed.append(group)
        else:
            found.append(factor)
    found = _without_contained(found)
    if any(ints.range for ints in subject.spec):
        found += indexed_factors(subject, failed, found)
    useful = [f for f in found if any(isinstance(role, DimRef) for role in (*f.operands, *f.results))]
    return Rule(tuple(useful), _linear_groups(subject), found_on=runner.framework)


def _without_contained(found: list[Factor]) -> list[Factor]:
    """Without factors that cut a subset of another's dims to the same effect: cutting a whole operand costs nothing."""

    def dims(factor: Factor) -> set[tuple[int, OperandRole]]:
        return {(k, role) for k, role in enumerate(factor.operands) if role is not None}

    return [
        f
        for f in found
        if not dims(f) or not any(dims(f) < dims(g) and f.results == g.results and f.ints == g.ints for g in found)
    ]


def _covers(factor: Factor, group: Group) -> bool:
    """Whether a factor for the same dims (with fewer integers), or for more of them, is known already."""
    dims = tuple((o, ref.dim) for o, ref in enumerate(factor.operands) if isinstance(ref, DimRef))
    if group.dims and set(group.dims) < set(dims):
        return True
    return dims == group.dims and (bool(dims) or factor.ints == group.ints)


def _subject(call: Call, runner: OpRunner, attempt: Attempt) -> Subject | None:
    found = find_spec(call, runner, attempt)
    if found is None:
        return None
    spec, made = found
    fresh = attempt("fresh", partial(fresh_trials, call, spec, runner))
    return Subject(call, tuple(made), tuple(fresh or ()), spec, runner, attempt)


def _draws(call: Call, runner: OpRunner) -> bool:
    """Whether an operator that made no trial makes other results of the same operands every time."""
    rng = np.random.default_rng(5)
    for int_range in index_ranges(call, runner) if has_integers(call) else [0]:
        operands = draw_all(call, "positive", uniform(call, int_range), rng)
        try:
            first, again = (runner.run(call, operands) for _ in range(2))
        except OperatorError:
            continue
        return not all(b is not None and close(a, b) for a, b in zip(first, again) if a is not None)
    return False


def run_pieces(
    subject: Subject, group: Group, attempt: Trial, partition: list[np.ndarray], once: int | None = None
) -> list[list[np.ndarray | None]] | None:
    """The results of every piece; None where the operator refuses one. Operand `once` comes in summands."""
    results = []
    rng = np.random.default_rng(11)
    rest = None if once is None else attempt.operands[once]
    for k, index in enumerate(partition):
        operands = list(attempt.operands)
        if once is not None and rest is not None:
            last = k == len(partition) - 1
            operands[once] = rest if last else draw(subject.call.operands[once], "signed", 0, rng)
            rest = rest - operands[once]
        for operand, dim, outer in group.places:
            operands[operand] = take(operands[operand], dim, outer, 1, index)
        try:
            results.append(subject.runner.run(resize(subject.call, group, len(index)), operands))
        except OperatorError:
            return None
    return results


def _roles(
    whole: list[np.ndarray | None],
    pieces: list[list[np.ndarray | None]],
    growth: list[dict[int, int] | None],
    partition: list[np.ndarray],
    even: bool = False,
) -> list[set[ResultRole]] | None:
    """For every result the roles that fit this one execution; None where some result has none."""
    n = sum(len(index) for index in partition)
    found: list[set[ResultRole]] = []
    for r, (result, grows) in enumerate(zip(whole, growth)):
        parts = [piece[r] for piece in pieces]
        if result is None or grows is None:
            found.append({None})
            continue
        arrays = [p for p in parts if p is not None]
        if len(arrays) < len(parts) or len(grows) > 1:
            return None
        roles: set[ResultRole] = set()
        if not grows:
            roles |= reductions(result, arrays, even)
        for dim, factor in grows.items():
            for ref in dict.fromkeys((DimRef(dim, factor, 1), DimRef(dim, 1, factor))):
                if concatenates(result, arrays, dim, ref.outer, ref.unit, partition):
                    roles.add(ref)
        if not roles:
            return None
        assert n > 0
        found.append(roles)
    return found


def _survivors(
    subject: Subject,
    group: Group,
    splits: list[list[np.ndarray]],
    even: bool = False,
    once: int | None = None,
) -> list[set[ResultRole]] | None:
    """Roles that fit on every trial and every partition."""
    growth = result_growth(subject.call, group, subject.runner)
    if growth is None or any(g is not None and len(g) > 1 for g in growth):
        return None
    alive: list[set[ResultRole]] | None = None
    for attempt in (*subject.trials, *subject.fresh):
        for partition in splits:
            pieces = run_pieces(subject, group, attempt, partition, once)
            roles = None if pieces is None else _roles(attempt.results, pieces, growth, partition, even)
            if roles is None:
                return None
            alive = roles if alive is None else [a & b for a, b in zip(alive, roles)]
            if not all(alive):
                return None
    return alive


def _pick(roles: set[ResultRole]) -> ResultRole:
    for name in REDUCTION_ORDER:
        if name in roles:
            return None if name == "same" else name
    refs = sorted((r for r in roles if isinstance(r, DimRef)), key=lambda r: (r.dim, r.outer, r.unit))
    return refs[0] if refs else ("avg" if "avg" in roles else None)


def _try_group(subject: Subject, group: Group) -> Factor | None:
    roles: list[OperandRole] = [None] * len(subject.call.operands)
    for operand, dim, outer in group.places:
        roles[operand] = DimRef(dim, outer)
    operands = tuple(roles)

    def search() -> Factor | None:
        return (
            _try_plain(subject, group, operands)
            or _try_once(subject, group, operands)
            or _try_even(subject, group, operands)
        )

    factor = subject.attempt(f"cut {group.dims} {group.ints}", search)
    if factor is None or factor.even or any(isinstance(role, str) for role in factor.operands):
        return factor
    empty = subject.attempt(f"empty {group.dims} {group.ints}", partial(_empty_works, subject, group, factor))
    return replace(factor, empty=bool(empty))


def _try_plain(subject: Subject, group: Group, operands: tuple[OperandRole, ...]) -> Factor | None:
    alive = _survivors(subject, group, partitions(group.size))
    return None if alive is None else Factor(operands, tuple(_pick(r) for r in alive), group.ints)


def _try_once(subject: Subject, group: Group, operands: tuple[OperandRole, ...]) -> Factor | None:
    """A whole operand that every piece would add again (the bias of a split contraction) comes in summands."""
    for k, (role, meta) in enumerate(zip(operands, subject.call.operands)):
        if role is not None or np.dtype(meta.dtype).kind not in "fc":
            continue
        alive = _survivors(subject, group, partitions(group.size), once=k)
        if alive is not None and all(roles & {"sum", None} for roles in alive):
            roles = tuple("sum" if "sum" in r else None for r in alive)
            return Factor((*operands[:k], "sum", *operands[k + 1 :]), roles, group.ints)
    return None


def _try_even(subject: Subject, group: Group, operands: tuple[OperandRole, ...]) -> Factor | None:
    """A mean over equal pieces is the mean of their means."""
    length = group.size + group.size % 2
    bigger = replace(group, size=length)
    call = resize(subject.call, group, length)
    made = trials(call, subject.spec, subject.runner)
    if len(made) < len(subject.trials):
        return None
    fresh = fresh_trials(call, subject.spec, subject.runner)
    index = np.arange(length)
    splits = [[index[: length // 2], index[length // 2 :]], [index[::2], index[1::2]]]
    alive = _survivors(replace(subject, call=call, trials=tuple(made), fresh=tuple(fresh)), bigger, splits, even=True)
    if alive is None or not any("avg" in roles for roles in alive):
        return None
    return Factor(operands, tuple(_pick(r) for r in alive), group.ints, even=True)


def _empty_works(subject: Subject, group: Group, factor: Factor) -> bool:
    """Whether an empty piece may be executed: its results must not disturb the combination."""
    index = np.arange(group.size)
    growth = result_growth(subject.call, group, subject.runner)
    if growth is None:
        return False
    for attempt in subject.trials[:2]:
        partition = [index, index[:0]]
        pieces = run_pieces(subject, group, attempt, partition)
        roles = None if pieces is None else _roles(attempt.results, pieces, growth, partition)
        if roles is None:
            return False
        for role, fits in zip(factor.results, roles):
            if role not in fits and not (role is None and ("same" in fits or None in fits)):
                return False
    return True


def _linear_groups(subject: Subject) -> tuple[tuple[int, ...], ...]:
    """Groups of operands in which the operator is jointly additive."""
    floats = [k for k, m in enumerate(subject.call.operands) if np.dtype(m.dtype).kind in "fc"]
    if not floats:
        return ()
    results = subject.trials[0].results
    if any(r is not None and r.dtype.kind not in "fc" for r in results):
        return ()
    groups: list[tuple[int, ...]] = [(k,) for k in floats]
    if len(floats) > 1:
        groups.append(tuple(floats))
    if 2 < len(floats) <= 4:
        groups += list(combinations(floats, 2))
    return subject.attempt("linear", lambda: tuple(g for g in groups if _is_linear(subject, g))) or ()


LINEAR_ELEMENTS, LINEAR_REPEATS = 64, 8
"""So many elements of the smallest operand are drawn before additivity is believed, in at most so many draws."""


def _wide(meta: TensorMeta, rng: np.random.Generator) -> np.ndarray:
    """Signed values of all magnitudes up to some hundreds: an operator may be zero, or flat, below a threshold."""
    values = draw(meta, "signed", 0, rng)
    return (values * 10.0 ** rng.uniform(-1.0, 2.0, meta.shape)).astype(values.dtype)


def _is_linear(subject: Subject, group: tuple[int, ...]) -> bool:
    """f(a + b) = f(a) + f(b), seen on results that are finite and not all zero."""
    rng = np.random.default_rng(7)
    smallest = min(max(1, prod(subject.call.operands[k].shape)) for k in group)
    repeats = min(LINEAR_REPEATS, -(-LINEAR_ELEMENTS // smallest))
    seen = False
    # Whole numbers too: summands that cancel, and zeros. Each with every trial: in some, other operands are zero.
    for attempt, wide in product(subject.trials * repeats, (False, True)):
        first, second = list(attempt.operands), list(attempt.operands)
        total, zero = list(attempt.operands), list(attempt.operands)
        for k in group:
            meta = subject.call.operands[k]
            first[k], second[k] = ((_wide(meta, rng) if wide else draw(meta, "ties", 0, rng)) for _ in range(2))
            total[k] = first[k] + second[k]
            zero[k] = np.zeros_like(first[k])
        try:
            a, b, ab, none = (subject.runner.run(subject.call, x) for x in (first, second, total, zero))
        except OperatorError:
            return False
        for x, y, xy, z in zip(a, b, ab, none):
            if x is None or y is None or xy is None or z is None:
                continue
            finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(xy)
            if np.any(z[finite] != 0) or not adds_up(x[finite], y[finite], xy[finite]):
                return False
            seen = seen or bool(np.any(xy[finite] != 0))
    return seen
