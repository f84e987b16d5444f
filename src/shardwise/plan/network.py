"""The planning problem as arrays, and exact reductions of it.

A network has vertices (what chooses) and hubs (values). Vertex k pays cost[k][s] for its strategy s. A hub reads the
layout in which its maker gives the value (`own`), every edge the layout in which a consumer needs it (`need`, numbered
per consumer; `at` says where that stands in the hub's table), and pays `micros[own, q]` once for every distinct q.

Without a memory limit these steps do not change the least cost (`reduce`); `expand` undoes them:
- a parameter and its gradient, tied to one layout, become one vertex;
- series: a vertex between two hubs, the only consumer of one and the maker of the other, which has one consumer, makes
  way for one table between its neighbours, the (min, +) product of its tables;
- leaf: a vertex with one hub, which has no other edge, becomes a cost of its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import PlanError
from ..ir.graph import ITEM_BYTES
from ..ir.placement import Layout
from .problem import Problem
from .reshard import Resharding

MICRO = 1e6
FORBIDDEN = 1e12
"""Microseconds that stand for infinity, so that sums and differences stay finite."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A consumer of a hub. need: strategy -> layout that it needs, at: that layout -> column of the hub's table."""

    consumer: int
    position: int
    phase: int
    need: np.ndarray
    at: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        """Strategy -> column of the hub's table."""
        return self.at[self.need]

    def local(self, column: int) -> int:
        """The number that a column has among the layouts that the consumer needs; -1 where it needs it never."""
        found = np.flatnonzero(self.at == column)
        return int(found[0]) if len(found) else -1

    def uses(self, column: int) -> bool:
        """Whether the consumer ever needs this column."""
        return bool((self.at == column).any())


@dataclass(frozen=True, slots=True)
class Hub:
    """A value: what it costs to bring it from its maker to its consumers."""

    name: str
    maker: int
    result: int
    own: np.ndarray
    micros: np.ndarray
    edges: tuple[Edge, ...]
    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]


