"""The strategies of a node: which layouts its operands need and which its results then have.

On one mesh axis a node has these options: replicate everything; for every factor of its rule and every cut of the
dims it ties, split along it; for every linear group, take Partial sums in and give them out. A strategy is one option
per axis, where the layouts that result are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ..ir.graph import Graph, Node, Value
from ..ir.placement import Layout, Partial, Placement, R, Shard, is_valid
from ..ir.runner import call_of
from ..rules.rule import DimRef, Factor, Rule
from ..rules.window import Overlap, overlap_of
from .cuts import DimCuts, absolute, relative


@dataclass(frozen=True, slots=True)
class Option:
    """What a node does on one mesh axis."""

    kind: str
    """replicate | factor | linear"""
    index: int
    """Of the factor or the linear group in the rule."""
    inside: tuple[int, int]
    """(outer, unit) of the cut within the factor."""
    operands: tuple[Placement, ...]
    results: tuple[Placement | None, ...]
    parts: int
    """Elements along the factor: the work is cut into chunks of these; 0 where the work is not cut."""
    overlap: Overlap | None = None
    """Of pieces that overlap."""

    @property
    def choice(self) -> Choice:
        """What the lowering needs to know of it."""
        return self.kind, self.index, *self.inside


Choice = tuple[str, int, int, int]
"""(kind, index, outer, unit) of an option."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One option per mesh axis."""

    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]
    choice: tuple[Choice, ...]
    share: float
    """Part of the node's work that the busiest device does."""
    halos: tuple[Overlap | None, ...] = ()
    """Per axis, what the pieces have in common with their neighbours'; empty where there is nothing on any axis."""


def replicate_option(operands: int, results: tuple[Value | None, ...]) -> Option:
    """Every device does the whole work."""
    return Option("replicate", 0, (1, 1), (R,) * operands, tuple(None if v is None else R for v in results), 0)


def axis_options(node: Node, graph: Graph, rule: Rule, cuts: DimCuts) -> tuple[Option, ...]:
    """The options of a node on one axis."""
    names = call_of(node, graph.values)[1]
    operands = [graph.values[n] for n in names]
    found = [replicate_option(len(names), node.results)]
    for k, factor in enumerate(rule.factors):
        if factor.even or any(r == "avg" for r in factor.results):
            continue
        for inside in sorted(_insides(node, operands, factor, cuts)):
            option = factor_option(k, factor, inside, operands, node.results)
            if option is not None:
                found.append(option)
    for k, group in enumerate(rule.linear):
        inputs = tuple(Partial("sum") if o in group else R for o in range(len(names)))
        found.append(
            Option("linear", k, (1, 1), inputs, tuple(None if v is None else Partial("sum") for v in node.results), 0)
        )
    distinct: dict[tuple, Option] = {}
    for option in found:
        distinct.setdefault((option.operands, option.results), option)
    return tuple(distinct.values())


def _insides(node: Node, operands: list[Value], factor: Factor, cuts: DimCuts) -> set[tuple[int, int]]:
    """The cuts inside a factor that its dims have."""
    found: set[tuple[int, int]] = set()
    values = [*zip(operands, factor.operands), *zip(node.results, factor.results)]
    for value, ref in values:
        if value is not None and isinstance(ref, DimRef):
            for cut in cuts.get((value.name, ref.dim), ()):
                inside = relative(ref, cut, value.shape[ref.dim])
                if inside is not None:
                    found.add(inside)
    if factor.index is not None:
        found &= {(1, 1)}
    return found if factor.halo is None else {(1, 1)}


def _place(ref: object, inside: tuple[int, int]) -> Placement:
    if isinstance(ref, DimRef):
        outer, unit = absolute(ref, inside)
        return Shard(ref.dim, outer, unit)
    return Partial(ref) if isinstance(ref, str) else R


