"""Lower bounds without a linear program: prices that are improved one vertex at a time.

Every use of a value has two prices, `give` of the layout in which it is made and `take` of the layout in which it is
read (see `certificate.py`). As long as for every own layout o and column q of a hub

    sum over its uses of max(0, give[o] + take[q])  <=  micros[o, q]

the sum over the vertices of the least, over strategies, of own cost plus prices is a lower bound. A hub with one use
needs no max. What the left side lacks is slack.

A visit to a vertex raises its prices by the slack of its edges to the vertices before it (`pull`), and then gives what
its strategies cost beyond the cheapest to the edges ahead, in equal parts (`push`). No visit lowers the bound. Sweeps
go through the program forwards and backwards. This is sequential tree-reweighted message passing (Kolmogorov 2006),
with hubs shared by several consumers as one more kind of factor. It comes within some thousandths of the optimum of
the linear program in a few dozen sweeps, each far cheaper than a few pivots.

On a folded network (`fold.py`) the prices of a group are those of all its members, so the bound holds for the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .fold import Folded, Target
from .network import FORBIDDEN

CAP = 1e8
"""Microseconds: no price moves by more at once, which keeps sums with FORBIDDEN exact."""

Place = tuple[int, int]
"""(folded hub, slot)"""


@dataclass(slots=True)
class _End:
    """The prices of one slot of a hub, or of one thing that is read, as the vertex sees them."""

    place: Place | None
    target: Target | None
    multiple: int
    index: np.ndarray
    """Strategy -> layout."""
    order: np.ndarray
    starts: np.ndarray
    present: np.ndarray
    absent: np.ndarray
    """Layouts that no strategy has."""
    ahead: tuple[bool, bool] = (False, False)
    """Whether the other side is visited later, in a forward and in a backward sweep."""


def _end(place: Place | None, target: Target | None, multiple: int, index: np.ndarray, count: int) -> _End:
    order = np.argsort(index, kind="stable")
    present, starts = np.unique(index[order], return_index=True)
    return _End(place, target, multiple, index, order, starts, present, np.setdiff1d(np.arange(count), present))


def _whole(at: np.ndarray, columns: int) -> np.ndarray | slice:
    """An index of all columns as a slice, which copies nothing."""
    return slice(None) if len(at) == columns and bool((at == np.arange(columns)).all()) else at


class Ascent:
    """Prices of a folded network, always feasible."""

    def __init__(self, folded: Folded):
        self.folded = folded
        self.cost = list(folded.cost)
        self.counts = [len(m) for m in folded.members]
        self.give: dict[Place, np.ndarray] = {}
        self.take: dict[Target, np.ndarray] = {}
        self.ends: list[list[_End]] = [[] for _ in folded.members]
        self.sources: dict[Target, list[tuple[Place, np.ndarray | slice]]] = {}
        self.readers: dict[Place, list[tuple[Target, np.ndarray | slice]]] = {}
        self.spare: dict[int, np.ndarray] = {}
        """Hub that is shared by several uses -> micros without what is paid."""
        self.paid: dict[Place, np.ndarray] = {}
        self.stale: set[Place] = set()
        for h in range(len(folded.hubs)):
            self._add_hub(h)
        middle = [m[len(m) // 2] for m in folded.members]
        self.order = sorted(range(len(middle)), key=lambda g: middle[g])
        self._directions()

    def _add_hub(self, h: int) -> None:
        hub = self.folded.hubs[h]
        owns, columns = hub.micros.shape
        if not hub.single:
            self.spare[h] = hub.micros.copy()
        for t, slot in enumerate(hub.slots):
            end = _end((h, t), None, slot.multiple, hub.own, owns)
            self.ends[hub.group].append(end)
            self.give[h, t] = np.zeros(owns)
            self.give[h, t][end.absent] = -FORBIDDEN
            self.readers[h, t] = []
            for part in slot.parts:
                at = _whole(part.edge.at, columns)
                self.readers[h, t].append((part.target, at))
                self.sources.setdefault(part.target, []).append(((h, t), at))
                if part.target not in self.take:
                    end = _end(None, part.target, 1, part.edge.need, len(part.edge.at))
                    self.ends[part.target[0]].append(end)
                    self.take[part.target] = np.zeros(len(part.edge.at))
                    self.take[part.target][end.absent] = -FORBIDDEN
            if not hub.single:
                self.paid[h, t] = np.zeros((owns, columns))

    def _directions(self) -> None:
        """Which ends look ahead, and the part of a vertex's excess that each gets."""
        rank = {g: r for r, g in enumerate(self.order)}
        self.share: list[float] = []
        for g, ends in enumerate(self.ends):
            for end in ends:
                if end.place is not None:
                    others = [rank[target[0]] for target, _ in self.readers[end.place]]
                else:
                    assert end.target is not None
                    others = [rank[self.folded.hubs[h].group] for (h, _), _ in self.sources[end.target]]
                end.ahead = max(others) >= rank[g], min(others) <= rank[g]
            most = max((sum(e.ahead[d] for e in ends) for d in (0, 1)), default=1)
            self.share.append(1.0 / max(most, 1))

    def _takes(self, place: Place) -> np.ndarray:
        """What the readers of a slot would give, by column."""
        found = np.full(self.folded.hubs[place[0]].micros.shape[1], -FORBIDDEN)
        for target, at in self.readers[place]:
            found[at] = np.maximum(found[at], self.take[target])
        return found

    def _room(self, place: Place) -> np.ndarray:
        """What one use in a slot may pay, by own layout and column: all that the hub's other uses leave."""
        h, t = place
        hub = self.folded.hubs[h]
        if h not in self.spare:
            return hub.micros
        spare = self.spare[h]
        for u, slot in enumerate(hub.slots):
            if (h, u) in self.stale:
                self.stale.discard((h, u))
                paid = np.maximum(self.give[h, u][:, None] + self._takes((h, u)), 0.0) * slot.multiple
                spare += self.paid[h, u]
                spare -= paid
                self.paid[h, u] = paid
        room = spare + self.paid[h, t]
        return room / hub.slots[t].multiple if hub.slots[t].multiple > 1 else room

    def _pull(self, end: _End) -> None:
        """Raises the prices at an end by the slack of its edges."""
        if end.place is not None:
            room = self._room(end.place)
            limits = [(room[:, at] - self.take[target]).min(1) for target, at in self.readers[end.place]]
        else:
            assert end.target is not None
            limits = [
                (self._room(place)[:, at] - self.give[place][:, None]).min(0) for place, at in self.sources[end.target]
            ]
        price = limits[0] if len(limits) == 1 else np.minimum.reduce(limits)
        np.minimum(price, CAP, out=price)
        price[end.absent] = -FORBIDDEN
        self._set(end, price)

    def _set(self, end: _End, price: np.ndarray) -> None:
        if end.place is not None:
            self.give[end.place] = price
            if end.place[0] in self.spare:
                self.stale.add(end.place)
        else:
            assert end.target is not None
            self.take[end.target] = price
            self.stale.update(place for place, _ in self.sources[end.target] if place[0] in self.spare)

    def _price(self, end: _End) -> np.ndarray:
        if end.place is not None:
            return self.give[end.place]
        assert end.target is not None
        return self.take[end.target]

    def totals(self, g: int) -> np.ndarray:
        """Own cost plus prices of every strategy of a group."""
        total = self.cost[g].copy()
        for end in self.ends[g]:
            price = self._price(end)[end.index]
            total += price if end.multiple == 1 else price * end.multiple
        return total

    def visit(self, g: int, backwards: bool, everything: bool = False) -> np.ndarray:
        """Pulls and pushes; returns what the strategies cost beyond the cheapest, in between. `everything`: pulls
        from all sides and pushes to all."""
        ends = self.ends[g]
        for end in ends:
            if everything or end.ahead[not backwards]:
                self._pull(end)
        excess = self.totals(g)
        excess -= excess.min()
        given = np.minimum(excess, CAP)
        share = 1.0 / max(1, len(ends)) if everything else self.share[g]
        for end in ends:
            if everything or end.ahead[backwards]:
                price = self._price(end).copy()
                price[end.present] -= np.minimum.reduceat(given[end.order], end.starts) * (share / end.multiple)
                self._set(end, price)
        return excess

    def sweep(self, backwards: bool) -> None:
        """Visits all groups in turn."""
        for g in reversed(self.order) if backwards else self.order:
            self.visit(g, backwards)

    def bound(self) -> float:
        """The lower bound that the prices prove, in microseconds; what rounding made infeasible is taken off."""
        total = sum(n * float(self.totals(g).min()) for g, n in enumerate(self.counts))
        for h, hub in enumerate(self.folded.hubs):
            excess = -float(self.slack(h).min())
            if excess > 0.0:
                total -= excess * hub.count * sum(slot.multiple for slot in hub.slots)
        return total

    def slack(self, h: int) -> np.ndarray:
        """What bringing a hub's value from an own layout to a column costs beyond what the prices pay."""
        hub = self.folded.hubs[h]
        if h not in self.spare:
            return hub.micros - (self.give[h, 0][:, None] + self._takes((h, 0)))
        self._room((h, 0))
        return self.spare[h]

    def keep(self, within: float) -> list[np.ndarray]:
        """Per group the strategies that plans can have that cost at most the bound plus `within`."""
        found: dict[int, np.ndarray] = {}
        for g in self.order:
            found[g] = np.flatnonzero(self.visit(g, False, everything=True) <= within)
        return [found[g] for g in range(len(self.order))]

    def prices(self) -> tuple[dict[Place, np.ndarray], dict[Target, np.ndarray]]:
        """`give` and `take`."""
        return dict(self.give), dict(self.take)

    def pull(self, g: int) -> None:
        """Raises the prices of a group by all slack around it."""
        for end in self.ends[g]:
            self._pull(end)

    def fix(self, g: int, strategy: int) -> None:
        """Leaves a group one strategy."""
        only = np.full(len(self.cost[g]), FORBIDDEN)
        only[strategy] = self.cost[g][strategy]
        self.cost[g] = only

    def copy(self) -> Ascent:
        """Prices that go their own way."""
        twin = object.__new__(Ascent)
        twin.__dict__.update(self.__dict__)
        twin.cost = list(self.cost)
        twin.give, twin.take = dict(self.give), dict(self.take)  # arrays are replaced, never changed in place
        twin.spare = {h: spare.copy() for h, spare in self.spare.items()}
        twin.paid, twin.stale = dict(self.paid), set(self.stale)
        return twin
