"""From a captured step to its plan: rules, tables, solver, and the cache of plans on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..cluster import Cluster
from ..ir.graph import Node
from ..ir.placement import Layout
from ..plan.plan import Plan, make_plan
from ..plan.planner import optimise
from ..plan.problem import Settings, build_problem
from ..plan.store import load_plan, plan_key, save_plan
from ..rules.book import RuleBook
from ..rules.pointwise import fuse_pointwise
from ..rules.rule import Rule
from .again import computed_again, never_stored
from .capture import Program
from .flops import count_flops
from .from_jaxpr import BARRIER, Block
from .rules import jax_book, rules_of_graph

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class Wanted:
    """What the user asks of the planner, beside the step."""

    cluster: Cluster
    shapes: tuple[tuple[int, ...], ...]
    """Mesh shapes to choose from."""
    memory_limit_bytes: int | None = None
    fixed: tuple[tuple[str, Layout], ...] = ()
    forbidden: tuple[tuple[str, Layout], ...] = ()
    progress: Progress = silent
    use_disk: bool = True
    """Read and write the cache of rules."""
    use_plans: bool = True
    """Read and write the cache of plans."""
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


def settings_for(program: Program, wanted: Wanted, shape: tuple[int, ...]) -> Settings:
    """The planner's settings: the optimizer's state is an input, and arrays are cut into equal pieces alone."""
    return Settings(
        shape,
        wanted.memory_limit_bytes,
        optimizer_multiple=0.0,
        fixed=wanted.fixed,
        forbidden=wanted.forbidden,
        even=True,
        arrive_placed=True,
        reused=tuple(program.names[k] for k in program.donated),
    )


def joined(program: Program, rules: tuple[Rule, ...]) -> tuple[Program, tuple[Rule, ...], dict[str, float]]:
    """The program with pointwise nodes joined, its rules, and the floating-point operations of its nodes."""
    graph, rules, had = computed_again(program.graph, rules)
    blocks = _renumbered(program.blocks, had)
    early = frozenset(o.name for o in graph.outputs_of("update") if o.name is not None)
    ranges = tuple((b.start, b.end) for b in blocks)
    fused, new_rules, made_of = fuse_pointwise(graph, rules, _may_join, early, ranges)
    fused = never_stored(fused, new_rules)
    each = count_flops(graph, rules)
    flops = {n.name: sum(each.get(graph.nodes[k].name, 0.0) for k in made_of[j]) for j, n in enumerate(fused.nodes)}
    blocks = _renumbered(blocks, made_of)
    return replace(program, graph=fused, blocks=blocks), new_rules, {n: f for n, f in flops.items() if f}


def _renumbered(blocks: tuple[Block, ...], made_of: dict[int, list[int]]) -> tuple[Block, ...]:
    """The blocks where every node was made of others."""
    now = {old: j for j, members in made_of.items() for old in members}

    def place(first: int, last: int) -> tuple[int, int] | None:
        found = [now[old] for old in range(first, last)]
        return (min(found), max(found) + 1) if found else None

    return tuple(b.renumbered(place) for b in blocks)


def _may_join(node: Node) -> bool:
    return node.op.startswith("jax.") and node.op != BARRIER


def plan_step(program: Program, wanted: Wanted) -> Planned:
    """Rules and plan, on the best of the mesh shapes."""
    start = time.perf_counter()
    book = wanted.book or jax_book(wanted.use_disk)
    graph = program.graph
    rules = rules_of_graph(graph, book, lambda done, total: wanted.progress("rules", done, total))
    program, rules, flops = joined(program, rules)
    graph = program.graph
    rules_s = time.perf_counter() - start
    settings = [settings_for(program, wanted, shape) for shape in wanted.shapes]
    key = plan_key(graph, rules, wanted.cluster, settings)
    best = load_plan(key) if wanted.use_plans else None
    if best is None:
        for done, setting in enumerate(settings):
            wanted.progress("plan", done, len(settings))
            problem = build_problem(graph, rules, wanted.cluster, setting, flops)
            found = make_plan(problem, optimise(problem), wanted.cluster.name, flops)
            if best is None or found.seconds < best.seconds:
                best = found
        wanted.progress("plan", len(settings), len(settings))
        assert best is not None
        if wanted.use_plans:
            save_plan(key, best)
    plan_s = time.perf_counter() - start - rules_s
    return Planned(program, rules, best, rules_s, plan_s, book.counts.discovered)
