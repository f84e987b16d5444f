"""Plans from prices: every vertex in turn takes a strategy, then one by one they are improved.

A vertex takes what is cheapest given the strategies of its neighbours that have chosen, and the prices of `ascent.py`
where they have not: these say what the rest of the program will pay. The order is that of the program, or its reverse
(Kolmogorov 2006, section 3.1, for chains). The prices are those of a folded network, the choices of the whole one, so
layers may differ, as they should near the ends of a chain.
"""

from __future__ import annotations

import numpy as np

from .ascent import Ascent
from .network import FORBIDDEN, Edge, Hub, Network

PASSES = 12
"""Most passes of mending."""


class Around:
    """What every vertex makes and reads."""

    def __init__(self, network: Network):
        self.network = network
        self.makes: dict[int, list[Hub]] = {k: [] for k in network.cost}
        self.reads: dict[int, list[tuple[Hub, Edge]]] = {k: [] for k in network.cost}
        for hub in network.hubs.values():
            self.makes[hub.maker].append(hub)
            for edge in hub.edges:
                self.reads[edge.consumer].append((hub, edge))


class _Rounding:
    """Choices that are made one after the other."""

    def __init__(self, ascent: Ascent, around: Around):
        self.ascent, self.folded, self.around = ascent, ascent.folded, around
        self.chosen: dict[int, int] = {}

    def choose(self, k: int) -> None:
        """The cheapest strategy of a vertex."""
        total = self.around.network.cost[k].copy()
        for hub in self.around.makes[k]:
            self._add_made(total, hub)
        earlier: dict[str, list[np.ndarray]] = {}
        for hub, edge in self.around.reads[k]:
            if hub.maker in self.chosen:
                total += _first_use(self._row(hub, k)[edge.columns], edge.columns, earlier.setdefault(hub.name, []))
            else:
                total += self._take(edge)[edge.need]
        self.chosen[k] = int(total.argmin())

    def _give(self, hub: Hub, edge: Edge) -> np.ndarray:
        place = self.folded.slot_of[hub.name, edge.consumer, edge.position]
        return self.ascent.price[self.ascent.give[place].number]

    def _take(self, edge: Edge) -> np.ndarray:
        return self.ascent.price[self.ascent.take[self.folded.group[edge.consumer], edge.position].number]

    def _add_made(self, total: np.ndarray, hub: Hub) -> None:
        """What bringing a value to its consumers costs, by strategy of its maker."""
        read = {int(e.columns[self.chosen[e.consumer]]) for e in hub.edges if e.consumer in self.chosen}
        if read:
            total += hub.micros[:, sorted(read)].sum(1)[hub.own]
        for edge in hub.edges:
            if edge.consumer not in self.chosen:
                total += self._give(hub, edge)[hub.own]

    def _row(self, hub: Hub, k: int) -> np.ndarray:
        """What a layout costs one more reader of a value whose maker has chosen: nothing if another has it already,
        and less if those to come would pay for it."""
        own = hub.own[self.chosen[hub.maker]]
        row = hub.micros[own].copy()
        for edge in hub.edges:
            if edge.consumer in self.chosen:
                row[int(edge.columns[self.chosen[edge.consumer]])] = 0.0
            elif edge.consumer != k:
                pays = np.maximum(0.0, self._give(hub, edge)[own] + self._take(edge))
                row[edge.at] = np.maximum(0.0, row[edge.at] - pays)
        return row


def _first_use(paid: np.ndarray, columns: np.ndarray, earlier: list[np.ndarray]) -> np.ndarray:
    """What a reader pays by strategy: one that reads a value twice in one layout pays once."""
    for other in earlier:
        paid[columns == other] = 0.0
    earlier.append(columns)
    return paid


def from_prices(ascent: Ascent, around: Around, backwards: bool) -> dict[int, int]:
    """A strategy for every vertex. The prices should be those after a sweep in the other direction."""
    rounding = _Rounding(ascent, around)
    for k in sorted(around.network.cost, reverse=backwards):
        rounding.choose(k)
    return rounding.chosen


def total_micros(network: Network, chosen: dict[int, int]) -> float:
    """What a choice costs."""
    total = sum(float(cost[chosen[k]]) for k, cost in network.cost.items())
    for hub in network.hubs.values():
        read = {int(e.columns[chosen[e.consumer]]) for e in hub.edges}
        total += float(hub.micros[hub.own[chosen[hub.maker]], sorted(read)].sum())
    return total


def mend(around: Around, chosen: dict[int, int]) -> dict[int, int]:
    """The choice after every vertex in turn has taken what is cheapest for it, until none gains."""
    chosen = dict(chosen)
    waiting = sorted(around.network.cost)
    for _ in range(PASSES):
        changed: set[int] = set()
        for k in waiting:
            costs = _costs(around, chosen, k)
            best = int(costs.argmin())
            if costs[best] < min(costs[chosen[k]], FORBIDDEN) - 1e-9:
                chosen[k] = best
                changed.add(k)
        if not changed:
            break
        near = set(changed)
        for k in changed:
            for hub in [*around.makes[k], *(hub for hub, _ in around.reads[k])]:
                near.update((hub.maker, *(e.consumer for e in hub.edges)))
        waiting = sorted(near)
    return chosen


def _costs(around: Around, chosen: dict[int, int], k: int) -> np.ndarray:
    """By strategy of a vertex, with all that it changes, given those of its neighbours."""
    total = around.network.cost[k].copy()
    for hub in around.makes[k]:
        read = {int(e.columns[chosen[e.consumer]]) for e in hub.edges if e.consumer != k}
        total += hub.micros[:, sorted(read)].sum(1)[hub.own]
    earlier: dict[str, list[np.ndarray]] = {}
    for hub, edge in around.reads[k]:
        if hub.maker != k:
            row = hub.micros[hub.own[chosen[hub.maker]]].copy()
            row[[int(e.columns[chosen[e.consumer]]) for e in hub.edges if e.consumer != k]] = 0.0
            total += _first_use(row[edge.columns], edge.columns, earlier.setdefault(hub.name, []))
    return total
