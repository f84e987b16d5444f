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

from dataclasses import dataclass, field

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

    number: int
    """Of its prices."""
    made: bool
    multiple: int
    index: np.ndarray
    """Strategy -> layout."""
    order: np.ndarray
    starts: np.ndarray
    present: np.ndarray
    absent: np.ndarray
    """Layouts that no strategy has."""
    edges: list[tuple[Place, int, np.ndarray | slice]] = field(default_factory=list)
    """(slot, prices on the other side, columns of the hub's table) of all uses that it stands for."""
    shared: tuple[Place, ...] = ()
    """Slots among them of hubs with several uses."""
    table: np.ndarray | None = None
    """What the only use costs, where the hub has no other: layouts here by layouts there."""
    ahead: tuple[bool, bool] = (False, False)
    """Whether the other side is visited later, in a forward and in a backward sweep."""


def _end(number: int, made: bool, multiple: int, index: np.ndarray, count: int) -> _End:
    order = np.argsort(index, kind="stable")
    present, starts = np.unique(index[order], return_index=True)
    absent = np.setdiff1d(np.arange(count), present)
    return _End(number, made, multiple, index, order, starts, present, absent)


def _whole(at: np.ndarray, columns: int) -> np.ndarray | slice:
    """An index of all columns as a slice, which copies nothing."""
    return slice(None) if len(at) == columns and bool((at == np.arange(columns)).all()) else at


class Ascent:
    """Prices of a folded network, always feasible."""

    def __init__(self, folded: Folded):
        self.folded = folded
        self.cost = list(folded.cost)
        self.counts = [len(m) for m in folded.members]
        self.price: list[np.ndarray] = []
        """By the number of the end; replaced, never changed in place."""
        self.ends: list[list[_End]] = [[] for _ in folded.members]
        self.give: dict[Place, _End] = {}
        self.take: dict[Target, _End] = {}
        self.spare: dict[int, np.ndarray] = {}
        """Hub with several uses -> micros without what is paid."""
        self.paid: dict[Place, np.ndarray] = {}
        self.stale: set[Place] = set()
        """Slots whose prices have changed since `paid` was computed."""
        for h in range(len(folded.hubs)):
            self._add_hub(h)
        middle = [m[len(m) // 2] for m in folded.members]
        self.order = sorted(range(len(middle)), key=lambda g: middle[g])
        self._finish()

    def _add_end(self, group: int, made: bool, multiple: int, index: np.ndarray, count: int) -> _End:
        end = _end(len(self.price), made, multiple, index, count)
        self.ends[group].append(end)
        self.price.append(np.zeros(count))
        self.price[end.number][end.absent] = -FORBIDDEN
        return end

    def _add_hub(self, h: int) -> None:
        hub = self.folded.hubs[h]
        owns, columns = hub.micros.shape
        if not hub.single:
            self.spare[h] = hub.micros.copy()
        for t, slot in enumerate(hub.slots):
            place = h, t
            maker = self.give[place] = self._add_end(hub.group, True, slot.multiple, hub.own, owns)
            for part in slot.parts:
                if part.target not in self.take:
                    count = len(part.edge.at)
                    self.take[part.target] = self._add_end(part.target[0], False, 1, part.edge.need, count)
                reader, at = self.take[part.target], _whole(part.edge.at, columns)
                maker.edges.append((place, reader.number, at))
                reader.edges.append((place, maker.number, at))
            if not hub.single:
                self.paid[place] = np.zeros((owns, columns))

    def _finish(self) -> None:
        """Which ends look ahead, the part of a vertex's excess that each gets, and shortcuts for simple ends."""
        rank = {g: r for r, g in enumerate(self.order)}
        owner = {end.number: rank[g] for g, ends in enumerate(self.ends) for end in ends}
        self.share: list[float] = []
        for g, ends in enumerate(self.ends):
            for end in ends:
                others = [owner[number] for _, number, _ in end.edges]
                end.ahead = max(others) >= rank[g], min(others) <= rank[g]
                end.shared = tuple(place for place, _, _ in end.edges if place[0] in self.spare)
                if len(end.edges) == 1 and not end.shared:
                    (h, _), _, at = end.edges[0]
                    table = self.folded.hubs[h].micros[:, at]
                    end.table = table if end.made else table.T
            most = max((sum(e.ahead[d] for e in ends) for d in (0, 1)), default=1)
            self.share.append(1.0 / max(most, 1))

    def _takes(self, place: Place) -> np.ndarray:
        """What the readers of a slot would give, by column."""
        found = np.full(self.folded.hubs[place[0]].micros.shape[1], -FORBIDDEN)
        for _, number, at in self.give[place].edges:
            found[at] = np.maximum(found[at], self.price[number])
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
                paid = self.price[self.give[h, u].number][:, None] + self._takes((h, u))
                np.maximum(paid, 0.0, out=paid)
                paid *= slot.multiple
                spare += self.paid[h, u]
                spare -= paid
                self.paid[h, u] = paid
        room = spare + self.paid[h, t]
        return room / hub.slots[t].multiple if hub.slots[t].multiple > 1 else room

    def _pull(self, end: _End) -> None:
        """Raises the prices at an end by the slack of its edges."""
        if end.table is not None:
            price = (end.table - self.price[end.edges[0][1]]).min(1)
        else:
            price = np.full(len(self.price[end.number]), CAP)
            for place, number, at in end.edges:
                room = self._room(place)[:, at]
                table = room if end.made else room.T
                np.minimum(price, (table - self.price[number]).min(1), out=price)
        np.minimum(price, CAP, out=price)
        if len(end.absent):
            price[end.absent] = -FORBIDDEN
        self._set(end, price)

    def _set(self, end: _End, price: np.ndarray) -> None:
        self.price[end.number] = price
        if end.shared:
            self.stale.update(end.shared)

    def totals(self, g: int) -> np.ndarray:
        """Own cost plus prices of every strategy of a group."""
        total = self.cost[g].copy()
        for end in self.ends[g]:
            price = self.price[end.number][end.index]
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
                price = self.price[end.number].copy()
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
            return hub.micros - (self.price[self.give[h, 0].number][:, None] + self._takes((h, 0)))
        self._room((h, 0))
        return self.spare[h]

    def keep(self, within: float) -> list[np.ndarray]:
        """Per group the strategies that plans can have that cost at most the bound plus `within`."""
        found: dict[int, np.ndarray] = {}
        for g in self.order:
            found[g] = np.flatnonzero(self.visit(g, False, everything=True) <= within)
        return [found[g] for g in range(len(self.order))]

    def prices(self) -> tuple[dict[Place, np.ndarray], dict[Target, np.ndarray]]:
        """`give` by slot and `take` by what is read."""
        give = {place: self.price[end.number] for place, end in self.give.items()}
        return give, {target: self.price[end.number] for target, end in self.take.items()}
