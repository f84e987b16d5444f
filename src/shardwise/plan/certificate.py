"""A proof that no plan is faster than a bound, and its check, which trusts no solver.

Weak duality: every use of a value by a consumer gets two prices, `give` of the layout in which the value is made and
`take` of the layout in which it is read. If for every value, every own layout o and every layout q

    sum over its uses of max(0, give[o] + take[q])  <=  seconds to bring the value from o to q

then the moves of any plan cost at least the sum of its prices, since each distinct (o, q) is paid once. So any plan
costs at least the sum over the vertices of the least, over strategies, of its own seconds plus its prices. Where the
condition is missed by some excess, that excess (once per value and use) is taken off the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ir.placement import Layout
from .fold import Folded
from .network import FORBIDDEN, MICRO, Network, least
from .problem import Problem

Use = tuple[str, int, int]
"""(value, vertex that reads it, position)"""


@dataclass(frozen=True)
class Certificate:
    """Prices in seconds, by use and layout."""

    give: dict[Use, dict[Layout, float]]
    take: dict[Use, dict[Layout, float]]


def certify(network: Network, reduced: Network, folded: Folded, give: dict, take: dict) -> Certificate:
    """Prices for the whole problem from those of a folded, reduced network.

    `give` has them by (folded hub, slot), `take` by (group, position), in microseconds.
    """
    gives: dict[Use, np.ndarray] = {}
    takes: dict[Use, np.ndarray] = {}
    for hub in reduced.hubs.values():
        for edge in hub.edges:
            use = hub.name, edge.consumer, edge.position
            gives[use] = give[folded.slot_of[use]]
            takes[use] = take[folded.group[edge.consumer], edge.position]
    for k, cost, before, after in reversed(reduced.removed):
        _undo(k, cost, before, after, gives, takes)
    found = Certificate({}, {})
    for hub in network.hubs.values():
        for edge in hub.edges:
            use = hub.name, edge.consumer, edge.position
            layouts = [hub.targets[q] for q in edge.at]
            key = hub.name, *network.reader(edge)
            found.give[key] = {x: float(p) / MICRO for x, p in zip(hub.sources, gives[use])}
            found.take[key] = {x: float(p) / MICRO for x, p in zip(layouts, takes[use])}
    return found


def _undo(k: int, cost: np.ndarray, before, after, gives: dict[Use, np.ndarray], takes: dict[Use, np.ndarray]) -> None:
    """Prices at a vertex that was removed: those at which it, and the moves around it, break even."""
    if before is not None:
        use = before.name, k, before.edges[0].position
    if after is not None:
        edge = after.edges[0]
        out = after.name, edge.consumer, edge.position
    if before is not None and after is not None:
        gives[use] = gives[out]
        takes[use] = (before.micros[:, before.edges[0].at] - gives[use][:, None]).min(0)
        gives[out] = -least(cost + takes[use][before.edges[0].need], after.own, after.micros.shape[0])
    elif before is not None:
        takes[use] = -least(cost, before.edges[0].need, len(before.edges[0].at))
        gives[use] = (before.micros[:, before.edges[0].at] - takes[use]).min(1)
    elif after is not None:
        gives[out] = -least(cost, after.own, after.micros.shape[0])
        takes[out] = (after.micros[:, edge.at] - gives[out][:, None]).min(0)


def check(problem: Problem, certificate: Certificate) -> float:
    """The bound that a certificate proves, in seconds: from the tables of the problem alone."""
    excess = 0.0
    for name, maker in problem.made_by.items():
        place = problem.vertices[maker].gives.index(name)
        uses = [(name, v, position) for v, position in problem.used_by[name]]
        for own in {layouts[place] for layouts in problem.vertices[maker].give_layouts}:
            assert own is not None
            needed = {x for use in uses for x in certificate.take[use]}
            for layout in needed:
                prices = (
                    certificate.give[u].get(own, -FORBIDDEN) + certificate.take[u][layout]
                    for u in uses
                    if layout in certificate.take[u]
                )
                paid = sum(max(0.0, price) for price in prices)
                excess_here = paid - problem.transport_s(name, own, layout)
                excess = max(excess, excess_here)
    uses_count = sum(len(users) for users in problem.used_by.values())
    gradients = {g: p for p, g in problem.ties}
    total = 0.0
    for k in range(len(problem.vertices)):
        if k not in gradients:
            total += _least_price(problem, certificate, k, [g for g, p in gradients.items() if p == k])
    return total - excess * uses_count


def _least_price(problem: Problem, certificate: Certificate, k: int, gradients: list[int]) -> float:
    """The least that a vertex pays, prices included; a parameter pays for its gradient, in the same layout."""
    vertex = problem.vertices[k]
    totals = []
    for s, seconds in enumerate(vertex.seconds):
        total = seconds
        for name, layout in zip(vertex.gives, vertex.give_layouts[s]):
            if name is not None and layout is not None:
                total += sum(certificate.give[name, v, p].get(layout, FORBIDDEN) for v, p in problem.used_by[name])
        for position, (name, layout) in enumerate(zip(vertex.needs, vertex.need_layouts[s])):
            total += certificate.take[name, k, position].get(layout, FORBIDDEN)
        for gradient in gradients:
            other, stored = problem.vertices[gradient], vertex.give_layouts[s][0]
            wanted = {layouts[0]: k for k, layouts in enumerate(other.need_layouts)}
            assert stored is not None
            if stored not in wanted:
                total += FORBIDDEN
                continue
            total += other.seconds[wanted[stored]]
            total += certificate.take[other.needs[0], gradient, 0].get(stored, FORBIDDEN)
            for name, layout in zip(other.gives, other.give_layouts[wanted[stored]]):
                if name is not None and layout is not None:
                    total += sum(certificate.give[name, v, p].get(layout, FORBIDDEN) for v, p in problem.used_by[name])
        totals.append(total)
    return min(totals)
