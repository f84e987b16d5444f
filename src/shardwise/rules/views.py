"""Rules of views, derived exactly: the strides of a result over its contiguous operand say which element it reads.

Every dim of a result walks over the operand in steps of its stride, so it is a product of runs of operand dims in the
mixed-radix sense. Each such run is a factor, with its place (outer, unit) on both sides; a slice keeps the factor
that its start and length are multiples of. No operator is named: whatever returns a view is read this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import gcd, prod

import numpy as np

from ..ir.graph import Arg, Path, leaves
from ..ir.runner import Call, OperatorError, OpRunner, TensorMeta, ViewOf
from .rule import DimRef, Factor, Rule

Atom = tuple[DimRef, DimRef, int]
"""(place in the operand, place in the result, length)"""


def view_rule(call: Call, runner: OpRunner) -> Rule | None:
    """The rule of a call whose results all are views of one operand; None where they are not."""
    views = runner.views(call)
    if not views or len({v.operand for v in views}) != 1:
        return None
    base = views[0].operand
    shape = call.operands[base].shape
    linear = ((base,),) if call.operands[base].dtype.startswith(("float", "bfloat", "complex")) else ()
    tables = [view_atoms(shape, v) for v in views]
    if any(t is None for t in tables):
        return Rule((), linear, moves_data=True, found_on="view")
    found: list[Factor] = []
    for first in tables[0] or []:
        common = _common([first, *(_match(first, table or []) for table in tables[1:])])
        if common is not None:
            source, targets, length = common
            found += _with_ints(call, runner, base, source, targets, length)
    if len(views) == 1:
        for dim, (size, stride) in enumerate(zip(views[0].shape, views[0].stride)):
            if stride == 0 and size > 1:
                found += _with_ints(call, runner, base, None, (DimRef(dim),), size)
    return Rule(tuple(found), linear, moves_data=True, found_on="view")


def _match(first: Atom, table: list[Atom]) -> Atom | None:
    """The factor of another result that lies in the same dim at the same unit."""
    source = first[0]
    return next((a for a in table if a[0].dim == source.dim and a[0].unit == source.unit), None)


def _common(atoms: list[Atom | None]) -> tuple[DimRef, tuple[DimRef, ...], int] | None:
    """The largest factor that all results share: (place in the operand, places in the results, length).

    Slices of different sizes have blocks of different lengths; their common divisor cuts each.
    """
    known = [a for a in atoms if a is not None]
    length = gcd(*(n for _, _, n in known))
    if len(known) < len(atoms) or length <= 1:
        return None

    def refined(ref: DimRef, n: int) -> DimRef:
        return DimRef(ref.dim, ref.outer * (n // length), ref.unit)

    sources = {refined(source, n) for source, _, n in known}
    if len(sources) > 1:
        return None
    return sources.pop(), tuple(refined(target, n) for _, target, n in known), length


def view_atoms(shape: tuple[int, ...], view: ViewOf) -> list[Atom] | None:
    """The factors that a view carries from its operand (laid out contiguously, of this shape) to its result.

    None where the result is no product of runs of operand dims (overlapping windows, diagonals).
    """
    if 0 in shape or 0 in view.shape:
        return []
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    atoms: list[Atom] = []
    taken: dict[int, list[tuple[int, int]]] = {}
    for dim in range(len(view.shape)):
        size, stride = view.shape[dim], view.stride[dim]
        if size == 1 or stride == 0:
            continue
        runs = _runs(shape, strides, size, stride)
        if runs is None:
            return None
        inner = 1
        for source, unit, length in runs:
            if any(u < unit * length and unit < u * n for u, n in taken.get(source, ())):
                return None
            taken.setdefault(source, []).append((unit, length))
            atoms += _atom(shape, strides, view, source, unit, length, dim, size, inner)
            inner *= length
    return atoms


def _runs(shape: tuple[int, ...], strides: list[int], size: int, stride: int) -> list[tuple[int, int, int]] | None:
    """The runs (operand dim, unit, length), innermost first, that a result dim of this size and stride walks."""
    runs = []
    while size > 1:
        source = next((d for d in range(len(shape)) if shape[d] > 1 and strides[d] <= stride), None)
        if source is None or stride % strides[source]:
            return None
        unit = stride // strides[source]
        if unit >= shape[source]:
            return None  # it leaves the operand
        room = shape[source] // unit
        if shape[source] % unit and size > room:
            return None
        if size <= room:
            runs.append((source, unit, size))
            return runs
        if size % room:
            return None
        runs.append((source, unit, room))
        size //= room
        stride = strides[source] * shape[source]
    return runs


def _atom(
    shape: tuple[int, ...],
    strides: list[int],
    view: ViewOf,
    source: int,
    unit: int,
    length: int,
    dim: int,
    size: int,
    inner: int,
) -> list[Atom]:
    """The factor of one run; of a slice, the part that start and length are multiples of."""
    total = shape[source]
    start = view.offset // strides[source] % total
    if total % unit:
        return []
    if total == unit * length * (total // (unit * length)) and _covers_all(shape, view, source, unit, length):
        outer = total // (unit * length)
        return [(DimRef(source, outer, unit), DimRef(dim, size // (inner * length), inner), length)]
    if start % unit and unit > 1:
        return []
    part = gcd(gcd(start // unit, length), total // unit)
    if part <= 1:
        return []
    return [
        (DimRef(source, total // (unit * part), unit), DimRef(dim, size // (inner * part), inner), part),
    ]


def _covers_all(shape: tuple[int, ...], view: ViewOf, source: int, unit: int, length: int) -> bool:
    """Whether the run is a whole factor of its dim rather than a slice: it starts at a multiple of its extent and
    either fills the dim or is continued by another run of the same dim (checked by the caller's radix)."""
    total = shape[source]
    stride = prod(shape[source + 1 :])
    if unit * length == total:
        return True
    extent = unit * length
    start = view.offset // stride % total
    walks = [
        (s // stride, n)
        for n, s in zip(view.shape, view.stride)
        if n > 1 and s and s >= stride * extent and s < stride * total
    ]
    return start % extent == 0 and bool(walks)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A factor of length n that is to be cut in a call of views."""

    call: Call
    base: int
    source: DimRef | None
    targets: tuple[DimRef, ...]
    n: int
    views: tuple[ViewOf, ...]
    """Of the whole call."""

    def local(self, length: int) -> Call:
        """The call on an operand that holds so much of the factor, its integers as they were."""
        shapes = [list(m.shape) for m in self.call.operands]
        if self.source is not None:
            shapes[self.base][self.source.dim] = shapes[self.base][self.source.dim] // self.n * length
        metas = (TensorMeta(tuple(s), m.dtype) for s, m in zip(shapes, self.call.operands))
        return self.call.with_operands(tuple(metas))


def _with_ints(
    call: Call, runner: OpRunner, base: int, source: DimRef | None, targets: tuple[DimRef, ...], length: int
) -> list[Factor]:
    """The factor with the integers that must become local, found by asking for the local call's own strides."""
    operands: list[DimRef | None] = [None] * len(call.operands)
    operands[base] = source
    table = dict(leaves(call.args, call.kwargs))
    sizes = {
        p: v
        for p in runner.size_leaves(call)
        if isinstance(v := table.get(p), int) and not isinstance(v, bool) and v > 0 and v % length == 0 and v < 1 << 40
    }
    cut = _Cut(call, base, source, targets, length, runner.views(call) or ())
    for count in range(min(len(sizes), 6) + 1):
        for ints in combinations(sizes, count):
            if _local_fits(cut, runner, {p: sizes[p] for p in ints}):
                empty = _local_views(cut, runner, {p: sizes[p] for p in ints}, 0) is not None
                return [Factor(tuple(operands), targets, ints, empty=empty)]
    return []


def _local_views(
    cut: _Cut, runner: OpRunner, sizes: dict[Path, int], length: int
) -> tuple[Call, tuple[ViewOf, ...]] | None:
    """The call on so much of the factor and its views; None where it is refused, as where a size is to be inferred
    from nothing, or gives fewer views, as a split of nothing does."""
    new: dict[Path, Arg] = {p: v // cut.n * length for p, v in sizes.items()}
    changed = cut.local(length).with_leaves(new)
    try:
        views = runner.views(changed)
    except OperatorError:
        return None
    return None if views is None or len(views) != len(cut.views) else (changed, views)


def _local_fits(cut: _Cut, runner: OpRunner, sizes: dict[Path, int]) -> bool:
    """Whether the local call on the first and on the last part of the factor reads what the whole reads there."""
    for length in dict.fromkeys((cut.n - 1, 1)):
        found = _local_views(cut, runner, sizes, length)
        if found is None:
            return False
        shape = found[0].operands[cut.base].shape
        for whole, local, target in zip(cut.views, found[1], cut.targets):
            for low in dict.fromkeys((0, cut.n - length)):
                if not _reads_the_same(cut, whole, local, target, shape, low, length):
                    return False
    return True


SAMPLES = 64
"""Elements of a view that are looked at, beside its corners: strides are linear but for carries between dims."""


def _reads_the_same(
    cut: _Cut, whole: ViewOf, local: ViewOf, target: DimRef, shape: tuple[int, ...], low: int, length: int
) -> bool:
    """Whether a view of a piece, [low, low + length) of the factor, has the elements of the piece of the view."""
    size = whole.shape[target.dim] // cut.n * length
    wanted = (*whole.shape[: target.dim], size, *whole.shape[target.dim + 1 :])
    if local.shape != wanted or local.operand != cut.base:
        return False
    if 0 in wanted:
        return True
    index = _sampled(wanted)
    grown = list(index)
    grown[target.dim] = _shifted(index[target.dim], target.unit, length, cut.n, low)
    at = whole.offset + sum(i * s for i, s in zip(grown, whole.stride))
    here = local.offset + sum(i * s for i, s in zip(index, local.stride))
    if cut.source is None:
        return bool(np.array_equal(at, here))
    if (np.asarray(here) >= prod(shape)).any():
        return False
    places = list(np.unravel_index(here, shape))
    places[cut.source.dim] = _shifted(places[cut.source.dim], cut.source.unit, length, cut.n, low)
    return bool(np.array_equal(at, np.ravel_multi_index(places, cut.call.operands[cut.base].shape)))


def _sampled(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Indices of some elements: all corners of few dims, and some drawn at random."""
    rng = np.random.default_rng(5)
    corners = np.array(np.meshgrid(*[[0, n - 1] for n in shape[:8]], indexing="ij")).reshape(min(len(shape), 8), -1)
    found = []
    for d, n in enumerate(shape):
        corner = corners[d] if d < 8 else np.zeros(corners.shape[1], int)
        found.append(np.concatenate([corner, rng.integers(0, n, SAMPLES)]))
    return found


def _shifted(index: np.ndarray, unit: int, length: int, n: int, low: int) -> np.ndarray:
    """Places in a dim read as (outer, length, unit) -> places in the dim that holds n of the factor."""
    outer, rest = np.divmod(index, length * unit)
    return outer * (n * unit) + low * unit + rest
