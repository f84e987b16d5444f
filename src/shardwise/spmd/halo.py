"""Operators whose pieces overlap: what a device needs of its neighbours is fetched, the rest of its results cropped.

Every device of an axis knows the windows of all (`rules/window.py`), so that who sends what to whom is part of the
program. A device of which nothing is wanted still sends what others need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.graph import Arg, Node, Ref, Value
from ..plan.options import Choice
from ..rules.rule import DimRef, Factor, Halo, Rule
from ..rules.window import Span, Window, needed_spans, overlap_of, owned_spans
from .state import Lowering


@dataclass(frozen=True, slots=True)
class OverlapCut:
    """A factor whose pieces overlap, on one mesh axis."""

    factor: Factor
    halo: Halo
    axis: int
    windows: tuple[Window | None, ...]
    """Of every device of the axis."""
    rank: int

    @property
    def window(self) -> Window | None:
        """The window of this device."""
        return self.windows[self.rank]


def overlaps(state: Lowering, node: Node, rule: Rule, choice: tuple[Choice, ...]) -> list[OverlapCut]:
    """The axes on which the pieces of a node overlap."""
    found = []
    for axis, (kind, index, _, _) in enumerate(choice):
        factor = rule.factors[index] if kind == "factor" else None
        if factor is None or factor.halo is None:
            continue
        shapes = [state.graph.values[n].shape for n in node.operands]
        overlap = overlap_of(factor, shapes, [None if v is None else v.shape for v in node.results])
        assert overlap is not None, f"{node.op}: nothing says which piece is whose"
        found.append(OverlapCut(factor, factor.halo, axis, overlap.windows(state.mesh[axis]), state.coords[axis]))
    return found


@dataclass(frozen=True, slots=True)
class _Reach:
    """What every device of an axis has of a dim of an operand, and what its window needs."""

    dim: int
    cut: OverlapCut
    owned: tuple[Span, ...]
    needed: tuple[Span, ...]

    @property
    def here(self) -> tuple[Span, Span]:
        """(owned, needed) of this device."""
        return self.owned[self.cut.rank], self.needed[self.cut.rank]


def extend(state: Lowering, node: Node, local: list[str], cuts: list[OverlapCut]) -> list[str]:
    """The operands in the windows of the cut axes. Appends exchanges even where this device needs nothing."""
    local = list(local)
    for cut in cuts:
        for k, role in enumerate(cut.factor.operands):
            if isinstance(role, DimRef):
                size = state.graph.values[node.operands[k]].shape[role.dim]
                owned = owned_spans(size, len(cut.windows))
                reach = _Reach(role.dim, cut, owned, needed_spans(size, cut.halo.operands[k], cut.windows))
                add = _with_zeros if k in cut.halo.zeros else _with_neighbours
                local[k] = add(state, node, local[k], reach)
    return local


def _resized(state: Lowering, name: str, dim: int, size: int) -> Value:
    old = state.local[name]
    return Value(state.new_name(name), (*old.shape[:dim], size, *old.shape[dim + 1 :]), old.dtype)


def _with_zeros(state: Lowering, node: Node, name: str, reach: _Reach) -> str:
    """The own piece amid zeros."""
    (start, stop), (low, high) = reach.here
    if reach.cut.window is None or (start, stop) == (low, high):
        return name
    before, after = (high - low, 0) if start == stop else (start - low, high - stop)
    value = _resized(state, name, reach.dim, high - low)
    return state.add("shard.zeros_around", (Ref(name), reach.dim, before, after), value, node.phase, node.source)


def _with_neighbours(state: Lowering, node: Node, name: str, reach: _Reach) -> str:
    """The own piece with what the neighbours have of the window; a local slice where nobody needs anything."""
    (start, stop), (low, high) = reach.here
    value = _resized(state, name, reach.dim, high - low)
    args: tuple[Arg, ...] = (Ref(name), reach.cut.axis, reach.dim, reach.owned, reach.needed)
    if any(a < b and (a < own[0] or b > own[1]) for (a, b), own in zip(reach.needed, reach.owned)):
        return state.add("comm.exchange", args, value, node.phase, node.source)
    if reach.cut.window is None or (start, stop) == (low, high):
        return name
    value = replace(value, alias=state.owner(name))  # it may be a view
    args = (Ref(name), reach.dim, 1, 1, low - start, high - start)
    return state.add("shard.slice", args, value, node.phase, node.source)


def crop(
    state: Lowering,
    node: Node,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    results: tuple[Value | None, ...],
    cuts: list[OverlapCut],
) -> None:
    """Appends the node on its windows, and of its results the pieces that are wanted."""
    raw: list[Value | None] = []
    steps: list[list[tuple[int, int, int]]] = []
    for r, value in enumerate(results):
        shape = [] if value is None else list(value.shape)
        todo = []
        for cut in cuts:
            role, whole = cut.factor.results[r], node.results[r]
            if value is None or whole is None or not isinstance(role, DimRef):
                continue
            assert cut.window is not None
            low, high = cut.window.span(whole.shape[role.dim], cut.halo.results[r])
            start, stop = owned_spans(whole.shape[role.dim], len(cut.windows))[cut.rank]
            shape[role.dim] = high - low
            if (start, stop) != (low, high):
                todo.append((role.dim, start - low, stop - low))
        steps.append(todo)
        if value is not None and todo:
            value = Value(state.new_name(value.name), tuple(shape), value.dtype)
        raw.append(value)
    state.nodes.append(Node(tuple(raw), node.op, args, kwargs, node.phase, node.recompute, node.source))
    state.local.update((v.name, v) for v in raw if v is not None)
    for made, value, todo in zip(raw, results, steps):
        for number, (dim, start, stop) in enumerate(todo):
            assert made is not None and value is not None
            smaller = replace(_resized(state, made.name, dim, stop - start), alias=state.owner(made.name))
            if number == len(todo) - 1:
                smaller = replace(smaller, name=value.name)
            state.add("shard.slice", (Ref(made.name), dim, 1, 1, start, stop), smaller, node.phase, node.source)
            made = smaller
