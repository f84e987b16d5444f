"""Follows one cut through a graph by the rules of its nodes: how far it reaches before something has to be gathered.

Also colours the dims of a graph: dims that some factor ties have the same colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.graph import Graph, Node
from ..ir.runner import call_of
from .rule import DimRef, Factor, Rule

Inside = tuple[int, int]
"""(outer, unit) of a cut relative to a factor."""


@dataclass(frozen=True)
class Flow:
    """Where a cut of one input reaches."""

    places: dict[str, DimRef]
    """Value -> where it is cut."""
    reduced: int
    """Elements of the largest value that is combined by a reduction; 0 where there is none."""
    indexed: bool
    """Whether an integer operand is shifted on the way."""


def relative(role: DimRef, cut: DimRef, size: int) -> Inside | None:
    """The cut of a dim of this size as it reads inside the factor at `role`; None where it does not lie in it."""
    if role.dim != cut.dim or cut.outer % role.outer or cut.unit % role.unit or size % (role.outer * role.unit):
        return None
    outer, unit = cut.outer // role.outer, cut.unit // role.unit
    n = size // (role.outer * role.unit)
    return None if n % (outer * unit) or n == outer * unit else (outer, unit)


def is_plain(factor: Factor) -> bool:
    """Whether the factor may be cut anyhow, with nothing shifted."""
    return not factor.even and factor.index is None and factor.halo is None and "avg" not in factor.results


def follow(graph: Graph, rules: tuple[Rule, ...], start: str, cut: DimRef) -> Flow | None:
    """Sends a cut of the value `start` forward; None where a node that reads it cut has no factor for that."""
    places, reduced, indexed = {start: cut}, 0, False
    for node, rule in zip(graph.nodes, rules):
        names = call_of(node, graph.values)[1]
        if not any(name in places for name in names):
            continue
        found = _fitting(graph, rule, names, places)
        if found is None:
            return None
        factor, (outer, unit) = found
        indexed |= factor.index is not None
        for value, role in zip(node.results, factor.results):
            if value is not None and isinstance(role, DimRef):
                places[value.name] = DimRef(role.dim, role.outer * outer, role.unit * unit)
            elif value is not None and role is not None:
                reduced = max(reduced, value.numel)
    return Flow(places, reduced, indexed)


def _fitting(
    graph: Graph, rule: Rule, names: tuple[str, ...], places: dict[str, DimRef]
) -> tuple[Factor, Inside] | None:
    """The factor that fits all cut operands, plain ones first."""
    for factor in sorted(rule.factors, key=lambda f: not is_plain(f)):
        if factor.even or "avg" in factor.results:
            continue
        if factor.index is not None and names[factor.index.operand] in places:
            continue
        insides: set[Inside | None] = set()
        for name, role in zip(names, factor.operands):
            if name in places:
                shape = graph.values[name].shape
                fits = isinstance(role, DimRef)
                insides.add(relative(role, places[name], shape[role.dim]) if fits else None)  # type: ignore[union-attr]
        if len(insides) == 1 and (inside := insides.pop()) is not None:
            if (factor.index is None and factor.halo is None) or inside == (1, 1):
                return factor, inside
    return None


Dim = tuple[str, int]
"""(value, dim)"""


class Colours:
    """Union of dims that are tied."""

    def __init__(self) -> None:
        self._parent: dict[Dim, Dim] = {}

    def of(self, dim: Dim) -> Dim:
        """The representative of a dim's colour."""
        root = dim
        while (above := self._parent.setdefault(root, root)) != root:
            root = above
        while dim != root:
            self._parent[dim], dim = root, self._parent[dim]
        return root

    def tie(self, dims: Iterable[Dim]) -> None:
        """These dims have one colour from now on."""
        dims = iter(dims)
        first = next(dims, None)
        for dim in dims:
            assert first is not None
            self._parent[self.of(dim)] = self.of(first)

    def add_node(self, graph: Graph, node: Node, rule: Rule) -> None:
        """Ties the dims that a factor of the node cuts together."""
        names = call_of(node, graph.values)[1]
        for factor in rule.factors:
            if not factor.even:
                tied = [(name, role.dim) for name, role in zip(names, factor.operands) if isinstance(role, DimRef)]
                tied += [
                    (value.name, role.dim)
                    for value, role in zip(node.results, factor.results)
                    if value is not None and isinstance(role, DimRef)
                ]
                self.tie(tied)
