"""Where the dims of a graph can be cut: dims are coloured into factors by letting cuts flow through the rules.

A view that reads [B*T] as [B, T] says that the dim can be cut as (outer=1, unit=T) or as (outer=B, unit=1). Every
operator that ties this dim to others passes the cuts on, forwards and backwards, until nothing changes. Only the
finest factors are kept: a dim made of B and T is cut along one of them, not along their product.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.runner import call_of
from ..rules.rule import DimRef, Rule

MAX_CUTS = 6
"""Cuts kept per dim; more than this come only from pathological chains of views."""

DimCuts = dict[tuple[str, int], set[tuple[int, int]]]
"""(value, dim) -> {(outer, unit)}"""


def relative(ref: DimRef, cut: tuple[int, int], size: int) -> tuple[int, int] | None:
    """The cut of a dim as it reads inside the factor at `ref`; None where it does not lie in that factor."""
    outer, unit = cut
    if outer % ref.outer or unit % ref.unit:
        return None
    inside = outer // ref.outer, unit // ref.unit
    n = size // (ref.outer * ref.unit)
    if inside[0] * inside[1] > n or n % (inside[0] * inside[1]):
        return None
    return inside


def absolute(ref: DimRef, inside: tuple[int, int]) -> tuple[int, int]:
    """The inverse of `relative`."""
    return ref.outer * inside[0], ref.unit * inside[1]


@dataclass(frozen=True, slots=True)
class Tie:
    """The places that a factor of a node has: (value, size of the dim, place)."""

    places: tuple[tuple[str, int, DimRef], ...]
    whole: bool
    """Its dims are cut as they are, never inside: pieces that overlap have to be connected."""


def tied_dims(graph: Graph, rules: tuple[Rule, ...]) -> list[Tie]:
    """A tie for every factor of every node."""
    ties = []
    for node, rule in zip(graph.nodes, rules):
        names = call_of(node, graph.values)[1]
        for factor in rule.factors:
            places = [
                (name, graph.values[name].shape[ref.dim], ref)
                for name, ref in zip(names, factor.operands)
                if isinstance(ref, DimRef)
            ]
            places += [
                (value.name, value.shape[ref.dim], ref)
                for value, ref in zip(node.results, factor.results)
                if value is not None and isinstance(ref, DimRef)
            ]
            ties.append(Tie(tuple(places), factor.halo is not None))
    return ties


def find_cuts(graph: Graph, rules: tuple[Rule, ...]) -> DimCuts:
    """The cuts of every dim that some operator can be split along; only the finest factors."""
    ties = tied_dims(graph, rules)
    touching: dict[tuple[str, int], list[int]] = {}
    for t, tie in enumerate(ties):
        for name, _, ref in tie.places:
            touching.setdefault((name, ref.dim), []).append(t)
    cuts: DimCuts = {}
    queue = deque(range(len(ties)))
    queued = set(queue)
    while queue:
        t = queue.popleft()
        queued.discard(t)
        inside = {(1, 1)}
        for name, size, ref in () if ties[t].whole else ties[t].places:
            found = (relative(ref, cut, size) for cut in cuts.get((name, ref.dim), ()))
            inside |= {i for i in found if i is not None}
        for name, size, ref in ties[t].places:
            known = cuts.setdefault((name, ref.dim), set())
            new = {absolute(ref, i) for i in inside} - known
            new = {c for c in new if size % (c[0] * c[1]) == 0 and size // (c[0] * c[1]) > 1}
            if new and len(known) + len(new) <= 4 * MAX_CUTS:
                known |= new
                for other in touching[(name, ref.dim)]:
                    if other not in queued:
                        queued.add(other)
                        queue.append(other)
    return {place: _finest(found) for place, found in cuts.items()}


def _finest(cuts: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Without the cuts that contain a finer one."""
    kept = {c for c in cuts if not any(d != c and d[0] % c[0] == 0 and d[1] % c[1] == 0 for d in cuts)}
    return set(sorted(kept)[:MAX_CUTS])
