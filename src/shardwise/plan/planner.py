"""From tables to a plan: relax, round or branch, and prove how far the result can be from the best.

Without a memory limit the network is reduced and, where it is large, equal layers are folded; the folding is refined
until the plan is near the bound. With one nothing is folded: memory rows are added for the times at which a solution
exceeds the limit, until none does. Integers are settled by HiGHS over the pairs whose reduced cost is below the gap:
no others can be part of a better plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..errors import MemoryLimitError, PlanError
from .certificate import Certificate, certify
from .evaluate import Assignment, Evaluation, evaluate
from .fallback import simple_plans
from .fold import fold
from .formulate import PEAK_PRICE, Formulation
from .network import MICRO, Network, build_network, reduce
from .price import Relaxed, paying, relax
from .problem import Problem

GAP = 1e-6
"""Relative distance to the bound that counts as none: the solver's own tolerance."""
ROUNDS: tuple[int | None, ...] = (2, 4, 8, 16, None)
"""Rounds of colouring that are tried one after the other in large networks; small ones are not folded."""
LARGE = 700
"""Vertices of a reduced network above which it is folded, and a gap of LARGE_GAP is enough."""
LARGE_GAP = 1e-3
MAX_ROUNDS = 60
"""Rounds of adding violated memory rows; afterwards rows for all times are added at once."""


@dataclass(frozen=True)
class Outcome:
    """The best assignment found, with a lower bound on the seconds of any assignment."""

    assignment: Assignment
    evaluation: Evaluation
    bound_s: float
    status: str
    """optimal: the bound is met. feasible: see the gap. fallback: the solver failed, this is the best simple plan."""
    variables: int
    nodes: int
    certificate: Callable[[], Certificate] | None = field(default=None, compare=False, repr=False)
    """Makes a proof of the best bound that needs no search; it may be a little lower than `bound_s`."""

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return max(0.0, 1.0 - self.bound_s / self.evaluation.seconds) if self.evaluation.seconds > 0 else 0.0


@dataclass
class _Search:
    """What is known so far."""

    problem: Problem
    max_nodes: int
    best: tuple[Assignment, Evaluation] | None = None
    bound_s: float = 0.0
    variables: int = 0
    nodes: int = 0
    certificate: Callable[[], Certificate] | None = None

    def offer(self, assignment: Assignment) -> Evaluation:
        """Keeps an assignment if it is the best that fits."""
        evaluation = evaluate(self.problem, assignment)
        limit = self.problem.settings.memory_limit_bytes
        fits = evaluation.seconds < float("inf") and (limit is None or evaluation.peak_bytes <= limit)
        if fits and (self.best is None or evaluation.seconds < self.best[1].seconds):
            self.best = assignment, evaluation
        return evaluation

    @property
    def gap(self) -> float:
        """Relative distance between the best assignment and the bound."""
        if self.best is None:
            return float("inf")
        return max(0.0, 1.0 - self.bound_s / self.best[1].seconds) if self.best[1].seconds > 0 else 0.0

    def outcome(self, failed: bool = False) -> Outcome:
        """The result."""
        if self.best is None:
            raise PlanError(f"the solver found no plan on mesh {self.problem.settings.mesh}")
        assignment, evaluation = self.best
        status = "fallback" if failed else "optimal" if self.gap <= GAP else "feasible"
        bound = min(self.bound_s, evaluation.seconds)
        return Outcome(assignment, evaluation, bound, status, self.variables, self.nodes, self.certificate)


def optimise(problem: Problem, max_nodes: int = 2_000) -> Outcome:
    """The assignment of least time within the memory limit. Raises MemoryLimitError where there is none."""
    search = _Search(problem, max_nodes)
    network = build_network(problem)
    failed = not _unlimited(search, network)
    if problem.settings.memory_limit_bytes is not None and (search.best is None or search.gap > GAP):
        failed = not _limited(search, network)
    if failed or search.best is None:
        for assignment in simple_plans(problem):
            search.offer(assignment)
        if search.best is None and problem.settings.memory_limit_bytes is not None:
            raise _too_little(problem, problem.settings.memory_limit_bytes)
    return search.outcome(failed)


