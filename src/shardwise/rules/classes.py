"""Which dims of a call must be cut together: found on shapes alone, by changing sizes and asking the operator.

Two dims belong together when neither can change alone but both can change at once. That is pairwise unification: the
product over all choices of dims is never searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import gcd

from ..ir.graph import Arg, Path, leaves
from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta

MAX_UNION = 3
"""Of more classes of equal size than this not all unions are tried, see `_picks`."""

Dim = tuple[int, int]
"""(operand, dim)"""


@dataclass(frozen=True, slots=True)
class Group:
    """Dims (at most one per operand) and integer arguments that are cut together; `size` is their length.

    Of a pile (see `find_piles`) dim k consists of `outers[k]` blocks of this length, each of which is cut.
    """

    dims: tuple[Dim, ...]
    ints: tuple[Path, ...]
    size: int
    outers: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """(operand, dim, outer) of every dim."""
        outers = self.outers or (1,) * len(self.dims)
        return tuple((o, d, outer) for (o, d), outer in zip(self.dims, outers))


def resize(call: Call, group: Group, length: int, extra: int = 0) -> Call:
    """The call with the group's dims and integers at `length` (+ extra rows) instead of its size."""
    shapes = [list(m.shape) for m in call.operands]
    for operand, dim, outer in group.places:
        shapes[operand][dim] = outer * (length + extra)
    table = dict(leaves(call.args, call.kwargs))
    new: dict[Path, Arg] = {p: _as_int(table[p]) // group.size * (length + extra) for p in group.ints}
    operands = tuple(TensorMeta(tuple(s), m.dtype) for s, m in zip(shapes, call.operands))
    return call.with_leaves(new).with_operands(operands)


def _as_int(leaf: object) -> int:
    assert isinstance(leaf, int)
    return leaf


def result_growth(call: Call, group: Group, runner: OpRunner) -> list[dict[int, int] | None] | None:
    """Per result: dim -> by how much it grows when the group grows by one; None where a result is absent.

    None for the whole where the operator refuses, or where ranks or dtypes change.
    """
    try:
        before = runner.meta(call)
        after = runner.meta(resize(call, group, group.size + 1))
    except OperatorError:
        return None
    growth: list[dict[int, int] | None] = []
    for a, b in zip(before, after):
        if a is None or b is None:
            growth.append(None)
            continue
        if len(a.shape) != len(b.shape) or a.dtype != b.dtype:
            return None
        growth.append({d: y - x for d, (x, y) in enumerate(zip(a.shape, b.shape)) if x != y})
    return growth


def _int_choices(call: Call, size: int, sizes: dict[Path, int]) -> list[tuple[Path, ...]]:
    """Sets of integers that might follow a dim of this size: none, those equal to it, multiples, single ones."""
    equal = tuple(p for p, v in sizes.items() if v == size)
    multiple = tuple(p for p, v in sizes.items() if v >= size and v % size == 0 and v < 1 << 40)
    choices = [(), equal, multiple, *((p,) for p in multiple)]
    return list(dict.fromkeys(choices))


def find_groups(call: Call, runner: OpRunner) -> list[Group]:
    """Candidate groups that the operator accepts on shapes, the largest of each size first: an operator whose shape
    function checks nothing would crash on most of the smaller ones."""
    table = dict(leaves(call.args, call.kwargs))
    sizes = {
        p: v
        for p in runner.size_leaves(call)
        if isinstance(v := table.get(p), int) and not isinstance(v, bool) and v > 1
    }
    by_size: dict[int, list[Dim]] = {}
    for operand, meta in enumerate(call.operands):
        for dim, size in enumerate(meta.shape):
            if size > 1:
                by_size.setdefault(size, []).append((operand, dim))
    groups: list[Group] = []
    for size, dims in by_size.items():
        classes = _classes(call, size, dims, sizes, runner)
        unions = _unions(call, classes, size, sizes, runner)
        groups += sorted(unions, key=lambda g: -len(g.dims))
    for pile in find_piles(call, runner):
        lengths = [call.operands[o].shape[d] for o, d in pile]
        unit = gcd(*lengths)
        if unit > 1:
            groups.append(Group(pile, (), unit, tuple(length // unit for length in lengths)))
    for path, value in sizes.items():
        group = Group((), (path,), value)
        if result_growth(call, group, runner) is not None:
            groups.append(group)
    return list(dict.fromkeys(groups))


def find_piles(call: Call, runner: OpRunner) -> list[tuple[Dim, ...]]:
    """Dims of different sizes, one of every operand, each of which alone makes the same dim of the result grow: what
    is concatenated there. They can be cut together in blocks of their common divisor."""
    shapes = [m.shape for m in call.operands]
    if len(shapes) < 2 or len({len(s) for s in shapes}) > 1:
        return []
    differing = [d for d in range(len(shapes[0])) if len({s[d] for s in shapes}) > 1]
    if len(differing) != 1 or any(s[differing[0]] < 2 for s in shapes):
        return []
    dims = tuple((o, differing[0]) for o in range(len(shapes)))
    grown = [result_growth(call, Group((dim,), (), call.operands[dim[0]].shape[dim[1]]), runner) for dim in dims]
    if grown[0] is None or len(grown[0]) != 1 or len(grown[0][0] or {}) != 1 or any(g != grown[0] for g in grown):
        return []
    return [dims]


def _accept(call: Call, dims: tuple[Dim, ...], size: int, sizes: dict[Path, int], runner: OpRunner) -> list[Group]:
    """The groups with these dims that pass on shapes, over all choices of integers."""
    if len({operand for operand, _ in dims}) < len(dims):
        return []
    found = []
    for ints in _int_choices(call, size, sizes):
        group = Group(tuple(sorted(dims)), ints, size)
        if result_growth(call, group, runner) is not None:
            found.append(group)
    return found


def _classes(call: Call, size: int, dims: list[Dim], sizes: dict[Path, int], runner: OpRunner) -> list[tuple[Dim, ...]]:
    """Minimal sets of dims of this size that can change together."""
    classes: list[tuple[Dim, ...]] = []
    for seed in dims:
        if any(seed in c for c in classes):
            continue
        chosen = _grow(call, (seed,), size, dims, sizes, runner)
        if chosen is not None and chosen not in classes:
            classes.append(chosen)
    return classes


def _grow(
    call: Call, start: tuple[Dim, ...], size: int, dims: list[Dim], sizes: dict[Path, int], runner: OpRunner
) -> tuple[Dim, ...] | None:
    """The seed alone, with one partner, or with one dim of every other operand, aligned by position; then shrunk."""
    if _accept(call, start, size, sizes, runner):
        return start
    seed_operand, seed_dim = start[0]
    others = [d for d in dims if d[0] != seed_operand]
    for partner in others:
        if _accept(call, (*start, partner), size, sizes, runner):
            return tuple(sorted((*start, partner)))
    for align in ("end", "start", "any"):
        chosen = dict([start[0]])
        for operand, dim in others:
            rank, seed_rank = len(call.operands[operand].shape), len(call.operands[seed_operand].shape)
            fits = align == "any" or (dim - rank == seed_dim - seed_rank if align == "end" else dim == seed_dim)
            if fits and operand not in chosen:
                chosen[operand] = dim
        full = tuple(sorted(chosen.items()))
        if _accept(call, full, size, sizes, runner):
            return _shrink(call, full, start[0], size, sizes, runner)
    return None


def _shrink(
    call: Call, full: tuple[Dim, ...], seed: Dim, size: int, sizes: dict[Path, int], runner: OpRunner
) -> tuple[Dim, ...]:
    for dim in full:
        smaller = tuple(d for d in full if d != dim)
        if dim != seed and _accept(call, smaller, size, sizes, runner):
            full = smaller
    return full


def _picks(classes: list[tuple[Dim, ...]]) -> list[tuple[tuple[Dim, ...], ...]]:
    """Sets of classes to unite: all of them where they are few; else all at once, those of the same dim of every
    operand, single ones, pairs, and all but one."""
    n = len(classes)
    if n <= MAX_UNION:
        return [pick for count in range(1, n + 1) for pick in combinations(classes, count)]
    by_dim: dict[int, list[tuple[Dim, ...]]] = {}
    for c in classes:
        by_dim.setdefault(c[0][1], []).append(c)
    same = [tuple(cs) for cs in by_dim.values()]
    all_but_one = [tuple(c for c in cs if c != without) for cs in [*same, classes] for without in cs]
    picks = [*combinations(classes, 1), *combinations(classes, 2), *same, tuple(classes), *all_but_one]
    return list(dict.fromkeys(pick for pick in picks if pick))


def _unions(
    call: Call, classes: list[tuple[Dim, ...]], size: int, sizes: dict[Path, int], runner: OpRunner
) -> list[Group]:
    """Groups from single classes and from unions of classes of the same size, at most one dim per operand."""
    groups = []
    for pick in _picks(classes):
        dims = tuple(sorted(d for c in pick for d in c))
        groups += _accept(call, dims, size, sizes, runner)
    return groups
