"""Equal parts of a network, such as the layers of a model, solved as one.

Vertices are coloured by their tables, and then again and again by their colour and those of their neighbours. After a
few rounds the vertices in the middle of a chain of equal layers share colours, and those near its ends, or near
anything else that is different, have their own. A folded network has one group per colour. Its linear program is a
relaxation of that of the whole network: its variables are the averages over the members of a group, and its rows are
sums of rows. So its least cost is a lower bound for the whole, after any number of rounds. With one group per vertex
it is the program itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .network import Edge, Network

Target = tuple[int, int]
"""(group, position): what a consumer reads."""


@dataclass(frozen=True)
class Part:
    """The edges of a slot that lead to one group, one of them, and how many they are."""

    target: Target
    edge: Edge
    count: int


@dataclass(frozen=True)
class Slot:
    """Edges of a hub that play the same role: every member of the hub's group has `multiple` of them."""

    phase: int
    multiple: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class FoldedHub:
    """Hubs made by one group."""

    name: str
    group: int
    count: int
    own: np.ndarray
    micros: np.ndarray
    slots: tuple[Slot, ...]
    rows: np.ndarray
    """Numbers that the own layouts have in the network's hub."""
    columns: np.ndarray
    """Numbers that the columns have there."""

    @property
    def single(self) -> bool:
        """Whether each member has one consumer."""
        return len(self.slots) == 1 and self.slots[0].multiple == 1


@dataclass(frozen=True)
class Folded:
    """Groups of vertices and of hubs."""

    members: list[list[int]]
    cost: list[np.ndarray]
    hubs: list[FoldedHub]
    slot_of: dict[tuple[str, int, int], tuple[int, int]]
    """(hub, consumer, position) -> (folded hub, slot) of the edge."""
    group: dict[int, int]
    strategies: list[np.ndarray]
    """Per group, the numbers that its strategies have in the network."""


def colours(network: Network, rounds: int | None) -> tuple[dict[int, int], dict[int, int]]:
    """The colours after `rounds` rounds, and those of the round before; every vertex its own for None."""
    if rounds is None:
        each = {k: number for number, k in enumerate(network.cost)}
        return each, each
    gives: dict[int, list] = {k: [] for k in network.cost}
    needs: dict[int, list] = {k: [] for k in network.cost}
    for hub in network.hubs.values():
        gives[hub.maker].append(hub)
        for edge in hub.edges:
            needs[edge.consumer].append((edge.position, hub, edge))
    start = {}
    for k in network.cost:
        needs[k].sort(key=lambda item: item[0])
        made = tuple((h.result, id(h.own), id(h.micros), len(h.edges)) for h in gives[k])
        read = tuple((p, id(e.need), id(e.at), id(h.micros), e.phase) for p, h, e in needs[k])
        start[k] = (id(network.cost[k]), made, read)
    before = now = _numbered(start)
    for _ in range(rounds):
        before = now
        now = _numbered(
            {
                k: (
                    before[k],
                    tuple((h.result, tuple(sorted(_role(e, before) for e in h.edges))) for h in gives[k]),
                    tuple((p, h.result, before[h.maker]) for p, h, _ in needs[k]),
                )
                for k in network.cost
            }
        )
    return now, before


def _role(edge: Edge, colour: dict[int, int]) -> tuple[int, int, int]:
    return colour[edge.consumer], edge.position, edge.phase


def _numbered(keys: dict[int, tuple]) -> dict[int, int]:
    numbers: dict[tuple, int] = {}
    return {k: numbers.setdefault(key, len(numbers)) for k, key in keys.items()}


def fold(network: Network, rounds: int | None) -> Folded:
    """The folded network after so many rounds of colouring; unfolded for None."""
    group, before = colours(network, rounds)
    members: list[list[int]] = [[] for _ in range(max(group.values(), default=-1) + 1)]
    for k, colour in group.items():
        members[colour].append(k)
    gathered: dict[tuple[int, int], list] = {}
    for hub in network.hubs.values():
        gathered.setdefault((group[hub.maker], hub.result), []).append(hub)
    hubs, slot_of = [], {}
    for (maker, _), same in gathered.items():
        roles: dict[tuple, int] = {}
        parts: list[dict[Target, Part]] = []
        edges = 0
        slots_count: list[int] = []
        for hub in same:
            for edge in hub.edges:
                role = (hub.name, edge.consumer, edge.position) if rounds is None else _role(edge, before)
                slot = roles.setdefault(role, len(roles))
                if slot == len(parts):
                    parts.append({})
                    slots_count.append(0)
                target = (group[edge.consumer], edge.position)
                part = parts[slot].get(target)
                parts[slot][target] = Part(target, part.edge if part else edge, part.count + 1 if part else 1)
                slots_count[slot] += 1
                slot_of[hub.name, edge.consumer, edge.position] = len(hubs), slot
                edges += 1
        phases = [next(iter(p.values())).edge.phase for p in parts]
        slots = tuple(
            Slot(phase, total // len(same), tuple(p.values())) for phase, total, p in zip(phases, slots_count, parts)
        )
        first = same[0]
        numbers = (np.arange(n) for n in first.micros.shape)
        hubs.append(FoldedHub(first.name, maker, len(same), first.own, first.micros, slots, *numbers))
    cost = [network.cost[m[0]] for m in members]
    return Folded(members, cost, hubs, slot_of, group, [np.arange(len(c)) for c in cost])


def restrict(folded: Folded, keep: list[np.ndarray]) -> Folded:
    """The same with some strategies per group only, and the layouts that they use."""
    hubs, needs = [], {}
    for hub in folded.hubs:
        rows, own = np.unique(hub.own[keep[hub.group]], return_inverse=True)
        for slot in hub.slots:
            for part in slot.parts:
                if part.target not in needs:
                    needs[part.target] = np.unique(part.edge.need[keep[part.target[0]]], return_inverse=True)
        used = [part.edge.at[needs[part.target][0]] for slot in hub.slots for part in slot.parts]
        columns = np.unique(np.concatenate(used))
        slots = []
        for slot in hub.slots:
            parts = []
            for part in slot.parts:
                local, need = needs[part.target]
                at = np.searchsorted(columns, part.edge.at[local])
                parts.append(replace(part, edge=replace(part.edge, need=need, at=at)))
            slots.append(replace(slot, parts=tuple(parts)))
        table = hub.micros[np.ix_(rows, columns)]
        numbers = {"rows": hub.rows[rows], "columns": hub.columns[columns]}
        hubs.append(replace(hub, own=own, micros=table, slots=tuple(slots), **numbers))
    cost = [c[k] for c, k in zip(folded.cost, keep)]
    return replace(folded, cost=cost, hubs=hubs, strategies=[s[k] for s, k in zip(folded.strategies, keep)])
