"""From a captured step to its plan: rules, tables, solver, and the cache of plans on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..cluster import Cluster
from ..ir.placement import Layout
from ..plan.plan import Plan, make_plan
from ..plan.planner import optimise
from ..plan.problem import Settings, build_problem
from ..plan.store import load_plan, plan_key, save_plan
from ..rules.book import RuleBook
from ..rules.rule import Rule
from .capture import Program
from .flops import count_flops
from .rules import jax_book, rules_of_graph

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Wanted:
    """What the user asks of the planner, beside the step."""

    cluster: Cluster
    shapes: tuple[tuple[int, ...], ...]
    """Mesh shapes to choose from."""
    memory_limit_bytes: int | None = None
    fixed: tuple[tuple[str, Layout], ...] = ()
    forbidden: tuple[tuple[str, Layout], ...] = ()
    progress: Progress = lambda stage, done, total: None
    use_disk: bool = True
    book: RuleBook | None = None


@dataclass(frozen=True)
class Planned:
    """A captured step with its rules and its plan."""

    program: Program
    rules: tuple[Rule, ...]
    plan: Plan
    rules_s: float = 0.0
    plan_s: float = 0.0
    discovered: int = 0


def settings_for(wanted: Wanted, shape: tuple[int, ...]) -> Settings:
    """The planner's settings: the optimizer's state is an input, and arrays are cut into equal pieces alone."""
    return Settings(
        shape,
        wanted.memory_limit_bytes,
        optimizer_multiple=0.0,
        fixed=wanted.fixed,
        forbidden=wanted.forbidden,
        even=True,
        arrive_placed=True,
    )


def plan_step(program: Program, wanted: Wanted) -> Planned:
    """Rules and plan, on the best of the mesh shapes."""
    start = time.perf_counter()
    book = wanted.book or jax_book(wanted.use_disk)
    graph = program.graph
    rules = rules_of_graph(graph, book, lambda done, total: wanted.progress("rules", done, total))
    rules_s = time.perf_counter() - start
    settings = [settings_for(wanted, shape) for shape in wanted.shapes]
    key = plan_key(graph, rules, wanted.cluster, settings)
    best = load_plan(key) if wanted.use_disk else None
    if best is None:
        flops = count_flops(graph)
        for done, setting in enumerate(settings):
            wanted.progress("plan", done, len(settings))
            problem = build_problem(graph, rules, wanted.cluster, setting, flops)
            found = make_plan(problem, optimise(problem), wanted.cluster.name, flops)
            if best is None or found.seconds < best.seconds:
                best = found
        wanted.progress("plan", len(settings), len(settings))
        assert best is not None
        if wanted.use_disk:
            save_plan(key, best)
    plan_s = time.perf_counter() - start - rules_s
    return Planned(program, rules, best, rules_s, plan_s, book.counts.discovered)
