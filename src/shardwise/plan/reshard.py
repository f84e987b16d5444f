"""From one layout to another: the cheapest sequence of collectives, one mesh axis at a time.

    S -> R  all_gather       P -> R  all_reduce       P -> S  reduce_scatter
    S -> S  all_to_all       R -> S  slice (local)    R -> P  keep on the first device, zeros elsewhere (local)

A cut that nests inside another cut of the same factor (a later axis) has to be undone first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from ..cluster.links import AxisLink
from ..cost.collectives import collective_s
from ..ir.placement import Layout, Partial, Placement, R, Shard, is_valid, max_local_elements

LOCAL_S = 1e-9
"""A local move is almost free; the tie-break keeps paths short."""


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a path: what happens on one axis."""

    kind: str
    """all_gather | all_reduce | reduce_scatter | all_to_all | slice | zero"""
    axis: int
    source: Layout
    target: Layout
    seconds: float


@dataclass(frozen=True)
class Resharding:
    """Costs and paths on one mesh."""

    mesh: tuple[int, ...]
    links: tuple[AxisLink, ...]

    def leaving(self) -> Resharding:
        """The same for values that nothing in the program waits for: their small all-reduces share buffers."""
        return Resharding(self.mesh, tuple(replace(link, shared_buffers=True) for link in self.links))

    def seconds(self, shape: tuple[int, ...], item_bytes: int, source: Layout, target: Layout) -> float:
        """Time of the cheapest path; infinite where there is none."""
        if source == target:
            return 0.0
        return _path(self.mesh, self.links, shape, item_bytes, source, target)[0]

    def table(
        self, shape: tuple[int, ...], item_bytes: int, sources: tuple[Layout, ...], targets: tuple[Layout, ...]
    ) -> np.ndarray:
        """`seconds` of every source (row) and target (column) at once."""
        return _table(self.mesh, self.links, shape, item_bytes, sources, targets)

    def path(self, shape: tuple[int, ...], item_bytes: int, source: Layout, target: Layout) -> tuple[Move, ...]:
        """The moves of the cheapest path. Asserts that there is one."""
        if source == target:
            return ()
        cost, moves = _path(self.mesh, self.links, shape, item_bytes, source, target)
        assert cost < float("inf"), f"no path from {source} to {target} for shape {shape}"
        return moves


def _nested_later(layout: Layout, axis: int, shard: Shard) -> bool:
    """Whether a later axis cuts the same factor again."""
    return any(
        isinstance(p, Shard) and (p.dim, p.outer, p.unit) == (shard.dim, shard.outer, shard.unit)
        for p in layout[axis + 1 :]
    )


def _kind(source: Placement, target: Placement) -> str | None:
    if isinstance(source, Shard):
        return "all_gather" if target == R else "all_to_all" if isinstance(target, Shard) else None
    if isinstance(source, Partial):
        if target == R:
            return "all_reduce"
        return "reduce_scatter" if isinstance(target, Shard) and source.op in ("sum", "max", "min") else None
    if isinstance(target, Shard):
        return "slice"
    return "zero" if isinstance(target, Partial) and target.op == "sum" else None


def _moves(
    layout: Layout, goal: Layout, mesh: tuple[int, ...], links: tuple[AxisLink, ...], shape: tuple[int, ...], item: int
):
    for axis, here in enumerate(layout):
        for there in dict.fromkeys((R, goal[axis])):  # in this order on every rank
            if there == here:
                continue
            kind = _kind(here, there)
            if kind is None:
                continue
            if isinstance(here, Shard) and _nested_later(layout, axis, here):
                continue
            after = (*layout[:axis], there, *layout[axis + 1 :])
            if isinstance(there, Shard) and _nested_later(layout, axis, there):
                continue
            if not is_valid(shape, after, mesh):
                continue
            yield Move(kind, axis, layout, after, _move_s(kind, axis, layout, mesh, links, shape, item))


def _move_s(
    kind: str,
    axis: int,
    layout: Layout,
    mesh: tuple[int, ...],
    links: tuple[AxisLink, ...],
    shape: tuple[int, ...],
    item: int,
) -> float:
    if kind in ("slice", "zero"):
        return LOCAL_S
    whole = (*layout[:axis], R, *layout[axis + 1 :])
    nbytes = max_local_elements(shape, whole, mesh) * item
    return collective_s(kind, nbytes, links[axis]) + LOCAL_S


