"""Plans of large problems within a memory limit, by a price for bytes.

At the time at which the fastest plan holds most, bytes get a price, and the problem is solved as one without a limit.
The price is raised until a plan fits, and then halved in: a lower one gives a faster plan. What a plan holds, and what
it costs, says `evaluate.py`; the price only guides. It proves nothing, so the bound is that without a limit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..ir.placement import Layout
from .evaluate import Assignment, layout_of
from .network import FORBIDDEN, MICRO, Hub, Network
from .problem import Problem, intervals
from .search import Search
from .unlimited import plan_from_prices

PRICES = 8
"""Prices that are tried."""
FIRST = 0.05
"""The first price makes the limit cost this part of the step."""
FACTOR = 4.0
"""By which the price rises until a plan fits."""


def priced_plans(search: Search, network: Network) -> None:
    """Offers plans at several prices."""
    problem, limit = search.problem, search.problem.settings.memory_limit_bytes
    assert limit is not None and search.fastest is not None
    time = int(np.argmax(search.fastest.memory_bytes))
    price, low, high = FIRST * search.fastest.seconds * MICRO / limit, 0.0, np.inf
    for _ in range(PRICES):
        assignment = plan_from_prices(problem, _priced(problem, network, time, price))
        if _offer(search, problem, assignment, limit) <= limit:
            high = price
        else:
            low = price
        price = price * FACTOR if high == np.inf else (low + high) / 2


def _offer(search: Search, problem: Problem, assignment: Assignment, limit: int) -> int:
    """Offers an assignment with as many of its kept copies as fit, the dearest per byte first; returns the
    smallest peak."""

    def worth(copy: tuple[str, Layout]) -> float:
        name, layout = copy
        own = layout_of(problem, assignment.chosen, name)
        return problem.transport_s(name, own, layout) / max(1, problem.local_bytes(name, layout))

    copies = sorted(assignment.kept, key=lambda copy: (-worth(copy), copy[0], str(copy[1])))
    least = search.offer(replace(assignment, kept=frozenset())).peak_bytes
    fit, over = 0, len(copies) + 1
    while over - fit > 1:
        count = (fit + over) // 2 if over <= len(copies) else len(copies)
        peak = search.offer(replace(assignment, kept=frozenset(copies[:count]))).peak_bytes
        fit, over = (count, over) if peak <= limit else (fit, count)
        least = min(least, peak)
    return least


def _priced(problem: Problem, network: Network, time: int, price: float) -> Network:
    """The network with the price of what is held at a time. Equal parts stay equal objects, which `fold` relies on."""
    known: dict[tuple, tuple] = {}
    priced = Network(dict(network.cost), dict(network.hubs), network.tied)
    for hub in network.hubs.values():
        owned, copied = _held(problem, hub, time)
        value = problem.value(hub.name)
        kind = value.shape, value.dtype, hub.name in problem.parameters, hub.name in problem.free
        cost = priced.cost[hub.maker]
        key = id(cost), id(hub.own), id(hub.micros), owned, copied, kind
        if key not in known:
            own = (
                np.array([problem.own_bytes(hub.name, x) for x in hub.sources]) if owned else np.zeros(len(hub.sources))
            )
            copy = np.array([problem.local_bytes(hub.name, x) for x in hub.targets]) * float(copied)
            other = np.array([[x != y for y in hub.targets] for x in hub.sources], float)
            micros = np.minimum(hub.micros + price * copy * other, FORBIDDEN)
            known[key] = cost + price * own[hub.own], micros, cost, hub  # the last two keep their ids from reuse
        priced.cost[hub.maker] = known[key][0]
        priced.hubs[hub.name] = replace(hub, micros=known[key][1])
    return priced


def _held(problem: Problem, hub: Hub, time: int) -> tuple[bool, bool]:
    """Whether a value, and copies of it, are held at a time, as far as that does not depend on the plan."""
    when = intervals(problem, hub.name)

    def covers(*spans: tuple[int, int]) -> bool:
        return any(max(first, 0) <= time <= last for first, last in spans)

    saved = when.saved[0] <= when.saved[1]
    owned = covers(when.own, when.own_backward) or (saved and covers(when.tail, when.saved))
    return owned, covers(when.forward, when.backward, when.kept)
