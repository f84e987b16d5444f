"""From tables to a plan: solve, check the memory, add the rows that are violated, solve again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..errors import MemoryLimitError, PlanError
from ..solve.milp import Solution, solve
from .evaluate import Assignment, Evaluation, evaluate
from .formulate import MICRO, Formulation, add_memory_row, formulate, memory_terms
from .problem import Problem

MAX_ROUNDS = 40
"""Rounds of adding violated memory rows; afterwards rows for all times are added at once."""


@dataclass(frozen=True)
class Outcome:
    """The best assignment found, with a lower bound on the seconds of any assignment."""

    assignment: Assignment
    evaluation: Evaluation
    bound_s: float
    status: str
    variables: int
    nodes: int

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return max(0.0, 1.0 - self.bound_s / self.evaluation.seconds) if self.evaluation.seconds > 0 else 0.0


def optimise(problem: Problem, max_nodes: int = 2_000) -> Outcome:
    """The assignment of least time within the memory limit. Raises MemoryLimitError where there is none."""
    form = formulate(problem)
    limit = problem.settings.memory_limit_bytes
    rows: set[int] = set()
    solution = _solve(form, max_nodes)
    while limit is not None and solution.status in ("optimal", "feasible"):
        levels = evaluate(problem, form.assignment(solution.x)).memory_bytes
        violated = _peaks(levels, limit, rows)
        if not violated:
            break
        if len(rows) > MAX_ROUNDS:
            violated = [t for t in range(len(levels)) if t not in rows]
        for time in violated:
            rows.add(time)
            add_memory_row(form, time)
        solution = _solve(form, max_nodes)
    if solution.status == "infeasible" and limit is not None:
        least = least_memory(problem)
        raise MemoryLimitError(
            f"no plan on mesh {problem.settings.mesh} fits into {_gib(limit)} per device; the least that would do is "
            f"{_gib(least)}. Raise memory_limit, use more devices, or a smaller batch",
            least,
        )
    if solution.status not in ("optimal", "feasible"):
        raise PlanError(f"the solver found no plan on mesh {problem.settings.mesh} (status {solution.status})")
    assignment = form.assignment(solution.x)
    evaluation = evaluate(problem, assignment)
    bound = min(solution.bound / MICRO, evaluation.seconds)
    return Outcome(assignment, evaluation, bound, solution.status, len(form.program.cost), solution.nodes)


def _solve(form: Formulation, max_nodes: int) -> Solution:
    return solve(form.program, max_nodes=max_nodes, gap=1e-6)


def _peaks(levels: tuple[int, ...], limit: int, known: set[int]) -> list[int]:
    """The local maxima above the limit, largest first, at most eight."""
    above = [
        t
        for t, level in enumerate(levels)
        if level > limit
        and t not in known
        and level >= levels[max(t - 1, 0)]
        and level >= levels[min(t + 1, len(levels) - 1)]
    ]
    if not above:
        above = [t for t, level in enumerate(levels) if level > limit and t not in known]
    return sorted(above, key=lambda t: (-levels[t], t))[:8]


def least_memory(problem: Problem) -> int:
    """The smallest peak of any plan: the same program with the peak as its objective."""
    settings = replace(problem.settings, memory_limit_bytes=1 << 62)
    form = formulate(replace(problem, settings=settings))
    program = form.program
    program.cost = [c * 1e-9 for c in program.cost]
    scale = 1.0 / max(1, sum(form.problem.value(n).nbytes for n in form.own))
    peak = program.variable(1.0, 0.0, float("inf"))
    best, rows = 0, set()
    for _ in range(MAX_ROUNDS):
        solution = solve(program, max_nodes=500, gap=1e-4)
        if solution.status not in ("optimal", "feasible"):
            raise PlanError(f"the solver found no plan on mesh {problem.settings.mesh} (status {solution.status})")
        levels = evaluate(form.problem, form.assignment(solution.x)).memory_bytes
        best = max(levels) if best == 0 else min(best, max(levels))
        reached = solution.x[peak] / scale
        new = [t for t in np.argsort(levels)[::-1][:12] if levels[t] > reached * (1 + 1e-6) and int(t) not in rows]
        if not new:
            break
        for time in new:
            rows.add(int(time))
            terms = [(c, b * scale) for c, b in memory_terms(form, int(time))]
            program.row([(peak, 1.0), *((c, -b) for c, b in terms)], 0.0, float("inf"))
    return best


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB" if nbytes >= 1 << 28 else f"{nbytes / 2**20:.3f} MiB"
