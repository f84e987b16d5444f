"""Plans within a memory limit: memory rows are added for the times at which a solution exceeds it, until none does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import MemoryLimitError
from .evaluate import evaluate
from .fallback import simple_plans
from .fold import fold
from .formulate import PEAK_PRICE, Formulation
from .network import MICRO, Network, build_network
from .price import Relaxed, paying, settle
from .priced import priced_plans
from .problem import Problem
from .search import GAP, Search

LARGE = 100_000
"""Pairs of layouts in a network above which no program is solved."""
MEDIUM = 5_000
"""Columns of a program above which a plan near the bound is enough."""
NEAR = 0.015
"""How near that is."""
FIRST_STEP = 0.003
"""Reduced cost of the columns among which integers are settled first, relative to the bound."""
STEPS = 8
NODES = 20
"""Nodes of each of these searches."""
MAX_ROUNDS = 60
"""Rounds of adding violated memory rows; afterwards rows for all times are added at once."""


def within_limit(search: Search, network: Network) -> bool:
    """Solves within the memory limit; False where the solver failed. Raises MemoryLimitError where nothing fits."""
    problem, limit = search.problem, search.problem.settings.memory_limit_bytes
    assert limit is not None
    if sum(hub.micros.size for hub in network.hubs.values()) > LARGE:
        priced_plans(search, network)
        for assignment in () if search.best else simple_plans(problem):
            search.offer(assignment)
        if search.best is None and search.smallest_bytes is not None:
            raise too_little(problem, limit, search.smallest_bytes, proven=False)
        return True
    form = Formulation(problem, network, fold(network, None), limited=True)
    relaxed = _with_memory(form, limit)
    if relaxed is None:
        least = least_memory(problem)
        if least > limit:
            raise too_little(problem, limit, least)
        return False
    search.bound_s = max(search.bound_s, relaxed.bound / MICRO)
    search.offer(form.assignment(relaxed.x))
    if form.program.columns > MEDIUM:
        return _nearly(search, form, relaxed, limit)
    for _ in range(MAX_ROUNDS):
        slack = _slack(search, relaxed)
        form.add(paying(form, relaxed.duals, -slack, every=True))
        solution = form.program.solve_integer(form.integer_columns(), search.max_nodes, GAP * 0.1)
        search.nodes += solution.nodes
        search.variables = max(search.variables, form.program.columns)
        if solution.status not in ("optimal", "feasible"):
            return False
        search.bound_s = max(search.bound_s, min(solution.bound, relaxed.bound + slack) / MICRO)
        if form.unmet(solution.x) > 1e-6:
            least = least_memory(problem)
            if least > limit:
                raise too_little(problem, limit, least)
            form.raise_price()
            continue
        evaluation = search.offer(form.assignment(solution.x))
        over = _peaks(np.array(evaluation.memory_bytes), limit, form.memory)
        for time in over:
            form.memory_row(time)
        relaxed = (_with_memory(form, limit) if over else None) or relaxed
        if search.gap <= GAP or not (over or solution.bound > relaxed.bound + slack):
            break
    return True


def _nearly(search: Search, form: Formulation, relaxed: Relaxed, limit: float) -> bool:
    """A plan near the bound: integers are settled among the columns of small reduced cost only. A plan that needs
    others costs at least the relaxation plus that reduced cost, so the bound holds for all."""
    step = FIRST_STEP * abs(relaxed.bound)
    for _ in range(STEPS):
        form.add(paying(form, relaxed.duals, -step, every=True))
        relaxed = _with_memory(form, limit) or relaxed
        allowed = form.program.reduced_costs() <= step
        solution = form.program.solve_integer(form.integer_columns(), NODES, NEAR * 0.1, allowed)
        search.nodes += solution.nodes
        search.variables = max(search.variables, form.program.columns)
        search.bound_s = max(search.bound_s, min(solution.bound, relaxed.bound + step) / MICRO)
        over = []
        if solution.status in ("optimal", "feasible"):
            evaluation = search.offer(form.assignment(solution.x))
            over = _peaks(np.array(evaluation.memory_bytes), limit, form.memory)
            for time in over:
                form.memory_row(time)
        if search.gap <= NEAR:
            break
        if not over:
            step *= 2.0
    return search.best is not None


def _slack(search: Search, relaxed: Relaxed) -> float:
    """The reduced cost above which a pair cannot be part of a better plan; a guess where there is no plan yet."""
    upper = search.best[1].seconds * MICRO if search.best else relaxed.bound * 1.05
    return max(upper - relaxed.bound, GAP * abs(relaxed.bound), 1e-6)


def _with_memory(form: Formulation, limit: float) -> Relaxed | None:
    """The relaxation with all memory rows that matter; None where the solver failed or nothing fits."""
    for round_ in range(MAX_ROUNDS):
        relaxed = settle(form)
        if relaxed is None:
            return None
        allowed = limit if form.peak is None else relaxed.x[form.peak] * form.unit_bytes
        levels = form.levels(relaxed.x)
        new = _peaks(levels, allowed * (1 + 1e-9), form.memory)
        if not new:
            return relaxed
        if round_ == MAX_ROUNDS - 2:
            new = [t for t in range(len(levels)) if t not in form.memory]
        for time in new:
            form.memory_row(time)
    return None


def _peaks(levels: np.ndarray, limit: float, known: dict[int, int]) -> list[int]:
    """The local maxima above the limit, largest first, at most eight."""
    before, after = np.concatenate([levels[:1], levels[:-1]]), np.concatenate([levels[1:], levels[-1:]])
    above = [int(t) for t in np.flatnonzero(levels > limit) if int(t) not in known]
    tops = [t for t in above if levels[t] >= before[t] and levels[t] >= after[t]]
    return sorted(tops or above, key=lambda t: (-levels[t], t))[:8]


def least_memory(problem: Problem, max_nodes: int = 2_000) -> int:
    """The smallest peak of any plan: the same program with the peak as its objective."""
    network = build_network(problem)
    form = Formulation(problem, network, fold(network, None), limited=True, peak=True)
    relaxed = _with_memory(form, float("inf"))
    best = min((evaluate(problem, a).peak_bytes for a in simple_plans(problem)), default=1 << 62)
    if relaxed is None or form.peak is None:
        return best
    best = min(best, evaluate(problem, form.assignment(relaxed.x)).peak_bytes)
    if best <= relaxed.bound / PEAK_PRICE * form.unit_bytes * (1 + 1e-9):  # no plan is below the relaxation
        return best
    for _ in range(MAX_ROUNDS):
        slack = max(PEAK_PRICE * best / form.unit_bytes - relaxed.bound, 1e-3)
        form.add(paying(form, relaxed.duals, -slack, every=True))
        solution = form.program.solve_integer(form.integer_columns(), max_nodes, 1e-9)
        if solution.status not in ("optimal", "feasible"):
            break
        levels = np.array(evaluate(problem, form.assignment(solution.x)).memory_bytes)
        best = min(best, int(levels.max()))
        new = _peaks(levels, solution.x[form.peak] * form.unit_bytes * (1 + 1e-9), form.memory)
        if not new:
            break
        for time in new:
            form.memory_row(time)
    return best


def too_little(problem: Problem, limit: int, least: int | None = None, proven: bool = True) -> MemoryLimitError:
    """The error of a limit that no plan keeps or, where that is not `proven`, none of those that were found."""
    least = least_memory(problem) if least is None else least
    mesh = problem.settings.mesh
    return MemoryLimitError(
        f"no plan on mesh {mesh} fits into {size_text(limit)} per device; {_least_text(least, proven)}. {_ADVICE}",
        least,
        mesh,
        proven,
    )


def too_little_anywhere(errors: Sequence[MemoryLimitError], limit: int) -> MemoryLimitError:
    """One error for all mesh shapes that were tried, with the least over them."""
    best = min(errors, key=lambda e: (e.least_bytes, len(e.mesh)))
    if len(errors) == 1:
        return best
    shapes = ", ".join(str(e.mesh) for e in errors)
    proven = all(e.proven for e in errors)
    return MemoryLimitError(
        f"no plan on any mesh ({shapes}) fits into {size_text(limit)} per device; "
        f"{_least_text(best.least_bytes, proven)}, on mesh {best.mesh}. {_ADVICE}",
        best.least_bytes,
        best.mesh,
        proven,
    )


def _least_text(least: int, proven: bool) -> str:
    what = "the least that would do is" if proven else "of the plans that were found the smallest needs"
    return f"{what} {size_text(least, up=True)}"


_ADVICE = "Raise memory_limit, use more devices, or a smaller batch"


def size_text(nbytes: int, up: bool = False) -> str:
    """`12.345 MiB`, never more than there is (with `up`: never less), so that the least fits where it is the limit."""
    power = max(0, min(3, (nbytes.bit_length() - 1) // 10))
    if power == 0:
        return f"{nbytes} B"
    thousandths = -(-nbytes * 1000 >> 10 * power) if up else nbytes * 1000 >> 10 * power
    return f"{thousandths // 1000}.{thousandths % 1000:03d} {('KiB', 'MiB', 'GiB')[power - 1]}"