def _unlimited(search: _Search, network: Network) -> bool:
    """Solves without regard to memory; False where the solver failed."""
    reduced = reduce(network)
    last = 0
    for rounds in ROUNDS:
        if rounds is not None and len(reduced.cost) <= LARGE:
            continue
        folded = fold(reduced, rounds)
        groups = len(folded.members)
        if groups == last:
            continue
        if groups == len(reduced.cost) and rounds is not None:
            folded, rounds = fold(reduced, None), None
        last = groups
        form = Formulation(search.problem, reduced, folded, limited=False)
        relaxed = _relax(form)
        if relaxed is None:
            return False
        search.variables = max(search.variables, form.program.columns)
        if relaxed.bound / MICRO > search.bound_s or search.certificate is None:
            search.bound_s = relaxed.bound / MICRO
            search.certificate = partial(certify, network, reduced, folded, *form.prices(relaxed.duals))
        search.offer(form.assignment(relaxed.x))
        if search.gap > GAP and form.fractional(relaxed.x):
            _branch(search, form, relaxed, whole=rounds is None)
        if search.gap <= GAP or rounds is None or search.gap <= LARGE_GAP:
            break
    return True


def _relax(form: Formulation) -> Relaxed | None:
    """The relaxation with all needs met; None where the solver failed or there is none."""
    for _ in range(6):
        relaxed = relax(form)
        if relaxed.status != "optimal":
            return None
        if form.unmet(relaxed.x) < 1e-7:
            return relaxed
        form.raise_price()
    return None


def _branch(search: _Search, form: Formulation, relaxed: Relaxed, whole: bool) -> None:
    """Integer solutions over the pairs that can be part of a better plan than the best known. `whole`: nothing is
    folded, so that what the solver proves holds for the problem."""
    for _ in range(3):
        slack = _slack(search, relaxed)
        form.add(paying(form, relaxed.duals, -slack, every=True))
        solution = form.program.solve_integer(form.integer_columns(), search.max_nodes, GAP * 0.1)
        search.nodes += solution.nodes
        search.variables = max(search.variables, form.program.columns)
        if solution.status not in ("optimal", "feasible"):
            return
        search.offer(form.assignment(solution.x))
        if not whole:
            return
        search.bound_s = max(search.bound_s, min(solution.bound, relaxed.bound + slack) / MICRO)
        if solution.bound <= relaxed.bound + slack:
            return


def _limited(search: _Search, network: Network) -> bool:
    """Solves within the memory limit; False where the solver failed. Raises MemoryLimitError where nothing fits."""
    problem, limit = search.problem, search.problem.settings.memory_limit_bytes
    assert limit is not None
    form = Formulation(problem, network, fold(network, None), limited=True)
    relaxed = _with_memory(form, limit)
    if relaxed is None:
        least = least_memory(problem)
        if least > limit:
            raise _too_little(problem, limit, least)
        return False
    search.bound_s = max(search.bound_s, relaxed.bound / MICRO)
    search.offer(form.assignment(relaxed.x))
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
                raise _too_little(problem, limit, least)
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


def _slack(search: _Search, relaxed: Relaxed) -> float:
    """The reduced cost above which a pair cannot be part of a better plan; a guess where there is no plan yet."""
    upper = search.best[1].seconds * MICRO if search.best else relaxed.bound * 1.05
    return max(upper - relaxed.bound, GAP * abs(relaxed.bound), 1e-6)


def _with_memory(form: Formulation, limit: float) -> Relaxed | None:
    """The relaxation with all memory rows that matter; None where the solver failed or nothing fits."""
    for round_ in range(MAX_ROUNDS):
        relaxed = _relax(form)
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


def _too_little(problem: Problem, limit: int, least: int | None = None) -> MemoryLimitError:
    least = least_memory(problem) if least is None else least
    return MemoryLimitError(
        f"no plan on mesh {problem.settings.mesh} fits into {_gib(limit)} per device; the least that would do is "
        f"{_gib(least)}. Raise memory_limit, use more devices, or a smaller batch",
        least,
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB" if nbytes >= 1 << 28 else f"{nbytes / 2**20:.3f} MiB"
