"""The public face: `parallelize` and `plan`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cluster import Cluster
from .cluster import mesh_shapes as every_shape
from .cluster.units import memory_bytes
from .errors import InputError
from .ir.passes import recompute
from .pipeline import Planned, Request, Ruled, distribute, find_rules, plan_program, silent
from .plan.plan import Plan
from .plan.wishes import Constraints, Wish, fitting_shapes, fixed_and_forbidden, inputs_kept_whole, read_wishes
from .pytorch.call import check_example, describe_example, taken_as_rows
from .pytorch.capture import Program, capture
from .pytorch.common import common_graphs
from .pytorch.dtensor import DTensorPeer, peer_name
from .pytorch.known import known_cluster
from .pytorch.module import check_module
from .pytorch.runner import TorchRunner
from .pytorch.samples import PER_OPERATOR, sample_calls
from .pytorch.state import check_state
from .pytorch.world import (
    NOT_GIVEN,
    check_device,
    check_equal,
    check_options,
    ensure_group,
    mesh_shapes,
    target_device,
    together,
)
from .rules.audit import Report
from .rules.book import RuleBook
from .rules.judge import judge_all
from .rules.ship import ship

MEASURE = "measure"


def _fit(wishes: Sequence[Wish], shapes: tuple[tuple[int, ...], ...], program: Program) -> tuple[tuple[int, ...], ...]:
    """The mesh shapes that have as many axes as the wishes name. Raises InputError."""
    graph = program.graph
    known = [i.path for i in graph.inputs_of("parameter", "buffer")]
    known += [f"input {i.path}" for i in graph.inputs_of("input")]
    known += [f"output {o.path}" for o in graph.outputs_of("output")]
    return fitting_shapes(wishes, shapes, known, "model", "input 0, output 0 or a parameter's name")


def plan(
    module: Any,
    example: Sequence[Any],
    *,
    example_kwargs: dict[str, Any] | None = None,
    mesh: Any = None,
    cluster: Cluster | str | os.PathLike[str] = "a100x8",
    memory_limit: int | str | None = None,
    constraints: Constraints | None = None,
    progress: Any = silent,
) -> Plan:
    """Plans a model for a described cluster, without devices, ranks or parameters (they may be on the meta device).

    `mesh` is a shape such as (2, 4), or None for the planner's choice. `memory_limit` is per device, in bytes or as
    "40GiB". `constraints` maps the path of a parameter, "input K" or "output K" to a layout that it must have, such as
    "S0" or "[S0, R]", or must not have: "!R". Raises InputError, ConstraintError, CaptureError, MemoryLimitError.
    """
    return plan_model(
        module,
        example,
        example_kwargs=example_kwargs,
        mesh=mesh,
        cluster=cluster,
        memory_limit=memory_limit,
        constraints=constraints,
        progress=progress,
    ).plan


def plan_model(
    module: Any,
    example: Sequence[Any],
    *,
    example_kwargs: dict[str, Any] | None = None,
    mesh: Any = None,
    cluster: Cluster | str | os.PathLike[str] = "a100x8",
    memory_limit: int | str | None = None,
    constraints: Constraints | None = None,
    progress: Any = silent,
) -> Planned:
    """As `plan`, with the captured program and the rules."""
    _check_call(module, example, example_kwargs, progress)
    if cluster is None or cluster == MEASURE:
        raise InputError("cluster: name the machine to plan for, a Cluster, a file or a preset such as 'a100x8'")
    found = Cluster.of(cluster)
    limit, wishes = memory_bytes(memory_limit), read_wishes(constraints)
    shapes = mesh_shapes(mesh, found.world_size) or found.mesh_shapes()
    program = capture(module, _example(example), example_kwargs)
    shapes = _fit(wishes, shapes, program)
    return plan_program(program, Request(found, shapes, limit, *fixed_and_forbidden(wishes), progress=progress))


def rules_of(
    module: Any, example: Sequence[Any], *, example_kwargs: dict[str, Any] | None = None, progress: Any = silent
) -> Ruled:
    """The captured graph, operators that do not split decomposed where that helps, and the rule of every node."""
    check_module(module)
    return find_rules(recompute(capture(module, _example(example), example_kwargs).graph), progress)


def ship_rules(progress: Any = silent) -> int:
    """Rewrites the book of rules that ships with the package; returns the number of rules."""
    return ship(TorchRunner(), common_graphs(), progress=lambda done, total: progress("rules", done, total))


def audit_rules(operators: Sequence[str] = (), *, calls_each: int = PER_OPERATOR, progress: Any = silent) -> Report:
    """Compares the discovered rules with those of `torch.distributed.tensor`, on sample calls of each operator.

    `operators` are names such as mm, aten.mm or aten.mm.default; none means all that have samples. `calls_each`: calls
    of different kinds of every operator, at most. Raises InputError for an operator that torch does not have, or that
    has no samples.
    """
    if calls_each < 1:
        raise InputError(f"audit: expected at least one call of every operator, got {calls_each}")
    runner = TorchRunner()
    calls = sample_calls(operators, runner, lambda done, total: progress("samples", done, total), calls_each)
    rules = RuleBook(runner).find(calls, lambda done, total: progress("rules", done, total))
    found = judge_all(calls, rules, runner, DTensorPeer, lambda done, total: progress("audit", done, total))
    return Report(peer_name(), found)


def _example(example: Any) -> tuple:
    if not isinstance(example, tuple | list):
        raise InputError(
            f"example: expected a tuple of positional arguments, got {type(example).__name__}; "
            "for one argument write example=(x,)"
        )
    return tuple(example)


def _check_call(module: Any, example: Any, example_kwargs: Any, progress: Any) -> None:
    """Raises InputError for what is no module, or no call of it."""
    check_module(module)
    args = _example(example)
    if not isinstance(example_kwargs, Mapping | None):
        raise InputError(f"example_kwargs: expected a dictionary or None, got {type(example_kwargs).__name__}")
    check_example(module, args, dict(example_kwargs or {}))
    if not callable(progress):
        raise InputError(f"progress: expected a function, got {type(progress).__name__}")


@dataclass(frozen=True)
class Chosen:
    """The options of `parallelize`, read and checked."""

    cluster: Cluster | None
    """None where it is to be measured."""
    measure: bool
    """Whether to measure it now, whatever is known."""
    mesh: Any
    shapes: tuple[tuple[int, ...], ...] | None
    memory_limit_bytes: int | None
    wishes: tuple[Wish, ...]
    batch: str
    overlap: bool | str

    def told(self, device: Any) -> dict[str, str]:
        """What must be the same on every rank, in words: option -> value."""
        found = self.cluster
        measured = "measured now" if self.measure else NOT_GIVEN
        mesh = NOT_GIVEN if self.shapes is None else str(self.shapes[0])
        if hasattr(self.mesh, "mesh"):
            mesh = f"a DeviceMesh of {self.mesh.mesh.tolist()}"
        limit = self.memory_limit_bytes
        return {
            "the module's device": device.type,
            "mesh": mesh,
            "cluster": measured if found is None else f"{found.name} ({found.fingerprint()[:12]})",
            "memory_limit": NOT_GIVEN if limit is None else f"{limit} bytes",
            "batch": repr(self.batch),
            "overlap": repr(self.overlap),
            **{f"constraints[{wish.path!r}]": str(wish) for wish in self.wishes},
        }


def _chosen(
    mesh: Any, cluster: Any, memory_limit: Any, constraints: Any, batch: Any, overlap: Any, world: int, device: Any
) -> Chosen:
    """Reads the options of `parallelize`. Raises InputError for what cannot be."""
    limit, wishes = memory_bytes(memory_limit), read_wishes(constraints)
    if batch not in ("global", "local"):
        raise InputError(f"batch: expected 'global' or 'local', got {batch!r}")
    if overlap not in (True, False, "bitwise"):
        raise InputError(f"overlap: expected True, False or 'bitwise', got {overlap!r}")
    measure = cluster == MEASURE
    described = None if measure or cluster is None else Cluster.of(cluster)
    if described is not None and described.world_size != world:
        raise InputError(
            f"cluster {described.name} describes {described.world_size} devices but {world} ranks are running"
        )
    shapes = mesh_shapes(mesh, world, device)
    overlap = overlap if overlap == "bitwise" else bool(overlap)
    return Chosen(described, measure, mesh, shapes, limit, wishes, batch, overlap)


def parallelize(
    module: Any,
    example: Sequence[Any],
    *,
    example_kwargs: dict[str, Any] | None = None,
    mesh: Any = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    constraints: Constraints | None = None,
    batch: str = "global",
    overlap: bool | str = True,
    progress: Any = silent,
) -> Any:
    """Makes a module run on all ranks of the world, in place, and returns it.

    `example` is a tuple of positional arguments like those of later calls. `batch` says whether every rank gets the
    same batch ("global") or its own rows of it ("local"): then tensors whose first dim is as long as that of the first
    are taken as rows, unless `constraints` says "R" of them. `mesh` is a DeviceMesh, a shape or None for the planner's
    choice. `cluster` describes the machine: by default it is measured, once a week; "measure" does it now. The
    parameters become DTensors under their own names. See `plan` for `constraints` and `memory_limit`. Raises
    InputError, CaptureError, MismatchError, PlanError.
    """
    device = target_device(module)
    world = ensure_group(device)

    def check() -> Chosen:
        _check_call(module, example, example_kwargs, progress)
        check_device(module)
        return _chosen(mesh, cluster, memory_limit, constraints, batch, overlap, world, device)

    chosen = together("checking the arguments of parallelize", check)
    check_equal("the class of the module", type(module).__qualname__)
    check_options(chosen.told(device))
    no_rows = inputs_kept_whole(chosen.wishes)
    call, rows = describe_example(module, tuple(example), dict(example_kwargs or {}), batch, no_rows)

    def trace() -> Program:
        try:
            return capture(module, *call.global_arguments(rows), device=device)
        except InputError as error:
            raise InputError(f"{error}{taken_as_rows(call)}") from error

    program = together("capturing the example", trace)
    wishes, possible = chosen.wishes, chosen.shapes or every_shape(world)
    shapes = together("checking the constraints", lambda: _fit(wishes, possible, program))
    check_state(module)
    measured = chosen.cluster or known_cluster(device, refresh=chosen.measure)
    limit = chosen.memory_limit_bytes
    request = Request(measured, shapes, limit, *fixed_and_forbidden(wishes), call.sharded, progress)
    return distribute(module, call, rows, program, request, mesh, device, batch)