@dataclass
class Network:
    """Vertices and hubs; arrays that are equal by construction are the same object, which `fold` relies on."""

    cost: dict[int, np.ndarray]
    hubs: dict[str, Hub]
    tied: dict[int, tuple[int, np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Parameter -> (gradient, its own strategies, the gradient's) of the vertex that both became."""
    removed: list[tuple[int, np.ndarray, Hub | None, Hub | None]] = field(default_factory=list)
    """(vertex, its cost, hub it consumed, hub it made) of every step, in order."""
    second: dict[tuple[int, int], int] = field(default_factory=dict)
    """(vertex that two became, position behind the needs of the first) -> the second."""

    def reader(self, edge: Edge) -> tuple[int, int]:
        """The vertex of the problem, and the position among its needs, that an edge leads to."""
        second = self.second.get((edge.consumer, edge.position))
        return (edge.consumer, edge.position) if second is None else (second, 0)


class _Once:
    """Results by the identity of the arguments, so that equal parts of a graph share arrays."""

    def __init__(self) -> None:
        self.known: dict[tuple, tuple] = {}

    def __call__(self, function: Callable, *args: object) -> Any:
        key = (function, *(a if _small(a) else id(a) for a in args))
        if key not in self.known:
            self.known[key] = (function(*args), args)
        return self.known[key][0]


def _small(argument: object) -> bool:
    """Numbers and shapes are known by their value."""
    return isinstance(argument, int) or (isinstance(argument, tuple) and (not argument or isinstance(argument[0], int)))


def build_network(problem: Problem) -> Network:
    """The arrays of a problem, with parameters and gradients tied."""
    once = _Once()
    network = Network({}, {})
    for k, vertex in enumerate(problem.vertices):
        network.cost[k] = once(_micros, vertex.seconds)
    for name, maker in problem.made_by.items():
        if problem.used_by[name]:
            network.hubs[name] = _hub(problem, name, maker, once)
    for parameter, gradient in problem.ties:
        _tie(problem, network, parameter, gradient, once)
    return network


def _micros(seconds: tuple[float, ...]) -> np.ndarray:
    return np.array(seconds) * MICRO


def _column(table: tuple[tuple[Layout | None, ...], ...], position: int) -> tuple[np.ndarray, tuple[Layout, ...]]:
    """(strategy -> number, layouts by number) of one operand or result."""
    numbers: dict[Layout, int] = {}
    index = []
    for row in table:
        layout = row[position]
        assert layout is not None
        index.append(numbers.setdefault(layout, len(numbers)))
    return np.array(index), tuple(numbers)


def _union(*columns: tuple[np.ndarray, tuple[Layout, ...]]) -> tuple[tuple[Layout, ...], list[np.ndarray]]:
    """(all layouts, number of each layout of every column); equal columns share an array, however many there are."""
    numbers: dict[Layout, int] = {}
    places: dict[int, np.ndarray] = {}
    for column in columns:
        if id(column) not in places:
            places[id(column)] = np.array([numbers.setdefault(layout, len(numbers)) for layout in column[1]])
    return tuple(numbers), [places[id(column)] for column in columns]


def _hub(problem: Problem, name: str, maker: int, once: _Once) -> Hub:
    vertex, value = problem.vertices[maker], problem.value(name)
    result = vertex.gives.index(name)
    own, sources = once(_column, vertex.give_layouts, result)
    users = problem.used_by[name]
    columns = [once(_column, problem.vertices[v].need_layouts, position) for v, position in users]
    targets, places = once(_union, *columns)

    item, times = ITEM_BYTES.get(value.dtype, 8), problem.graph.times[name]
    micros = once(_table, problem.resharding_of(name), value.shape, item, sources, targets, times)
    edges = tuple(
        Edge(v, position, problem.vertices[v].phase, column[0], at)
        for (v, position), column, at in zip(users, columns, places)
    )
    return Hub(name, maker, result, own, micros, edges, sources, targets)


def _table(
    resharding: Resharding,
    shape: tuple[int, ...],
    item: int,
    sources: tuple[Layout, ...],
    targets: tuple[Layout, ...],
    times: int,
) -> np.ndarray:
    return np.minimum(resharding.table(shape, item, sources, targets) * (MICRO * times), FORBIDDEN)


def _take(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    return array[index]


def _take_both(a: np.ndarray, at: np.ndarray, b: np.ndarray, there: np.ndarray) -> np.ndarray:
    return a[at] + b[there]


def _common(stored: tuple, wanted: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Strategies of a parameter and of its gradient that have the same layout."""
    number = {layouts[0]: k for k, layouts in enumerate(wanted)}
    pairs = [(k, number[layouts[0]]) for k, layouts in enumerate(stored) if layouts[0] in number]
    both = np.array(pairs, dtype=int).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _tie(problem: Problem, network: Network, parameter: int, gradient: int, once: _Once) -> None:
    """One vertex for both: it has the needs of the first and then that of the second, and gives what both give."""
    first, second = problem.vertices[parameter], problem.vertices[gradient]
    name = second.needs[0]
    mine, its = once(_common, problem.vertices[parameter].give_layouts, problem.vertices[gradient].need_layouts)
    if not len(mine):
        raise PlanError(f"{problem.vertices[gradient].name} cannot have the layout of its parameter")
    network.tied[parameter] = (gradient, mine, its)
    network.second[parameter, len(first.needs)] = gradient
    network.cost[parameter] = once(_take_both, network.cost[parameter], mine, network.cost[gradient], its)
    del network.cost[gradient]
    for given in first.gives:
        if given in network.hubs:
            hub = network.hubs[given]
            network.hubs[given] = replace(hub, own=once(_take, hub.own, mine))
    for place, given in enumerate(second.gives):
        if given in network.hubs:
            hub = network.hubs[given]
            own = once(_take, hub.own, its)
            network.hubs[given] = replace(hub, maker=parameter, result=len(first.gives) + place, own=own)
    for needed in dict.fromkeys((*first.needs, name)):
        hub = network.hubs[needed]
        edges = []
        for e in hub.edges:
            if e.consumer == gradient:
                e = replace(e, consumer=parameter, position=len(first.needs), need=once(_take, e.need, its))
            elif e.consumer == parameter:
                e = replace(e, need=once(_take, e.need, mine))
            edges.append(e)
        network.hubs[needed] = replace(hub, edges=tuple(edges))


def _product(cost: np.ndarray, left: np.ndarray, columns: np.ndarray, own: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Least cost from each own layout of the first hub to each column of the second, through the vertex between."""
    through = np.full((left.shape[1], right.shape[0]), FORBIDDEN)
    np.minimum.at(through, (columns, own), cost)
    return np.minimum(min_plus(min_plus(left, through), right), FORBIDDEN)


def min_plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The (min, +) product of two tables."""
    return np.stack([(row[:, None] + b).min(0) for row in a])


def least(cost: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """The least cost per index."""
    found = np.full(count, FORBIDDEN)
    np.minimum.at(found, index, cost)
    return found


def _sink(
    cost: np.ndarray, maker_cost: np.ndarray, own: np.ndarray, micros: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Cost of a maker, its only consumer included."""
    return maker_cost + (micros + least(cost, columns, micros.shape[1])).min(1)[own]


def _source(
    cost: np.ndarray, own: np.ndarray, micros: np.ndarray, user_cost: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Cost of a consumer, a maker without needs included."""
    return user_cost + (micros + least(cost, own, micros.shape[0])[:, None]).min(0)[columns]


def reduce(network: Network) -> Network:
    """Removes what can be removed exactly. See the top of the file."""
    net = Network(dict(network.cost), dict(network.hubs), network.tied)
    once = _Once()
    made: dict[int, set[str]] = {k: set() for k in net.cost}
    read: dict[int, set[str]] = {k: set() for k in net.cost}
    count = dict.fromkeys(net.cost, 0)
    for hub in net.hubs.values():
        made[hub.maker].add(hub.name)
        for edge in hub.edges:
            read[edge.consumer].add(hub.name)
            count[edge.consumer] += 1
    queue = list(net.cost)[::-1]
    while queue:
        k = queue.pop()
        if k not in net.cost or count[k] > 1 or len(made[k]) > 1 or count[k] + len(made[k]) == 0:
            continue
        before = next((net.hubs[n] for n in read[k]), None)
        after = next((net.hubs[n] for n in made[k]), None)
        if any(hub is not None and len(hub.edges) > 1 for hub in (before, after)):
            continue
        maker = before.maker if before else None
        user = after.edges[0].consumer if after else None
        if maker == user or k in (maker, user):
            continue
        _remove(net, k, before, after, once)
        for hub, near, far in ((before, maker, made), (after, user, read)):
            if hub is not None and near is not None:
                far[near].discard(hub.name)
        if before and after:
            assert maker is not None and user is not None
            made[maker].add(after.name)
            read[user].add(after.name)
        elif user is not None:
            count[user] -= 1
        queue += [x for x in (user, maker) if x is not None]
    return net


def _remove(net: Network, k: int, before: Hub | None, after: Hub | None, once: _Once) -> None:
    cost = net.cost.pop(k)
    net.removed.append((k, cost, before, after))
    columns = once(_take, before.edges[0].at, before.edges[0].need) if before else None
    onward = once(_take, after.edges[0].at, after.edges[0].need) if after else None
    if before and after:
        table = once(_product, cost, before.micros, columns, after.own, after.micros)
        del net.hubs[before.name]
        net.hubs[after.name] = replace(after, maker=before.maker, result=before.result, own=before.own, micros=table)
    elif before:
        del net.hubs[before.name]
        m = before.maker
        net.cost[m] = once(_sink, cost, net.cost[m], before.own, before.micros, columns)
    elif after:
        del net.hubs[after.name]
        z = after.edges[0].consumer
        net.cost[z] = once(_source, cost, after.own, after.micros, net.cost[z], onward)


def expand(net: Network, chosen: dict[int, int]) -> dict[int, int]:
    """The choice of every vertex of the problem from that of the vertices that are left."""
    full = dict(chosen)
    for k, cost, before, after in reversed(net.removed):
        total = cost.copy()
        if before:
            total += before.micros[before.own[full[before.maker]], before.edges[0].columns]
        if after:
            edge = after.edges[0]
            total += after.micros[after.own, edge.columns[full[edge.consumer]]]
        full[k] = int(np.argmin(total))
    for parameter, (gradient, mine, its) in net.tied.items():
        full[gradient] = int(its[full[parameter]])
        full[parameter] = int(mine[full[parameter]])
    return full
