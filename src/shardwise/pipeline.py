"""Composes the stages: capture, rules, plan, lowering, execution. No logic of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .cluster import Cluster
from .errors import same_error
from .ir.graph import Graph, Input, Output
from .ir.passes import recompute_views
from .ir.runner import call_of
from .ir.text import format_graph, parse_graph
from .plan.plan import Plan, make_plan, whole
from .plan.planner import Outcome, optimise
from .plan.problem import Problem, Settings, build_problem
from .plan.reshard import Resharding
from .pytorch.call import Call
from .pytorch.capture import Program, capture
from .pytorch.flops import count_flops
from .pytorch.module import Build, Runtime, install
from .pytorch.program import LocalProgram, make_local
from .pytorch.runner import TorchRunner
from .pytorch.world import broadcast_object, check_equal, make_mesh, rank, together
from .rules.book import RuleBook
from .rules.descend import descend
from .rules.rule import Rule
from .spmd.fuse import fuse_regions
from .spmd.lower import lower

Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class Request:
    """What the user asks of the planner, beside the model."""

    cluster: Cluster
    shapes: tuple[tuple[int, ...], ...]
    """Mesh shapes to choose from."""
    memory_limit_bytes: int | None = None
    constraints: tuple[tuple[str, Any], ...] = ()
    sharded_inputs: tuple[str, ...] = ()
    progress: Progress = silent
    choose: Callable[[Problem], Outcome] = optimise
    """What finds the plan."""


@dataclass(frozen=True)
class Planned:
    """A captured program with its rules and its plan."""

    program: Program
    graph: Graph
    rules: tuple[Rule, ...]
    plan: Plan


def plan_program(program: Program, request: Request, fixed: tuple[tuple[str, Any], ...] = ()) -> Planned:
    """Rules and plan of a captured program, on the best of the mesh shapes. For one process, or for rank 0."""
    graph = recompute_views(program.graph)
    book = RuleBook(TorchRunner())
    values = graph.values
    graph, rules, regions = descend(graph, book, request.progress)
    fused_rules = dict(zip(regions, book.find(call_of(n, values)[0] for n in regions.values())))
    flops = count_flops(graph)
    plans = []
    for shape in request.shapes:
        settings = Settings(
            shape,
            request.memory_limit_bytes,
            sharded_inputs=request.sharded_inputs,
            fixed=(*request.constraints, *fixed),
        )
        problem = build_problem(graph, rules, request.cluster, settings, flops)
        plans.append(make_plan(problem, request.choose(problem), request.cluster.name, flops))
    best = min(plans, key=lambda p: (p.seconds, len(p.mesh)))
    return Planned(program, *fuse_regions(graph, rules, best, regions, fused_rules))


def agree_on_plan(program: Program, request: Request, fixed: tuple[tuple[str, Any], ...] = ()) -> Planned:
    """Rank 0 finds rules and plan, the others receive them. Raises MismatchError where the graphs differ."""
    check_equal("the captured model", hashlib.sha256(format_graph(program.graph).encode()).hexdigest())
    text: str = ""
    error: Exception | None = None
    if rank() == 0:
        try:
            found = plan_program(program, request, fixed)
            text = json.dumps([found.plan.to_json(), [r.to_dict() for r in found.rules], format_graph(found.graph)])
        except Exception as caught:  # the others must not wait for a plan that never comes
            error = caught
            text = json.dumps([type(caught).__name__, str(caught)])
    text = broadcast_object(text)
    data = json.loads(text)
    if error is not None:
        raise error
    if len(data) == 2:
        raise same_error(*data)
    rules = tuple(Rule.from_dict(r) for r in data[1])
    planned = Planned(program, parse_graph(data[2]), rules, Plan.from_json(data[0]))
    check_equal("the plan", planned.plan.fingerprint)
    return planned


def distribute(
    module: Any, call: Call, rows: int, program: Program, request: Request, mesh: Any, device: Any, batch: str
) -> Any:
    """Plans the first program of a module and installs it, with what builds the others. `mesh` may be a DeviceMesh."""
    planned = agree_on_plan(program, request)
    shape = planned.plan.mesh
    mesh = mesh if hasattr(mesh, "get_group") else make_mesh(shape, device)
    runtime = Runtime(type(module), mesh, shape, device, batch)
    runtime.build = builder(request)
    runtime.layouts = {p: x for k, p, x in planned.plan.inputs if k in ("parameter", "buffer")}
    local = together("making its local program", lambda: localise(planned, request.cluster, runtime))
    return install(module, runtime, call, rows, local)


def localise(planned: Planned, cluster: Cluster, runtime: Runtime) -> LocalProgram:
    """The program of this rank."""
    resharding = Resharding(planned.plan.mesh, cluster.axes(planned.plan.mesh))
    local = lower(planned.graph, planned.rules, planned.plan, resharding, runtime.coords)
    gathers = dict(_gathers(planned, resharding, runtime.coords))
    return make_local(planned.program, planned.plan, local, runtime.groups, runtime.device, gathers)


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
        planned = agree_on_plan(program, here, fixed)
        return together("making its local program", lambda: localise(planned, request.cluster, runtime))

    return build


__all__ = ["Planned", "Request", "agree_on_plan", "builder", "capture", "localise", "plan_program"]