def factor_option(
    k: int, factor: Factor, inside: tuple[int, int], operands: list[Value], results: tuple[Value | None, ...]
) -> Option | None:
    """The option of splitting along a factor at (outer, unit) inside it; None where the dims do not divide."""
    parts = 0
    overlap = None
    if factor.halo is not None:
        shapes = [None if v is None else v.shape for v in results]
        overlap = overlap_of(factor, [v.shape for v in operands], shapes)
        if overlap is None:
            return None
    for value, ref in [*zip(operands, factor.operands), *zip(results, factor.results)]:
        if value is not None and isinstance(ref, DimRef):
            outer, unit = absolute(ref, inside)
            if value.shape[ref.dim] % (outer * unit):
                return None
            parts = value.shape[ref.dim] // (outer * unit)
    parts = parts if overlap is None else overlap.blocks
    if parts < 2:
        return None
    return Option(
        "factor",
        k,
        inside,
        tuple(_place(ref, inside) for ref in factor.operands),
        tuple(None if value is None else _place(ref, inside) for value, ref in zip(results, factor.results)),
        parts,
        overlap,
    )


def strategies(
    node: Node, graph: Graph, options: tuple[Option, ...], mesh: tuple[int, ...], rule: Rule
) -> tuple[Strategy, ...]:
    """All valid combinations of one option per axis."""
    names = call_of(node, graph.values)[1]
    shapes = [graph.values[n].shape for n in names]
    found: list[Strategy] = []
    for combination in product(options, repeat=len(mesh)):
        if not _compatible(combination, rule) or not _empties_work(combination, rule, node, mesh):
            continue
        operands = tuple(zip(*(o.operands for o in combination))) if names else ()
        results = tuple(
            None if v is None else tuple(p for o in combination if (p := o.results[r]) is not None)
            for r, v in enumerate(node.results)
        )
        if not all(is_valid(s, layout, mesh) for s, layout in zip(shapes, operands)):
            continue
        if any(v and layout and not is_valid(v.shape, layout, mesh) for v, layout in zip(node.results, results)):
            continue
        share = _share(combination, mesh)
        halos = tuple(o.overlap for o in combination)
        choice = tuple(o.choice for o in combination)
        found.append(Strategy(operands, results, choice, share, halos if any(halos) else ()))
    return tuple(found)


def _compatible(combination: tuple[Option, ...], rule: Rule) -> bool:
    """Options of several axes that commute: an indexed factor is cut on one axis only, a dim whose pieces overlap
    too, and linear groups with reductions other than the sum are left to `is_valid`."""
    if any(o.overlap for o in combination):
        cut = [(k, p.dim) for o in combination for k, p in enumerate((*o.operands, *o.results)) if isinstance(p, Shard)]
        if len(cut) != len(set(cut)):
            return False
    indexed = [o.index for o in combination if o.kind == "factor" and rule.factors[o.index].index is not None]
    if len(indexed) != len(set(indexed)):
        return False
    masked = any(rule.factors[k].index is not None for k in indexed)
    linear = any(o.kind == "linear" for o in combination)
    return not (masked and linear)


def _empties_work(combination: tuple[Option, ...], rule: Rule, node: Node, mesh: tuple[int, ...]) -> bool:
    """Where some device gets no elements and the operator cannot run on none, every result must have a neutral
    element to stand in: a concatenation or a reduction, but no whole copy."""
    for option, parts in zip(combination, mesh):
        if option.kind != "factor" or rule.factors[option.index].empty or option.overlap:
            continue
        if -(-option.parts // parts) * (parts - 1) >= option.parts:
            for value, role in zip(node.results, rule.factors[option.index].results):
                if value is not None and role is None:
                    return False
    return True


def _share(combination: tuple[Option, ...], mesh: tuple[int, ...]) -> float:
    """Part of the work of the busiest device: chunks are ceil(n / parts) of n."""
    share = 1.0
    left: dict[tuple[int, tuple[int, int]], int] = {}
    for option, parts in zip(combination, mesh):
        if option.overlap is not None:
            share *= option.overlap.share(parts)
        elif option.parts:
            key = (option.index, option.inside)
            n = left.get(key, option.parts)
            piece = -(-n // parts)
            share *= piece / n
            left[key] = piece
    return share
