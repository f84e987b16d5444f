"""Composes the stages: capture, rules, plan, lowering, execution. No logic of its own."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from .cluster import Cluster
from .cpu.malloc import keep_freed_memory
from .errors import ConstraintError, MemoryLimitError, error_data, same_error
from .ir.graph import Graph, Input, Output
from .ir.passes import recompute, without_sources
from .ir.runner import call_of
from .ir.text import format_graph, parse_graph
from .plan.limited import too_little_anywhere
from .plan.plan import Plan, make_plan, whole
from .plan.planner import Outcome, optimise
from .plan.problem import Problem, Settings, build_problem
from .plan.reshard import Resharding
from .plan.reuse import REUSED, reuse, same_but_for_sizes
from .plan.store import load_plan, plan_key, save_plan
from .pytorch.call import Call
from .pytorch.capture import Program, capture
from .pytorch.flops import count_flops
from .pytorch.module import Build, Runtime, install
from .pytorch.program import LocalProgram, make_local
from .pytorch.runner import TorchRunner
from .pytorch.world import check_equal, from_rank_0, gather_objects, make_mesh, together
from .rules.book import RuleBook
from .rules.descend import descend
from .rules.rule import Rule
from .rules.ruled import Ruled, load_ruled, ruled_key, save_ruled
from .spmd.device import collectives, device_program
from .spmd.fuse import fuse_regions
from .spmd.lower import lower
from .spmd.prune import prune

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); stages are "rules" and "plan"."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class Solved:
    """A problem and its plan, before fused operators were put back."""

    graph: Graph
    rules: tuple[Rule, ...]
    settings: Settings
    plan: Plan


@dataclass(frozen=True)
class Request:
    """What the user asks of the planner, beside the model."""

    cluster: Cluster
    shapes: tuple[tuple[int, ...], ...]
    """Mesh shapes to choose from."""
    memory_limit_bytes: int | None = None
    constraints: tuple[tuple[str, Any], ...] = ()
    """(path, layout) that must be."""
    forbidden: tuple[tuple[str, Any], ...] = ()
    """(path, layout) that must not be."""
    sharded_inputs: tuple[str, ...] = ()
    progress: Progress = silent
    choose: Callable[[Problem], Outcome] = optimise
    """What finds the plan."""
    use_disk: bool = True
    """Read and write the caches of rules and plans."""
    book: RuleBook | None = None
    """Rules that earlier programs of the same module have read."""
    solved: list[Solved] | None = None
    """Plans of earlier programs of the same module, which serve the same graph at other sizes."""


@dataclass(frozen=True)
class Origin:
    """Where rules and plan came from, and how long they took on the rank that made them."""

    operators: int
    """Nodes of the graph."""
    discovered: int
    """Rules found by running operators; all others were known or derived from strides."""
    plan_cached: bool
    rules_s: float
    plan_s: float


@dataclass(frozen=True)
class Planned:
    """A captured program with its rules and its plan."""

    program: Program
    graph: Graph
    rules: tuple[Rule, ...]
    plan: Plan
    origin: Origin


def find_rules(graph: Graph, progress: Progress = silent, use_disk: bool = True, book: RuleBook | None = None) -> Ruled:
    """Rules of all nodes, after operators that do not split were replaced by decompositions that do."""
    book = book or RuleBook(TorchRunner(), use_disk=use_disk)
    key = ruled_key(graph, book.runner.framework)
    if use_disk and (known := load_ruled(key, graph)) is not None:
        return known
    before, values = book.counts.discovered, graph.values
    descended, rules, regions = descend(graph, book, lambda done, total: progress("rules", done, total))
    fused = dict(zip(regions, book.find(call_of(node, values)[0] for node in regions.values())))
    ruled = Ruled(descended, rules, regions, fused, book.counts.discovered - before)
    if use_disk:
        save_ruled(key, ruled)
    return ruled


def plan_program(program: Program, request: Request, fixed: tuple[tuple[str, Any], ...] = ()) -> Planned:
    """Rules and plan of a captured program, on the best of the mesh shapes. For one process, or for rank 0."""
    start = time.perf_counter()
    graph = recompute(program.graph)
    found = find_rules(graph, request.progress, request.use_disk, request.book)
    rules_s = time.perf_counter() - start
    settings = [
        Settings(
            shape,
            request.memory_limit_bytes,
            sharded_inputs=request.sharded_inputs,
            fixed=(*request.constraints, *fixed),
            forbidden=request.forbidden,
        )
        for shape in request.shapes
    ]
    use_disk = request.use_disk and request.choose is optimise
    key = plan_key(found.graph, found.rules, request.cluster, settings)
    plan = load_plan(key) if use_disk else None
    cached = plan is not None
    if plan is None:
        plan = _reused(found, request, settings)
    if plan is None:
        plan = _best_plan(found.graph, found.rules, request, settings)
        if use_disk:
            save_plan(key, plan)
    if request.solved is not None and plan.status != REUSED:
        one = next(s for s in settings if s.mesh == plan.mesh)
        request.solved.append(Solved(found.graph, found.rules, one, plan))
    plan_s = time.perf_counter() - start - rules_s
    origin = Origin(len(graph.nodes), found.discovered, cached, rules_s, plan_s)
    fused = fuse_regions(found.graph, found.rules, plan, found.regions, found.fused_rules)
    return Planned(program, *fused, origin)


def _reused(found: Ruled, request: Request, settings: list[Settings]) -> Plan | None:
    """The plan of the same graph at other sizes, where it is valid at these; `settings` is one mesh then."""
    alike = [s for s in request.solved or () if same_but_for_sizes(s.graph, found.graph)]
    if not alike or len(settings) != 1:
        return None
    flops = count_flops(found.graph)
    problem = build_problem(found.graph, found.rules, request.cluster, settings[0], flops)
    for solved in alike:
        old = build_problem(solved.graph, solved.rules, request.cluster, solved.settings, count_flops(solved.graph))
        outcome = reuse(old, solved.plan, problem)
        if outcome is not None:
            return make_plan(problem, outcome, request.cluster.name, flops)
    return None


def _best_plan(graph: Graph, rules: tuple[Rule, ...], request: Request, settings: list[Settings]) -> Plan:
    """The fastest plan over the mesh shapes; of equals, the one with fewer axes. Raises where no shape has one."""
    flops = count_flops(graph)
    plans, misfits, refusals = [], [], []
    for done, one in enumerate(settings):
        request.progress("plan", done, len(settings))
        try:
            problem = build_problem(graph, rules, request.cluster, one, flops)
            plans.append(make_plan(problem, request.choose(problem), request.cluster.name, flops))
        except MemoryLimitError as error:
            misfits.append(error)
        except ConstraintError as error:
            refusals.append(error)
    request.progress("plan", len(settings), len(settings))
    if plans:
        return min(plans, key=lambda p: (p.seconds, len(p.mesh)))
    if misfits:
        assert request.memory_limit_bytes is not None
        raise too_little_anywhere(misfits, request.memory_limit_bytes)
    raise refusals[0]


def agree_on_plan(program: Program, request: Request, fixed: tuple[tuple[str, Any], ...] = ()) -> Planned:
    """Rank 0 finds rules and plan, the others receive them. Raises MismatchError where the graphs differ."""
    check_equal("the captured model", hashlib.sha256(format_graph(without_sources(program.graph)).encode()).hexdigest())
    error: list[Exception] = []

    def work() -> str:
        try:
            found = plan_program(program, request, fixed)
            rules = [r.to_dict() for r in found.rules]
            return json.dumps([found.plan.to_json(), rules, format_graph(found.graph), asdict(found.origin)])
        except Exception as caught:  # the others must not wait for a plan that never comes
            error.append(caught)
            return json.dumps(error_data(caught))

    data = json.loads(from_rank_0(work))
    if error:
        raise error[0]
    if isinstance(data, dict):
        raise same_error(data)
    rules = tuple(Rule.from_dict(r) for r in data[1])
    planned = Planned(program, parse_graph(data[2]), rules, Plan.from_json(data[0]), Origin(**data[3]))
    check_equal("the plan", planned.plan.fingerprint)
    return planned


def distribute(
    module: Any, call: Call, rows: int, program: Program, request: Request, mesh: Any, device: Any, batch: str
) -> Any:
    """Plans the first program of a module and installs it, with what builds the others. `mesh` may be a DeviceMesh."""
    request = replace(request, solved=[], book=RuleBook(TorchRunner(), use_disk=request.use_disk))
    planned = agree_on_plan(program, request)
    shape = planned.plan.mesh
    mesh = mesh if hasattr(mesh, "get_group") else make_mesh(shape, device)
    runtime = Runtime(type(module), mesh, shape, device, batch)
    runtime.no_rows, runtime.origin = call.no_rows, planned.origin
    if runtime.device.type == "cpu":
        keep_freed_memory()
    runtime.build = builder(request)
    runtime.layouts = {p: x for k, p, x in planned.plan.inputs if k in ("parameter", "buffer")}
    local = _localised(planned, request.cluster, runtime)
    return together("placing the parameters", lambda: install(module, runtime, call, rows, local))


def _localised(planned: Planned, cluster: Cluster, runtime: Runtime) -> LocalProgram:
    """The program of this rank, together with the others. Raises AssertionError where they would wait for ever."""
    local = together("making its local program", lambda: localise(planned, cluster, runtime))
    graphs = (local.phases.forward, local.phases.backward)
    order = [collectives(graph) for graph in graphs if graph is not None]
    marks = gather_objects(hashlib.sha256(repr(order).encode()).hexdigest())
    name = runtime.original.__name__
    assert len(set(marks)) == 1, f"{name}: ranks would start collectives in other orders; please report the model"
    return local


def localise(planned: Planned, cluster: Cluster, runtime: Runtime) -> LocalProgram:
    """The program of this rank."""
    resharding = Resharding(planned.plan.mesh, cluster.axes(planned.plan.mesh))

    def lowered(absent: frozenset[str]) -> Graph:
        what = prune(planned.graph, planned.rules, planned.plan, absent)
        return device_program(*what, resharding, runtime.coords)

    gathers = dict(_gathers(planned, resharding, runtime.coords))
    return make_local(planned.program, planned.plan, lowered, runtime.coords, runtime.groups, runtime.device, gathers)


def _gathers(planned: Planned, resharding: Resharding, coords: tuple[int, ...]) -> Iterator[tuple[str, Graph]]:
    """(path, program that makes it whole) of every output that lies in pieces."""
    plan, values = planned.plan, planned.graph.values
    for output, (kind, path, layout) in zip(planned.graph.outputs, plan.outputs):
        if kind != "output" or output.name is None or layout is None or layout == whole(plan.mesh):
            continue
        value = replace(values[output.name], alias=None, stride=None)
        graph = Graph((Input(value, "input", "0"),), (), (Output(value.name, "output", "0"),), f"gather_{value.name}")
        here = replace(
            plan,
            inputs=(("input", "0", layout),),
            outputs=(("output", "0", whole(plan.mesh)),),
            nodes=(),
            kept=(),
        )
        yield path, lower(graph, (), here, resharding, coords)


def builder(request: Request) -> Build:
    """What a parallelized module calls when it needs a program that it does not have yet."""

    def build(
        runtime: Runtime, module: Any, args: tuple, kwargs: dict, training: bool, sharded: tuple[str, ...]
    ) -> LocalProgram:
        program = together(
            f"capturing {runtime.original.__name__}",
            lambda: capture(module, args, kwargs, training=training, device=runtime.device),
        )
        known = {i.path for i in program.graph.inputs_of("parameter", "buffer")}
        fixed = tuple((p, x) for p, x in runtime.layouts.items() if p in known)
        here = replace(request, shapes=(runtime.shape,), sharded_inputs=sharded)
        return _localised(agree_on_plan(program, here, fixed), request.cluster, runtime)

    return build


__all__ = ["Planned", "Request", "agree_on_plan", "builder", "capture", "localise", "plan_program"]
