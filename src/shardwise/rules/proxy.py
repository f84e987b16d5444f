"""Small stand-ins for the calls of a graph.

A rule does not depend on how large a dim is, only on which dims are equal, which are 1, and on the static arguments.
So every call is mapped to a small **proxy**: sizes up to `KEEP` stay, every other distinct size becomes a distinct
small number, in order of appearance, and integers in the arguments that are sizes follow. The printed proxy is the
key of the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from ..ir.graph import Arg, Literal, Path, leaves
from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta
from ..ir.text import format_arg
from .classes import find_piles
from .rule import DimRef, Rule

KEEP = 4
"""Sizes up to this are kept: kernel sizes, the 3 of a fused projection, broadcast ones."""
PROXY_SIZES = (5, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14, 17, 16, 19, 18, 21, 20, 23, 22, 25, 24)
MAX_PROXY_ELEMENTS = 1 << 20
MAX_BLOCKS = 16
"""Most blocks of one operand that keeps its ratio to others."""

_DTYPE_CLASS = {
    "float32": "float64", "bfloat16": "float64", "float16": "float64", "complex64": "complex128",
}  # fmt: skip


def dtype_class(dtype: str) -> str:
    """The dtype in which a call is discovered: floats in float64, complex in complex128, all others as they are."""
    return _DTYPE_CLASS.get(dtype, dtype)


def format_call(call: Call) -> str:
    """One line that says everything about a call; the key of its rule when the call is a proxy."""
    operands = ", ".join(f"{m.dtype}[{','.join(map(str, m.shape))}]" for m in call.operands)
    args = [format_arg(a) for a in call.args] + [f"{k}={format_arg(a)}" for k, a in call.kwargs]
    return f"{call.op}({', '.join(args)}) on {operands}"


def _size_map(call: Call, runner: OpRunner, sizes: tuple[int, ...]) -> dict[int, int]:
    """Actual size -> proxy size, by order of appearance. Sizes that are piled up keep their ratios."""
    table: dict[int, int] = {}
    fresh = iter(sizes)
    for pile in find_piles(call, runner):
        lengths = [call.operands[o].shape[d] for o, d in pile]
        unit = gcd(*lengths)
        if unit > 1 and max(lengths) // unit <= MAX_BLOCKS:
            small = next(fresh)
            table.update((length, length // unit * small) for length in lengths)
    for meta in call.operands:
        for size in meta.shape:
            if size > KEEP and size not in table:
                table[size] = next((s for s in fresh if s not in table.values()), size)
    return table


def _map_int(value: int, table: dict[int, int], call: Call, sizes: tuple[int, ...]) -> int:
    """The proxy of an integer size: of the size it equals, or of the run of dims whose product it is; any other is
    larger than the proxies of smaller sizes, since a slice has to lie in what it was cut from."""
    if value in table or value <= KEEP:
        return table.get(value, value)
    for meta in call.operands:
        for start in range(len(meta.shape)):
            actual = proxy = 1
            for size in meta.shape[start:]:
                actual, proxy = actual * size, proxy * table.get(size, size)
                if actual == value:
                    return proxy
    above = max((small for size, small in table.items() if size < value), default=0)
    fresh = [s for s in sizes if s not in table.values() and s > above]
    if fresh and value < 1 << 40:
        table[value] = fresh[0]
        return fresh[0]
    return value


def in_class(leaf: Arg) -> Arg:
    """A constant of the arguments in the dtype in which rules are found."""
    if isinstance(leaf, Literal) and leaf.kind == "dtype":
        return Literal("dtype", dtype_class(leaf.text))
    return leaf


def _elements(call: Call) -> int:
    total = 0
    for meta in call.operands:
        count = 1
        for size in meta.shape:
            count *= size
        total += count
    return total


def proxy_of(call: Call, runner: OpRunner, sizes: tuple[int, ...] = PROXY_SIZES) -> Call | None:
    """The small stand-in of a call that the operator accepts; None where not even the call itself is small enough."""
    return next(stand_ins(call, runner, sizes), None)


def stand_ins(call: Call, runner: OpRunner, sizes: tuple[int, ...] = PROXY_SIZES) -> Iterator[Call]:
    """Stand-ins whose shapes the operator accepts, best first: small ones, the call's own sizes (one size may have to
    be twice another), and both in the call's own dtype (a kernel may know no float64). `sizes` is what small ones have.
    """
    size_paths = set(runner.size_leaves(call))
    seen: set[str] = set()
    results = _results(call, runner)
    for own_dtype in (False, True):
        new: dict[Path, Arg] = {
            p: leaf if own_dtype else in_class(leaf) for p, leaf in leaves(call.args, call.kwargs)
        }
        metas = tuple(TensorMeta(m.shape, m.dtype if own_dtype else dtype_class(m.dtype)) for m in call.operands)
        for keep in (False, True):
            table = _size_map(call, runner, sizes)
            ints = dict(new)
            for path in sorted(size_paths, key=str):
                value = new.get(path)
                if isinstance(value, int) and not isinstance(value, bool) and not keep:
                    ints[path] = _map_int(value, table, call, sizes)
            small = tuple(replace(m, shape=tuple(table.get(s, s) for s in m.shape)) for m in metas)
            yield from _fresh(call.with_leaves(ints).with_operands(small), runner, seen, results)
        plain = call.with_leaves(new).with_operands(metas)
        if _elements(plain) <= MAX_PROXY_ELEMENTS:
            yield from _fresh(plain, runner, seen, results)


def _results(call: Call, runner: OpRunner) -> int | None:
    """How many results a call has; None where the operator refuses it. A size may be their number."""
    try:
        return len(runner.meta(call))
    except OperatorError:
        return None


def _fresh(candidate: Call, runner: OpRunner, seen: set[str], results: int | None) -> Iterator[Call]:
    key = format_call(candidate)
    if key not in seen and _accepts(candidate, runner) and results in (None, _results(candidate, runner)):
        seen.add(key)
        yield candidate


def _accepts(call: Call, runner: OpRunner) -> bool:
    try:
        results = runner.meta(call)
    except OperatorError:
        return False
    total = _elements(call)
    for meta in results:
        if meta is not None:
            count = 1
            for size in meta.shape:
                count *= size
            total += count
    return total <= MAX_PROXY_ELEMENTS


def fit_blocks(rule: Rule, call: Call, runner: OpRunner) -> Rule:
    """A proxy's rule with the (outer, unit) of its results in the sizes of the call: a unit of 7 may be a dim's size.

    Of both at most one is not 1 in a rule that was found by execution, and the size of the dim gives it.
    """
    try:
        results = runner.meta(call)
    except OperatorError:
        return rule
    table = dict(leaves(call.args, call.kwargs))
    factors = []
    for factor in rule.factors:
        sizes = [m.shape[r.dim] // r.outer for m, r in zip(call.operands, factor.operands) if isinstance(r, DimRef)]
        sizes += [v for p in factor.ints if isinstance(v := table[p], int)]
        n = min(sizes, default=0)
        roles = []
        for role, meta in zip(factor.results, results):
            if isinstance(role, DimRef) and meta is not None and n:
                block = meta.shape[role.dim] // n
                role = replace(role, outer=1 if role.outer == 1 else block, unit=1 if role.unit == 1 else block)
            roles.append(role)
        factors.append(replace(factor, results=tuple(roles)))
    return replace(rule, factors=tuple(factors))
