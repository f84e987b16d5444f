"""Plans from prices: strategies are fixed group by group while the prices adjust, then improved one by one.

A group whose cheapest strategy is far below its next best is decided; the sweeps in between make the others feel what
that costs them. Equal layers are decided alike, for the prices are those of a folded network. What this gets wrong
where layers differ, such as at the ends of a chain, is mended in the whole network, where every vertex in turn takes
the strategy that is cheapest given those of its neighbours.
"""

from __future__ import annotations

import numpy as np

from .ascent import Ascent
from .network import FORBIDDEN, Edge, Hub, Network

ROUNDS = 24
"""Rounds in which groups are decided; in the last all that are open."""
RATIO = 0.7
"""By which the margin that decides a group falls from round to round."""
QUANTILE = 0.9
"""Part of the groups whose margin is too small to be decided in the first round."""
SWEEPS = 3
"""Sweeps per round; they end in the direction that is opposite to that of the next."""
PASSES = 12
"""Most passes of mending."""


def dive(prices: Ascent) -> list[int]:
    """One strategy per group."""
    ascent = prices.copy()
    fixed = [0 if len(cost) == 1 else -1 for cost in ascent.cost]
    margin = float(np.quantile([_margin(ascent.totals(g))[1] for g in ascent.order], QUANTILE))
    backwards = False
    for r in range(ROUNDS + 1):
        for g in reversed(ascent.order) if backwards else ascent.order:
            if fixed[g] < 0:
                ascent.pull(g)
                best, lead = _margin(ascent.totals(g))
                if lead > margin or r == ROUNDS:
                    fixed[g] = best
                    ascent.fix(g, best)
            ascent.visit(g, backwards)
        for _ in range(SWEEPS - 1):
            backwards = not backwards
            ascent.sweep(backwards)
        backwards = not backwards
        margin *= RATIO
    return fixed


def _margin(totals: np.ndarray) -> tuple[int, float]:
    """The cheapest strategy, and how far the next one is."""
    best = int(totals.argmin())
    rest = np.delete(totals, best)
    return best, float(rest.min() - totals[best]) if len(rest) else 0.0


class _Local:
    """What strategies cost given those of the neighbours."""

    def __init__(self, network: Network, chosen: dict[int, int]):
        self.network, self.chosen = network, chosen
        self.makes: dict[int, list[Hub]] = {k: [] for k in network.cost}
        self.reads: dict[int, list[tuple[Hub, Edge]]] = {k: [] for k in network.cost}
        for hub in network.hubs.values():
            self.makes[hub.maker].append(hub)
            for edge in hub.edges:
                self.reads[edge.consumer].append((hub, edge))

    def costs(self, k: int) -> np.ndarray:
        """By strategy of a vertex, with all that it changes."""
        total = self.network.cost[k].copy()
        for hub in self.makes[k]:
            read = {int(e.columns[self.chosen[e.consumer]]) for e in hub.edges if e.consumer != k}
            total += hub.micros[:, sorted(read)].sum(1)[hub.own]
        earlier: dict[str, list[np.ndarray]] = {}
        for hub, edge in self.reads[k]:
            if hub.maker != k:
                row = hub.micros[hub.own[self.chosen[hub.maker]]].copy()
                row[[int(e.columns[self.chosen[e.consumer]]) for e in hub.edges if e.consumer != k]] = 0.0
                columns = edge.columns
                paid = row[columns]
                for other in earlier.setdefault(hub.name, []):
                    paid[columns == other] = 0.0  # a vertex that reads a value twice in one layout pays once
                earlier[hub.name].append(columns)
                total += paid
        return total


def mend(network: Network, chosen: dict[int, int]) -> dict[int, int]:
    """The choice after every vertex in turn has taken what is cheapest for it, until none gains."""
    local = _Local(network, dict(chosen))
    waiting = sorted(network.cost)
    for _ in range(PASSES):
        changed: set[int] = set()
        for k in waiting:
            costs = local.costs(k)
            best = int(costs.argmin())
            if costs[best] < min(costs[local.chosen[k]], FORBIDDEN) - 1e-9:
                local.chosen[k] = best
                changed.add(k)
        if not changed:
            break
        near = set(changed)
        for k in changed:
            for hub in [*local.makes[k], *(hub for hub, _ in local.reads[k])]:
                near.update((hub.maker, *(e.consumer for e in hub.edges)))
        waiting = sorted(near)
    return local.chosen
