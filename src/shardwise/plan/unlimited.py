"""Plans without regard to memory: a bound by ascent, then an exact program over what a better plan can still have.

The network is reduced, and where it is large, equal layers are folded. `ascent.py` gives a lower bound and prices.
- A small network: strategies and pairs of layouts that no plan within `within` of the bound can have are dropped. What
  is left is a small linear program, whose optimum is the true one if it is at most the bound plus `within`; if it is
  not, or nothing is left, more is kept. HiGHS settles the integers where the relaxation has not.
- A large one: plans come from the prices (`rounding.py`), and the program of what occurs in them mixes the best
  (fusion, as Lempitsky et al. 2010 do it). The bound stays that of the ascent, unless what is left is a small program.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from .ascent import Ascent
from .certificate import Certificate, certify
from .evaluate import Assignment
from .fold import Folded, fold, restrict
from .formulate import Formulation, Pair, all_kept
from .network import FORBIDDEN, MICRO, Network, expand, least, reduce
from .price import Relaxed, paying, relax, settle
from .problem import Problem
from .rounding import Around, from_prices, mend, total_micros
from .search import GAP, Search

FOLD_ROUNDS = 2
"""Rounds of colouring of a large network."""
LARGE = 400
"""Vertices of a reduced network above which it is folded and solved only near the optimum."""
MAX_SWEEPS = 64
"""Pairs of a forward and a backward sweep."""
STEP = 4
"""Pairs between two looks at the bound."""
SLOW = 1.2e-4
"""Relative gain of a step that ends the ascent."""
ATTEMPTS = 16
"""Times that more, or less, is kept of a small network."""
GROW = 4.0
SHRINK = 3.0
"""By which the margin changes in between."""
FIRST = 0.5
"""The first margin, as a part of what further sweeps would gain: a small program finds a plan, the next proves it."""
MOST_EXACT = 20_000
"""Pairs in the program of a network that is not folded."""
MOST_PAIRS = 6_000
"""Pairs in the program of a folded network; it is slower than that of an unfolded one of its size."""


def unlimited(search: Search, network: Network) -> bool:
    """Solves without regard to memory; False where the solver failed."""
    problem, reduced = search.problem, reduce(network)
    large = len(reduced.cost) > LARGE
    folded = fold(reduced, FOLD_ROUNDS if large else None)
    ascent = Ascent(folded)
    within = climb(ascent)
    search.bound_s = max(search.bound_s, ascent.bound() / MICRO)
    search.certificate = partial(certify, network, reduced, folded, *ascent.prices())
    if large:
        return _near(search, reduced, ascent)
    solved = _exact(search, reduced, ascent, within)
    if solved is None:
        search.offer(rounded(problem, reduced, ascent))
        return True
    search.certificate = partial(_prove, search, network, reduced, folded)
    return solved


def climb(ascent: Ascent) -> float:
    """Sweeps until little is gained; returns the first margin, a part of what further sweeps are guessed to gain."""
    before, gain = ascent.bound(), 0.0
    within = abs(before)
    for _ in range(MAX_SWEEPS // STEP):
        for _ in range(STEP):
            ascent.sweep(backwards=False)
            ascent.sweep(backwards=True)
        now = ascent.bound()
        last, gain, before = gain, now - before, now
        ratio = min(0.9, max(0.5, gain / last)) if last > 0 else 0.5
        within = FIRST * gain * ratio / (1.0 - ratio)
        if gain < SLOW * abs(now):
            break
    return within


def _near(search: Search, reduced: Network, ascent: Ascent) -> bool:
    """A plan of a large network from the prices, and the program of what it leaves if that is small."""
    low = ascent.bound()
    upper = search.offer(rounded(search.problem, reduced, ascent)).seconds * MICRO
    narrowed, _ = tighten(ascent, upper - low + GAP * abs(low))
    if _count(narrowed) > MOST_PAIRS:
        return True
    form = Formulation(search.problem, reduced, narrowed, limited=False, start=_pairs(narrowed))
    relaxed = relax(form)
    if relaxed.status == "optimal" and form.unmet(relaxed.x) < 1e-7:
        search.variables = max(search.variables, form.program.columns)
        search.bound_s = max(search.bound_s, min(relaxed.bound, upper) / MICRO)
        search.offer(_mended(search.problem, reduced, narrowed, form.rounded(relaxed.x)))
    return relaxed.status == "optimal"


def rounded(problem: Problem, reduced: Network, ascent: Ascent) -> Assignment:
    """The best mix of a plan made forwards and one made backwards. Leaves the prices after a forward sweep."""
    around = Around(reduced)
    plans = [mend(around, from_prices(ascent, around, backwards=False))]
    ascent.sweep(backwards=False)
    plans.append(mend(around, from_prices(ascent, around, backwards=True)))
    occurs: list[set[int]] = [set() for _ in ascent.folded.members]
    for plan in plans:
        for k, strategy in plan.items():
            occurs[ascent.folded.group[k]].add(strategy)
    narrowed = restrict(ascent.folded, [np.array(sorted(strategies)) for strategies in occurs])
    form = Formulation(problem, reduced, narrowed, limited=False)
    relaxed = relax(form)
    if relaxed.status == "optimal":
        plans.append(mend(around, _spread(narrowed, form.rounded(relaxed.x))))
    return _assignment(problem, reduced, min(plans, key=lambda plan: total_micros(reduced, plan)))


def _spread(folded: Folded, chosen: list[int]) -> dict[int, int]:
    """The choice in which all members of a group have the strategy chosen for it."""
    numbers = (int(strategies[s]) for strategies, s in zip(folded.strategies, chosen))
    return {k: number for number, members in zip(numbers, folded.members) for k in members}


def _assignment(problem: Problem, reduced: Network, chosen: dict[int, int]) -> Assignment:
    full = expand(reduced, chosen)
    complete = tuple(full[k] for k in range(len(problem.vertices)))
    return Assignment(complete, all_kept(problem, complete))


def _mended(problem: Problem, reduced: Network, folded: Folded, chosen: list[int]) -> Assignment:
    """The plan of a choice for every group, improved vertex by vertex."""
    return _assignment(problem, reduced, mend(Around(reduced), _spread(folded, chosen)))


def plan_from_prices(problem: Problem, network: Network) -> Assignment:
    """A plan that is good for the costs of a network, without a bound."""
    reduced = reduce(network)
    ascent = Ascent(fold(reduced, FOLD_ROUNDS))
    climb(ascent)
    return rounded(problem, reduced, ascent)


def _count(folded: Folded) -> int:
    """The number of pairs that are not forbidden."""
    return sum(int((hub.micros < FORBIDDEN).sum()) for hub in folded.hubs)


def _pairs(folded: Folded) -> list[Pair]:
    """All that are not forbidden."""
    return _listed([hub.micros < FORBIDDEN for hub in folded.hubs])


def _listed(tables: list[np.ndarray]) -> list[Pair]:
    return [(h, o, q) for h, table in enumerate(tables) for o, q in np.argwhere(table).tolist()]


def _prove(search: Search, network: Network, reduced: Network, folded: Folded) -> Certificate:
    """Prices at the optimum of the whole linear program, which nothing but the proof needs."""
    form = Formulation(search.problem, reduced, folded, limited=False)
    relaxed = settle(form)
    assert relaxed is not None, "the program was solved before"
    return certify(network, reduced, folded, *form.prices(relaxed.duals))


def tighten(ascent: Ascent, within: float) -> tuple[Folded, list[np.ndarray]]:
    """What plans can have that cost at most the bound plus `within`; and by hub, own layout and column what plans with
    that pair cost at least beyond the bound."""
    keep = ascent.keep(within)
    narrowed = restrict(ascent.folded, keep)
    excess = [ascent.totals(g)[k] for g, k in enumerate(keep)]
    excess = [e - ascent.totals(g).min() for g, e in enumerate(excess)]
    hubs, extra = [], []
    for h, hub in enumerate(narrowed.hubs):
        least_cost = ascent.slack(h)[np.ix_(hub.rows, hub.columns)]
        least_cost += least(excess[hub.group], hub.own, len(hub.rows))[:, None]
        reading = np.full(len(hub.columns), FORBIDDEN)
        for slot in hub.slots:
            for part in slot.parts:
                edge = part.edge
                read = least(excess[part.target[0]], edge.need, len(edge.at))
                reading[edge.at] = np.minimum(reading[edge.at], read)
        least_cost += reading
        hubs.append(replace(hub, micros=np.where(least_cost <= within, hub.micros, FORBIDDEN)))
        extra.append(least_cost)
    return replace(narrowed, hubs=hubs), extra


def _exact(search: Search, reduced: Network, ascent: Ascent, within: float) -> bool | None:
    """Solves the program of a small network; False where the solver failed, None where too much would be left to
    know the optimum. Then a smaller margin still gives a plan, and a bound of that margin."""
    low = ascent.bound()
    upper = most = np.inf
    start = within  # pairs beyond it are added where they pay
    for _ in range(ATTEMPTS):
        within = min(within, upper - low) + GAP * abs(low) + 1e-6
        if within >= most:
            return None
        narrowed, extra = tighten(ascent, within)
        if _count(narrowed) > MOST_EXACT:
            most = within
            within /= SHRINK
            continue
        pairs = _listed([(e <= start) & (hub.micros < FORBIDDEN) for e, hub in zip(extra, narrowed.hubs)])
        start = within
        form = Formulation(search.problem, reduced, narrowed, limited=False, start=pairs)
        relaxed = relax(form)
        if relaxed.status != "optimal":
            return False
        search.variables = max(search.variables, form.program.columns)
        bound, found = low + within, np.inf
        if form.unmet(relaxed.x) < 1e-7:
            bound = min(bound, relaxed.bound)
            plan = _mended(search.problem, reduced, narrowed, form.rounded(relaxed.x))
            found = search.offer(plan).seconds * MICRO
            if found > bound + GAP * abs(bound) and form.fractional(relaxed.x):
                bound, found = _branch(search, form, relaxed, min(upper, found), low + within)
        search.bound_s = max(search.bound_s, bound / MICRO)
        upper = min(upper, found)
        if upper < np.inf and upper - bound <= GAP * abs(upper):
            break
        within = max(GROW * within, 1.05 * (min(relaxed.bound, upper) - low))
    return True if most == np.inf else None


def _branch(search: Search, form: Formulation, relaxed: Relaxed, known: float, ceiling: float) -> tuple[float, float]:
    """The bound that the integer program gives, and the cost of the best plan: the known one, or what is found.

    What has a reduced cost above the distance from the relaxation to the known plan is in no better one.
    """
    room = known - relaxed.bound + 1e-6
    form.add(paying(form, relaxed.duals, -room, every=True))
    form.program.solve()
    allowed = form.program.reduced_costs() <= room
    search.variables = max(search.variables, form.program.columns)
    solution = form.program.solve_integer(form.integer_columns(), search.max_nodes, GAP * 0.1, allowed)
    search.nodes += solution.nodes
    if solution.status == "infeasible":
        return min(known, ceiling), known
    bound = min(solution.bound, known, ceiling)
    if solution.status not in ("optimal", "feasible"):
        return bound, known
    return bound, min(known, search.offer(form.assignment(solution.x)).seconds * MICRO)
