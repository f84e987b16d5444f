"""Rules of views, derived exactly: the strides of a result over its contiguous operand say which element it reads.

Every dim of a result walks over the operand in steps of its stride, so it is a product of runs of operand dims in the
mixed-radix sense. Each such run is a factor, with its place (outer, unit) on both sides; a slice keeps the factor
that its start and length are multiples of. No operator is named: whatever returns a view is read this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import gcd, prod

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
    starts = [view.offset // strides[d] % shape[d] for d in range(len(shape))]
    return [a for a in atoms if _alone(a, taken[a[0].dim], starts[a[0].dim])]


def _alone(atom: Atom, runs: list[tuple[int, int]], start: int) -> bool:
    """Whether no other run of the same operand dim changes the index along this factor: those outside of it step over
    it whole, those inside stay within one of its units."""
    source, _, length = atom
    within = start % source.unit
    for unit, count in runs:
        if unit < source.unit:
            within += unit * (count - 1)
        elif unit > source.unit and unit % (source.unit * length):
            return False
    return within < source.unit


def _runs(shape: tuple[int, ...], strides: list[int], size: int, stride: int) -> list[tuple[int, int, int]] | None:
    """The runs (operand dim, unit, length), innermost first, that a result dim of this size and stride walks."""
    runs = []
    while size > 1:
        source = next((d for d in range(len(shape)) if shape[d] > 1 and strides[d] <= stride), None)
        if source is None or stride % strides[source]:
            return None
        unit = stride // strides[source]
        room = shape[source] // unit
        if unit >= shape[source] or (shape[source] % unit and size > room):
            return None  # it steps past the operand's end, or over a rest of the dim
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


def _with_ints(
    call: Call, runner: OpRunner, base: int, source: DimRef | None, targets: tuple[DimRef, ...], length: int
) -> list[Factor]:
    """The factor with the integers that must become local, found by asking for the local call's own strides."""
    operands: list[DimRef | None] = [None] * len(call.operands)
    operands[base] = source
    less = length - 1
    shapes = [list(m.shape) for m in call.operands]
    if source is not None:
        shapes[base][source.dim] = shapes[base][source.dim] // length * less
    table = dict(leaves(call.args, call.kwargs))
    sizes = {
        p: v
        for p in runner.size_leaves(call)
        if isinstance(v := table.get(p), int) and not isinstance(v, bool) and v > 0 and v % length == 0 and v < 1 << 40
    }
    local = call.with_operands(tuple(TensorMeta(tuple(s), m.dtype) for s, m in zip(shapes, call.operands)))
    before = runner.views(call) or ()
    wanted = []
    for view, target in zip(before, targets):
        size = view.shape[target.dim] // length * less
        wanted.append((*view.shape[: target.dim], size, *view.shape[target.dim + 1 :]))
    for count in range(min(len(sizes), 6) + 1):
        for ints in combinations(sizes, count):
            if _local_fits(local, runner, ints, sizes, length, less, wanted, source, targets, before):
                empty = _accepts_empty(call, runner, base, source, {p: 0 for p in ints}, len(before))
                return [Factor(tuple(operands), targets, ints, empty=empty)]
    return []


def _accepts_empty(
    call: Call, runner: OpRunner, base: int, source: DimRef | None, ints: dict[Path, Arg], count: int
) -> bool:
    """Whether the views of nothing have a shape, and are as many: a size left to be inferred has none."""
    shapes = [list(m.shape) for m in call.operands]
    if source is not None:
        shapes[base][source.dim] = 0
    local = call.with_operands(tuple(TensorMeta(tuple(s), m.dtype) for s, m in zip(shapes, call.operands)))
    try:
        views = runner.views(local.with_leaves(ints))
    except OperatorError:
        return False
    return views is not None and len(views) == count


def _local_fits(
    local: Call,
    runner: OpRunner,
    ints: tuple[Path, ...],
    sizes: dict[Path, int],
    length: int,
    less: int,
    wanted: list[tuple[int, ...]],
    source: DimRef | None,
    targets: tuple[DimRef, ...],
    before: Sequence[ViewOf],
) -> bool:
    changed = local.with_leaves({p: sizes[p] // length * less for p in ints})
    try:
        views = runner.views(changed)
    except OperatorError:
        return False
    if views is None or [v.shape for v in views] != wanted:
        return False
    if source is None:
        return True
    own = changed.operands[before[0].operand].shape
    whole = (*own[: source.dim], own[source.dim] // less * length, *own[source.dim + 1 :])
    for old, new, target in zip(before, views, targets):
        if not _reads_its_piece(whole, old, own, new, source, target, length):
            return False
    for view, target in zip(views, targets):
        atoms = view_atoms(changed.operands[view.operand].shape, view)
        if less > 1 and not any((s, t) == (source, target) for s, t, _ in atoms or []):
            return _refined(atoms or [], source, target, less)
    return True


def _reads_its_piece(
    shape: tuple[int, ...],
    old: ViewOf,
    own: tuple[int, ...],
    new: ViewOf,
    source: DimRef,
    target: DimRef,
    length: int,
) -> bool:
    """Whether the view `new` of all but the last index of a factor reads what `old` reads of the whole there.

    Both are affine in the result's index, so its corners and the first steps along its dims tell.
    """
    if 0 in new.shape:
        return True
    corner = tuple(n - 1 for n in new.shape)
    points = {(0,) * len(new.shape), corner}
    for dim, n in enumerate(new.shape):
        points |= {tuple(k if d == dim else 0 for d in range(len(new.shape))) for k in (min(1, n - 1), n - 1)}
    less = length - 1
    for point in points:
        outer, rest = divmod(point[target.dim], target.unit * less)
        there = (*point[: target.dim], outer * target.unit * length + rest, *point[target.dim + 1 :])
        place = old.offset + sum(k * s for k, s in zip(there, old.stride))
        index = []
        for n in reversed(shape):
            place, k = divmod(place, n)
            index.append(k)
        index.reverse()
        outer, rest = divmod(index[source.dim], source.unit * length)
        if place or rest >= source.unit * less:
            return False
        index[source.dim] = outer * source.unit * less + rest
        expected = 0
        for k, n in zip(index, own):
            expected = expected * n + k
        if expected != new.offset + sum(k * s for k, s in zip(point, new.stride)):
            return False
    return True


def _refined(atoms: list[Atom], source: DimRef, target: DimRef, less: int) -> bool:
    """A slice's common factor may come out larger on the local shape: accept a factor that contains ours."""
    return any(
        s.dim == source.dim and t.dim == target.dim and source.unit % s.unit == 0 and n % less == 0 for s, t, n in atoms
    )
