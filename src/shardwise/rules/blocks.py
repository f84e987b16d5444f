"""Which dims of a call may be cut in pieces that overlap, on shapes alone.

Nothing is known of an operator's windows, strides or edges. How much the dims of operands and results grow together
says how many elements of each make a block (a stride is a ratio of 2). Only dims that no plain factor touches are
looked at. The stand-in keeps what the windows depend on (the sizes of kernels, remainders of sizes by the stride) and
has few blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import gcd, lcm, prod

from ..ir.graph import Arg, Path, leaves
from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta
from .proxy import dtype_class, format_call, in_class
from .rule import DimRef, Rule

LONG = 1680
"""A dim grows by so much to see its ratio at once: a multiple of all strides that occur."""
MAX_RATIO = 16
BLOCKS = 12
"""Blocks of a stand-in; more where the arguments hold larger numbers."""
MAX_NUMBER = 16
"""Numbers in the arguments up to this may be the extent of an edge."""
SMALLEST, LARGEST = 2, 4
"""Of the dims that are cut together each has at least so many elements, and one of them so many."""
OTHER = 2
"""Elements that stay of dims which plain factors cut."""
MAX_OPERANDS = 4
MAX_ELEMENTS = 1 << 20
"""Of a stand-in, most of which are left away while it is run."""

Dim = tuple[int, int]
"""(operand, dim)"""
Ratios = tuple[int, ...]
"""Elements of a block for every operand; 0 where it is not cut."""


@dataclass(frozen=True)
class Variant:
    """A stand-in, and the dims that may be cut in it: (dim, ratios of the operands)."""

    call: Call
    dims: tuple[tuple[int, Ratios], ...]


@dataclass(frozen=True)
class Search:
    """The ways in which a call might have windows."""

    variants: tuple[Variant, ...]

    @property
    def key(self) -> str:
        """Under which what is found is kept."""
        texts = [
            " ".join(f"{d}:{'/'.join(map(str, ratios))}" for d, ratios in v.dims) + " of " + format_call(v.call)
            for v in self.variants
        ]
        return "windows " + " | ".join(texts)


def search_of(call: Call, rule: Rule, runner: OpRunner) -> Search | None:
    """What to search for a call whose plain rule is known, on shapes alone; None where there is nothing."""
    closed = _closed(call, rule)
    if not closed or any(m.dtype.startswith(("int", "uint")) for m in call.operands):
        return None
    base = _smaller(call, rule, runner)
    sizes = {size for k, m in enumerate(call.operands) for d, size in enumerate(m.shape) if (k, d) not in closed}
    blocks = max(BLOCKS, 8 + 2 * max((v for v in _numbers(call) if v not in sizes), default=0))
    variants = []
    for subset in _subsets(closed):
        for dims in _guesses(base, subset, closed, runner):
            made = _stand_in(base, dims, blocks, runner)
            if made is not None:
                variants.append(Variant(made, dims))
    return Search(tuple(dict.fromkeys(variants))) if variants else None


def _closed(call: Call, rule: Rule) -> set[Dim]:
    """Dims that no plain factor cuts."""
    touched = {
        (k, role.dim)
        for factor in rule.factors
        if not factor.even
        for k, role in enumerate(factor.operands)
        if isinstance(role, DimRef)
    }
    return {(k, d) for k, meta in enumerate(call.operands) for d, size in enumerate(meta.shape) if size > 1} - touched


def _smaller(call: Call, rule: Rule, runner: OpRunner) -> Call:
    """The call in the dtype in which rules are found, with the dims of plain factors made small."""
    leaf_class: dict[Path, Arg] = {p: in_class(leaf) for p, leaf in leaves(call.args, call.kwargs)}
    metas = tuple(TensorMeta(m.shape, dtype_class(m.dtype)) for m in call.operands)
    call = call.with_leaves(leaf_class).with_operands(metas)
    for factor in rule.factors:
        roles = [(k, role) for k, role in enumerate(factor.operands) if isinstance(role, DimRef)]
        if not roles or factor.index or factor.halo or any(role.outer * role.unit > 1 for _, role in roles):
            continue
        sizes = {call.operands[k].shape[role.dim] for k, role in roles}
        if len(sizes) == 1 and (size := sizes.pop()) > OTHER:
            table = dict(leaves(call.args, call.kwargs))
            new: dict[Path, Arg] = {p: v // size * OTHER for p in factor.ints if isinstance(v := table[p], int)}
            smaller = _resized(call.with_leaves(new), {(k, role.dim): OTHER for k, role in roles})
            if metas_of(smaller, runner) is not None:
                call = smaller
    return call


def _subsets(closed: set[Dim]) -> Iterator[tuple[int, ...]]:
    """Operands that may be cut together: single ones, pairs, all."""
    operands = sorted({k for k, _ in closed})
    yield from combinations(operands, 1)
    if len(operands) <= MAX_OPERANDS:
        yield from combinations(operands, 2)
    if len(operands) > 2:
        yield tuple(operands)


def _guesses(
    call: Call, subset: tuple[int, ...], closed: set[Dim], runner: OpRunner
) -> Iterator[tuple[tuple[int, Ratios], ...]]:
    """Dims with ratios that the shapes of the results allow; several where the sizes leave it open."""
    ranks = {len(call.operands[k].shape) for k in subset}
    if len(ranks) > 1:
        return
    per_dim: list[tuple[int, list[Ratios]]] = []
    for d in range(ranks.pop()):
        sizes = [call.operands[k].shape[d] for k in subset]
        if all((k, d) in closed for k in subset) and min(sizes) >= SMALLEST and max(sizes) >= LARGEST:
            found = [r for r in _ratios(call, subset, d, runner) if growth_of(call, d, r, runner) is not None]
            if found:
                per_dim.append((d, found))
    for k in range(max((len(found) for _, found in per_dim), default=0)):
        yield tuple((d, found[min(k, len(found) - 1)]) for d, found in per_dim)


def _ratios(call: Call, subset: tuple[int, ...], d: int, runner: OpRunner) -> Iterator[Ratios]:
    """Ratios that fit the sizes of several operands; of a single one what its growth says."""

    def spread(ratios: list[int]) -> Ratios:
        table = dict(zip(subset, ratios))
        return tuple(table.get(k, 0) for k in range(len(call.operands)))

    sizes = [call.operands[k].shape[d] for k in subset]
    if len(subset) > 1:
        low = min(sizes)
        # An operand is longer than its ratio says by the extent of a kernel, or shorter by what pads it.
        guesses = [[max(1, s // low + more) for s in sizes] for more in (0, -1)]
        guesses += [[-(-s // low) for s in sizes], [1] * len(subset)]
        yield from dict.fromkeys(spread(g) for g in guesses if max(g) <= MAX_RATIO)
        return
    grown = _shape_growth(call, d, spread([1]), LONG, runner)
    steps = {g for of_result in grown or [] for g in of_result.values()}
    if steps and min(steps) > 0:
        ratio = lcm(*(LONG // gcd(LONG, g) for g in steps))
        if ratio <= MAX_RATIO:
            yield spread([ratio])


def _resized(call: Call, sizes: dict[Dim, int]) -> Call:
    return call.with_operands(
        tuple(
            TensorMeta(tuple(sizes.get((k, d), size) for d, size in enumerate(m.shape)), m.dtype)
            for k, m in enumerate(call.operands)
        )
    )


def by_blocks(call: Call, d: int, ratios: Ratios, blocks: int) -> Call | None:
    """The call with so many blocks more (or fewer) in a dim; None where nothing would be left."""
    sizes = {(k, d): call.operands[k].shape[d] + ratio * blocks for k, ratio in enumerate(ratios) if ratio}
    return _resized(call, sizes) if min(sizes.values()) > 0 else None


@lru_cache(maxsize=1 << 12)
def metas_of(call: Call, runner: OpRunner) -> tuple[TensorMeta | None, ...] | None:
    try:
        return runner.meta(call)
    except OperatorError:
        return None


def _shape_growth(call: Call, d: int, ratios: Ratios, blocks: int, runner: OpRunner) -> list[dict[int, int]] | None:
    """Per result: dim -> elements that it grows by; None where the operator refuses, or ranks change."""
    longer = by_blocks(call, d, ratios, blocks)
    before, after = metas_of(call, runner), None if longer is None else metas_of(longer, runner)
    if before is None or after is None:
        return None
    found = []
    for a, b in zip(before, after):
        if (a is None) != (b is None) or (a is not None and b is not None and len(a.shape) != len(b.shape)):
            return None
        pairs = [] if a is None or b is None else list(zip(a.shape, b.shape))
        found.append({dim: y - x for dim, (x, y) in enumerate(pairs) if x != y})
    return found


def growth_of(call: Call, d: int, ratios: Ratios, runner: OpRunner) -> list[tuple[int, int] | None] | None:
    """Per result: (dim, elements of a block), or None for one that does not grow. None where they are not in
    proportion."""
    one, three = (_shape_growth(call, d, ratios, blocks, runner) for blocks in (1, 3))
    if one is None or three is None:
        return None
    found: list[tuple[int, int] | None] = []
    for a, b in zip(one, three):
        if len(a) > 1 or b != {dim: 3 * g for dim, g in a.items()} or any(g < 1 for g in a.values()):
            return None
        found.append(next(iter(a.items()), None))
    single = sum(1 for r in ratios if r) == 1
    return None if single and not any(found) else found


def _numbers(call: Call) -> list[int]:
    """Numbers in the arguments that may be the extent of an edge."""
    found = [v for _, v in leaves(call.args, call.kwargs) if isinstance(v, int) and not isinstance(v, bool)]
    return [v for v in found if v <= MAX_NUMBER]


def _stand_in(call: Call, dims: tuple[tuple[int, Ratios], ...], blocks: int, runner: OpRunner) -> Call | None:
    """The call with so many blocks in every dim: larger than it where the call itself has too few to tell."""
    small: Call | None = call
    for d, ratios in dims:
        have = min(call.operands[k].shape[d] // r for k, r in enumerate(ratios) if r)
        small = by_blocks(small, d, ratios, blocks - have) if small is not None else None
    metas = None if small is None else metas_of(small, runner)
    if small is None or metas is None:
        return None
    elements = sum(prod(m.shape) for m in (*small.operands, *metas) if m is not None)
    return small if elements <= MAX_ELEMENTS else None
