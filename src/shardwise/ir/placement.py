"""Placements: how one tensor lies on the axes of a device mesh.

    placement  :=  R                        every device of the axis holds the whole
                |  S<dim>[(outer,unit)]     dim is read as (outer, n, unit) and n is cut into chunks
                |  P<op>                    every device holds a summand (op: sum, max, min, prod)
    layout     :=  one placement per mesh axis

`Shard(dim, outer, unit)` is what keeps views exact: flattening [B, T] to [B*T] turns a cut of B into
Shard(0, unit=T) and a cut of T into Shard(0, outer=B); a fused projection [3*H*D] cut by heads is
Shard(0, outer=3, unit=D). Chunks follow the convention of `torch.chunk`: ceil(n / parts) each, the last ones
shorter or empty. Two axes that cut the same (outer, unit) of a dim nest in axis order; two that cut different
ones must be disjoint in the mixed-radix sense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

REDUCE_OPS = ("sum", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim `dim`, read as (outer, n, unit), is cut along n."""

    dim: int
    outer: int = 1
    unit: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.outer == self.unit == 1 else f"S{self.dim}({self.outer},{self.unit})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device holds a summand of the tensor; combining them with `op` gives the whole."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P{self.op}"


Placement = Replicate | Shard | Partial
Layout = tuple[Placement, ...]

R = Replicate()


def parse_placement(text: str) -> Placement:
    """The inverse of `str(placement)`. Raises ValueError on anything else."""
    if text == "R":
        return R
    if match := re.fullmatch(r"S(\d+)(?:\((\d+),(\d+)\))?", text):
        dim, outer, unit = match.groups()
        return Shard(int(dim), int(outer or 1), int(unit or 1))
    if text.startswith("P") and text[1:] in REDUCE_OPS:
        return Partial(text[1:])
    raise ValueError(f"not a placement: {text!r} (expected R, S<dim>, S<dim>(outer,unit) or P<{'|'.join(REDUCE_OPS)}>)")


def format_layout(layout: Layout) -> str:
    """`R`, `S0` on one axis; `[S0, R]` on several."""
    return str(layout[0]) if len(layout) == 1 else "[" + ", ".join(map(str, layout)) + "]"


def parse_layout(text: str) -> Layout:
    """The inverse of `format_layout`. Raises ValueError on anything else."""
    text = text.strip()
    if not text.startswith("["):
        return (parse_placement(text),)
    if not text.endswith("]"):
        raise ValueError(f"not a layout: {text!r} (a bracket is open; expected such as '[S0, R]')")
    inside = text[1:-1].strip()
    return tuple(parse_placement(p.strip()) for p in re.split(r",\s*(?![^(]*\))", inside)) if inside else ()


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range of chunk `index` of `parts`, by the convention of torch.chunk."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


@dataclass(frozen=True, slots=True)
class Cut:
    """One factor of a dim that is cut: dim = (.., n at stride `unit`, ..); this device holds [start, stop)."""

    outer: int
    n: int
    unit: int
    start: int
    stop: int


@lru_cache(maxsize=1 << 16)
def dim_cuts(size: int, cuts: tuple[tuple[Shard, int, int], ...]) -> tuple[Cut, ...] | None:
    """The cuts of one dim, outermost first; None where the factors overlap or do not divide `size`.

    `cuts` lists (placement, parts of the axis, coordinate on the axis) in axis order.
    """
    ranges: dict[tuple[int, int], tuple[int, int]] = {}
    for shard, parts, index in cuts:
        if size % (shard.outer * shard.unit):
            return None
        key = (shard.outer, shard.unit)
        start, stop = ranges.get(key, (0, size // (shard.outer * shard.unit)))
        low, high = chunk(stop - start, parts, index)
        ranges[key] = (start + low, start + high)
    result = tuple(
        Cut(outer, size // (outer * unit), unit, *span)
        for (outer, unit), span in sorted(ranges.items(), key=lambda item: (-item[0][1], item[0][0]))
    )
    for outside, inside in zip(result, result[1:]):
        if outside.unit % (inside.n * inside.unit):
            return None
    return result


def _by_dim(layout: Layout, mesh: tuple[int, ...], coords: tuple[int, ...]) -> dict[int, list[tuple[Shard, int, int]]]:
    found: dict[int, list[tuple[Shard, int, int]]] = {}
    for placement, parts, index in zip(layout, mesh, coords):
        if isinstance(placement, Shard):
            found.setdefault(placement.dim, []).append((placement, parts, index))
    return found


def is_valid(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` can lie so: dims exist, factors divide and do not overlap, one kind of Partial."""
    if len({p.op for p in layout if isinstance(p, Partial)}) > 1:
        return False
    for dim, cuts in _by_dim(layout, mesh, (0,) * len(mesh)).items():
        if dim >= len(shape) or dim_cuts(shape[dim], tuple(cuts)) is None:
            return False
    return True


def is_even(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> bool:
    """Whether all pieces of a valid layout have the same size."""
    parts: dict[tuple[int, int, int], int] = {}
    for placement, count in zip(layout, mesh):
        if isinstance(placement, Shard):
            key = (placement.dim, placement.outer, placement.unit)
            parts[key] = parts.get(key, 1) * count
    return all(shape[dim] // (outer * unit) % count == 0 for (dim, outer, unit), count in parts.items())


def local_cuts(
    shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...], coords: tuple[int, ...]
) -> dict[int, tuple[Cut, ...]]:
    """Dim -> its cuts on the device at `coords`. Asserts that the layout is valid."""
    found = {}
    for dim, cuts in _by_dim(layout, mesh, coords).items():
        pieces = dim_cuts(shape[dim], tuple(cuts))
        assert pieces is not None, f"invalid layout {format_layout(layout)} for shape {shape}"
        found[dim] = pieces
    return found


@lru_cache(maxsize=1 << 16)
def local_shape(
    shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...], coords: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of the piece that the device at `coords` holds."""
    sizes = list(shape)
    for dim, cuts in local_cuts(shape, layout, mesh, coords).items():
        for cut in cuts:
            sizes[dim] = sizes[dim] // cut.n * (cut.stop - cut.start) if cut.n else 0
    return tuple(sizes)


def local_factor(cuts: tuple[Cut, ...], size: int, outer: int, unit: int) -> tuple[int, int]:
    """(outer, unit) as they read on the local piece of a dim of global `size` whose cuts are `cuts`.

    A factor at global stride `unit` lies, locally, outside every cut with a smaller stride and inside the others.
    """
    for cut in cuts:
        length = cut.stop - cut.start
        if cut.unit < unit:
            unit = unit // cut.n * length
        elif cut.unit > unit:
            outer = outer // cut.n * length
    return outer, unit


def max_local_elements(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> int:
    """Elements of the largest piece (that of the device at the origin, by the chunk convention)."""
    count = 1
    for size in local_shape(shape, layout, mesh, (0,) * len(mesh)):
        count *= size
    return count
