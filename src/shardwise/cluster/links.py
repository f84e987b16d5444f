"""Levels of a network, and the link that the groups of each mesh axis use.

A cluster's ranks are numbered row-major through its levels: rank = position in level 0
+ size of level 0 x (position in level 1 + ...). A mesh numbers the same ranks row-major, last axis innermost.

What an axis gets, for its worst group:
- it *crosses* a level if two of its members differ there but agree in everything further out;
- a ring through all members enters and leaves every unit below that level once for each member in it (the
  multi-ring construction of NCCL), so it drives as many shares of the level as it has members in one unit;
- its bandwidth is the least over the crossed levels of share x members, its latency the largest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ..errors import InputError

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Fits = Mapping[str, tuple[float, float]]
"""Collective kind -> (alpha_s, beta_s_per_byte); the bytes are those that one rank puts on the wire."""


@dataclass(frozen=True)
class Level:
    """One level of the network.

    `size` units of the level below are joined by it. `alpha_s` is the latency of one message. `bytes_per_s` is
    what one rank sends through this level, in one direction, while all its ranks send: a node's network cards
    divided by its ranks. `fits` are measured on groups that span exactly this level.
    """

    name: str
    size: int
    alpha_s: float
    bytes_per_s: float
    fits: Fits | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _check(self.size >= 1 and int(self.size) == self.size, f"level {self.name!r}", "size", self.size)
        for key in ("alpha_s", "bytes_per_s"):
            _check(_positive(getattr(self, key)), f"level {self.name!r}", key, getattr(self, key))
        for kind in self.fits or ():
            if kind not in COLLECTIVES:
                raise InputError(f"level {self.name!r}: no collective {kind!r}; known are {', '.join(COLLECTIVES)}")

    def scaled(self, link_factor: float) -> Level:
        """The same level, `link_factor` times faster in latency and in bandwidth."""
        fits = self.fits and {kind: (a / link_factor, b / link_factor) for kind, (a, b) in self.fits.items()}
        return Level(self.name, self.size, self.alpha_s / link_factor, self.bytes_per_s * link_factor, fits)


@dataclass(frozen=True)
class AxisLink:
    """What each group of one mesh axis communicates over, while all groups of that axis do.

    `alpha_s` per message, `bytes_per_s` per rank and direction, `fits` as in `Level` (for groups of `size`).
    `shared_buffers`: what is sent is not waited for, so small all-reduces share a buffer and its latency.
    """

    size: int
    alpha_s: float
    bytes_per_s: float
    fits: Fits | None = field(default=None, hash=False)
    shared_buffers: bool = False


def world_size(levels: tuple[Level, ...]) -> int:
    """The number of ranks."""
    return math.prod(level.size for level in levels)


def axis_links(levels: tuple[Level, ...], shape: tuple[int, ...]) -> tuple[AxisLink, ...]:
    """The link of every axis of a mesh of this shape; raises InputError when the mesh does not fill the world."""
    world = world_size(levels)
    shape = tuple(shape)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise InputError(f"mesh shape {shape}: every axis needs a whole size of at least 1")
    if math.prod(shape) != world:
        options = ", ".join(str(s) for s in mesh_shapes(world, len(shape) or 1)[:6])
        raise InputError(
            f"mesh shape {shape} has {math.prod(shape)} ranks, the cluster has {world}; shapes that fit: {options}"
        )
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return tuple(_axis_link(levels, size, stride) for size, stride in zip(shape, strides, strict=True))


def mesh_shapes(world: int, max_dims: int = 3) -> tuple[tuple[int, ...], ...]:
    """Every ordered factorisation of `world` into at most `max_dims` axes of at least 2; fewest axes first."""
    if world < 1 or max_dims < 1:
        raise InputError(f"mesh_shapes(world={world}, max_dims={max_dims}): both must be at least 1")
    if world == 1:
        return ((1,),)
    return tuple(shape for dims in range(1, max_dims + 1) for shape in _factorisations(world, dims))


def _factorisations(world: int, dims: int) -> Iterator[tuple[int, ...]]:
    if dims == 1:
        yield (world,)
        return
    for first in range(world // 2, 1, -1):
        if world % first == 0:
            yield from ((first, *rest) for rest in _factorisations(world // first, dims - 1))


def _axis_link(levels: tuple[Level, ...], size: int, stride: int) -> AxisLink:
    """The link of the groups {offset + i * stride}, i < size."""
    if size == 1:
        return AxisLink(1, levels[0].alpha_s, levels[0].bytes_per_s)
    sizes = tuple(level.size for level in levels)
    crossings = _crossings(sizes, size, stride)
    crossed = sorted({level for group in crossings for level, _ in group})
    alpha_s = max(levels[level].alpha_s for level in crossed)
    bytes_per_s = min(levels[level].bytes_per_s * members for group in crossings for level, members in group)
    fits = None
    if len(crossed) == 1:  # fits of one level say nothing of groups that also cross another
        level = levels[crossed[0]]
        # Rings and pairwise exchanges take a number of messages proportional to size - 1.
        steps = (size - 1) / (level.size - 1)
        fits = level.fits and {kind: (a * steps, b) for kind, (a, b) in level.fits.items()}
    return AxisLink(size, alpha_s, bytes_per_s, fits)


@lru_cache(maxsize=4096)
def _crossings(sizes: tuple[int, ...], size: int, stride: int) -> frozenset[tuple[tuple[int, int], ...]]:
    """For each kind of group of the axis: (level crossed, least members in one unit below that level)."""
    blocks = [math.prod(sizes[:level]) for level in range(len(sizes) + 1)]
    world = blocks[-1]
    kinds = set()
    for outer in range(0, world, size * stride):
        for offset in range(outer, outer + stride):
            group = range(offset, offset + size * stride, stride)
            units = [Counter(rank // block for rank in group) for block in blocks]
            kinds.add(
                tuple(
                    (level, min(units[level].values()))
                    for level in range(len(sizes))
                    if len(units[level]) > len(units[level + 1])
                )
            )
    return frozenset(kinds)


def _positive(value: float) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _check(good: bool, where: str, key: str, value: object) -> None:
    if not good:
        raise InputError(f"{where}: {key} must be a positive number, got {value!r}")