@lru_cache(maxsize=1 << 18)
def _path(
    mesh: tuple[int, ...],
    links: tuple[AxisLink, ...],
    shape: tuple[int, ...],
    item: int,
    source: Layout,
    target: Layout,
) -> tuple[float, tuple[Move, ...]]:
    """Dijkstra over the layouts whose axes hold their source, their target or Replicate."""
    best = {source: 0.0}
    queue: list[tuple[float, int, Layout, tuple[Move, ...]]] = [(0.0, 0, source, ())]
    count = 0
    while queue:
        cost, _, layout, moves = heapq.heappop(queue)
        if layout == target:
            return cost, moves
        if cost > best[layout]:
            continue
        for move in _moves(layout, target, mesh, links, shape, item):
            total = cost + move.seconds
            if total < best.get(move.target, float("inf")):
                best[move.target] = total
                count += 1
                heapq.heappush(queue, (total, count, move.target, (*moves, move)))
    return float("inf"), ()


@lru_cache(maxsize=1 << 12)
def _table(
    mesh: tuple[int, ...],
    links: tuple[AxisLink, ...],
    shape: tuple[int, ...],
    item: int,
    sources: tuple[Layout, ...],
    targets: tuple[Layout, ...],
) -> np.ndarray:
    """What `_path` finds, for all pairs together.

    On every axis a path is at its source (0), at Replicate (1) or at its target (2): with n axes 3**n places, over
    which the distances of all pairs are relaxed at once. Moves away from the target come last, and start it over.
    """
    axes = range(len(mesh))
    known = tuple(sorted({p for layout in (*sources, *targets) for p in layout} - {R}, key=str))
    number = {p: k for k, p in enumerate((R, *known))}
    steps = _steps(mesh, links, shape, item, (R, *known))
    stride = [len(number) ** (len(mesh) - 1 - a) for a in axes]
    start = [np.array([number[s[a]] for s in sources])[:, None] for a in axes]
    goal = [np.array([number[t[a]] for t in targets])[None, :] for a in axes]

    def seconds(place: tuple[int, ...], axis: int, there: int) -> np.ndarray:
        rows = sum((start[a] * stride[a] for a in axes if place[a] == 0), np.zeros((1, 1), int)) * len(number)
        columns = sum((goal[a] * stride[a] for a in axes if place[a] == 2), np.zeros((1, 1), int)) * len(number)
        return steps[axis].take(rows + (columns + goal[axis] if there == 2 else columns))

    places = list(product(range(3), repeat=len(mesh)))
    ahead = [(p, a, there) for p in sorted(places, key=sum) for a in axes for there in range(p[a] + 1, 3) if there]
    back = [(p, a, 1) for p in places for a in axes if p[a] == 2]
    cost = {move: seconds(*move) for move in (*ahead, *back)}
    best = {p: np.full((len(sources), len(targets)), 0.0 if not any(p) else np.inf) for p in places}
    changed = True
    while changed:
        for place, axis, there in ahead:
            after = best[(*place[:axis], there, *place[axis + 1 :])]
            np.minimum(after, best[place] + cost[place, axis, there], out=after)
        changed = False
        for place, axis, there in back:
            after = best[(*place[:axis], there, *place[axis + 1 :])]
            reached = best[place] + cost[place, axis, there]
            if (reached < after).any():
                changed = True
                np.minimum(after, reached, out=after)
    found = best[(2,) * len(mesh)]
    found.setflags(write=False)
    return found


@lru_cache(maxsize=1 << 12)
def _steps(
    mesh: tuple[int, ...], links: tuple[AxisLink, ...], shape: tuple[int, ...], item: int, known: tuple[Placement, ...]
) -> list[np.ndarray]:
    """Per axis, the seconds of one move from a layout (numbered in the base of `known`) to a placement on that axis;
    zero to the one that is there."""
    layouts = list(product(known, repeat=len(mesh)))
    valid = [is_valid(shape, layout, mesh) for layout in layouts]
    elements = [max_local_elements(shape, x, mesh) if ok else 0 for x, ok in zip(layouts, valid)]
    steps = [np.full((len(layouts), len(known)), np.inf) for _ in mesh]
    for axis in range(len(mesh)):
        stride = len(known) ** (len(mesh) - 1 - axis)
        for code, layout in enumerate(layouts):
            here = layout[axis]
            steps[axis][code, known.index(here)] = 0.0
            if not valid[code] or (isinstance(here, Shard) and _nested_later(layout, axis, here)):
                continue
            whole = code - known.index(here) * stride
            for digit, there in enumerate(known):
                after = whole + digit * stride
                kind = None if there == here else _kind(here, there)
                if kind is None or not valid[after] or not _direct(layout, axis, there):
                    continue
                local = kind in ("slice", "zero")
                steps[axis][code, digit] = LOCAL_S + (
                    0.0 if local else collective_s(kind, elements[whole] * item, links[axis])
                )
    return steps


def _direct(layout: Layout, axis: int, there: Placement) -> bool:
    """Whether an axis may go to this placement: no later axis cuts that factor already."""
    return not isinstance(there, Shard) or not _nested_later(layout, axis, there)
