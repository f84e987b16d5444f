"""From tables to a plan: without regard to memory first, then, if that plan does not fit, within the limit."""

from __future__ import annotations

from .fallback import simple_plans
from .limited import too_little, within_limit
from .network import build_network
from .problem import Problem
from .search import GAP, Outcome, Search
from .unlimited import unlimited

__all__ = ["GAP", "Outcome", "optimise"]


def optimise(problem: Problem, max_nodes: int = 2_000) -> Outcome:
    """The assignment of least time within the memory limit. Raises MemoryLimitError where there is none."""
    search = Search(problem, max_nodes)
    network = build_network(problem)
    failed = not unlimited(search, network)
    if problem.settings.memory_limit_bytes is not None and (search.best is None or search.gap > GAP):
        failed = not within_limit(search, network)
    if failed or search.best is None:
        for assignment in simple_plans(problem):
            search.offer(assignment)
        if search.best is None and problem.settings.memory_limit_bytes is not None:
            raise too_little(problem, problem.settings.memory_limit_bytes)
    return search.outcome(failed)
