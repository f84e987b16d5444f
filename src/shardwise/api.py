"""The public face: `parallelize` and `plan`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .cluster import Cluster
from .cluster.units import memory_bytes
from .errors import InputError
from .ir.passes import recompute
from .ir.placement import Layout, parse_layout
from .pipeline import Planned, Request, Ruled, distribute, find_rules, plan_program, silent
from .plan.plan import Plan
from .pytorch.call import check_example, describe_example
from .pytorch.capture import Program, capture
from .pytorch.common import common_graphs
from .pytorch.known import known_cluster
from .pytorch.module import check_module
from .pytorch.runner import TorchRunner
from .pytorch.state import check_state
from .pytorch.world import check_equal, ensure_group, mesh_shapes, target_device, together
from .rules.ship import ship

Constraints = Mapping[str, str]
MEASURE = "measure"


@dataclass(frozen=True)
class Wishes:
    """Placements that the user fixes or forbids, by path, and the mesh shapes that have as many axes as they name."""

    fixed: tuple[tuple[str, Layout], ...]
    forbidden: tuple[tuple[str, Layout], ...]
    shapes: tuple[tuple[int, ...], ...]


def _wishes(constraints: Constraints | None, shapes: tuple[tuple[int, ...], ...], program: Program) -> Wishes:
    """Reads `constraints`. Raises InputError naming the path for what is no layout, or for a path that is unknown."""
    if constraints is not None and not isinstance(constraints, Mapping):
        raise InputError(
            f"constraints: expected a dictionary such as {{'fc.weight': 'S0'}}, got {type(constraints).__name__}"
        )
    graph = program.graph
    known = [i.path for i in graph.inputs_of("parameter", "buffer")]
    known += [f"input {i.path}" for i in graph.inputs_of("input")]
    known += [f"output {o.path}" for o in graph.outputs_of("output")]
    fixed, forbidden = [], []
    for path, text in (constraints or {}).items():
        if path not in known:
            close = ", ".join(get_close_matches(str(path), known, 3)) or "input 0, output 0 or a parameter's name"
            raise InputError(f"constraints: the model has no {path!r}; try {close}")
        try:
            layout = parse_layout(str(text).removeprefix("!"))
        except ValueError as error:
            raise InputError(f"constraints[{path!r}]: {error}") from None
        left = tuple(s for s in shapes if len(s) == len(layout))
        if not left:
            raise InputError(
                f"constraints[{path!r}]: {text} has {len(layout)} axes, the mesh has {len(shapes[0])}; write one "
                "placement per axis, such as '[S0, R]' on two, or choose the mesh with mesh="
            )
        shapes = left
        (forbidden if str(text).startswith("!") else fixed).append((path, layout))
    return Wishes(tuple(fixed), tuple(forbidden), shapes)


def _cluster(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster | None:
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | os.PathLike):
        kind = type(cluster).__name__
        raise InputError(f"cluster: expected a Cluster, the path of a file or the name of a preset, got {kind}")
    return Cluster.load(cluster)


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
    found = _check_arguments(module, example, example_kwargs, cluster, memory_limit, "global", True, progress)
    if found is None:
        raise InputError("cluster: name the machine to plan for, a Cluster, a file or a preset such as 'a100x8'")
    shapes = mesh_shapes(mesh, found.world_size) or found.mesh_shapes()
    program = capture(module, _example(example), example_kwargs)
    wishes = _wishes(constraints, shapes, program)
    limit = memory_bytes(memory_limit)
    request = Request(found, wishes.shapes, limit, wishes.fixed, wishes.forbidden, progress=progress)
    return plan_program(program, request)


def rules_of(
    module: Any, example: Sequence[Any], *, example_kwargs: dict[str, Any] | None = None, progress: Any = silent
) -> Ruled:
    """The captured graph, operators that do not split decomposed where that helps, and the rule of every node."""
    check_module(module)
    return find_rules(recompute(capture(module, _example(example), example_kwargs).graph), progress)


def ship_rules(progress: Any = silent) -> int:
    """Rewrites the book of rules that ships with the package; returns the number of rules."""
    return ship(TorchRunner(), common_graphs(), progress=lambda done, total: progress("rules", done, total))


def _example(example: Any) -> tuple:
    if not isinstance(example, tuple | list):
        raise InputError(
            f"example: expected a tuple of positional arguments, got {type(example).__name__}; "
            "for one argument write example=(x,)"
        )
    return tuple(example)


def _check_arguments(
    module: Any,
    example: Any,
    example_kwargs: Any,
    cluster: Any,
    memory_limit: Any,
    batch: Any,
    overlap: Any,
    progress: Any,
) -> Cluster | None:
    """Raises InputError for what `parallelize` cannot take; the cluster that the user describes."""
    check_module(module)
    args = _example(example)
    if not isinstance(example_kwargs, Mapping | None):
        raise InputError(f"example_kwargs: expected a dictionary or None, got {type(example_kwargs).__name__}")
    check_example(module, args, dict(example_kwargs or {}))
    memory_bytes(memory_limit)
    if batch not in ("global", "local"):
        raise InputError(f"batch: expected 'global' or 'local', got {batch!r}")
    if overlap not in (True, False, "bitwise"):
        raise InputError(f"overlap: expected True, False or 'bitwise', got {overlap!r}")
    if not callable(progress):
        raise InputError(f"progress: expected a function, got {type(progress).__name__}")
    return None if cluster == MEASURE else _cluster(cluster)


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
    same batch ("global") or its own rows of it ("local"). `mesh` is a DeviceMesh, a shape or None for the planner's
    choice. `cluster` describes the machine: by default it is measured, once a week; "measure" does it now. The
    parameters become DTensors under their own names. See `plan` for `constraints` and `memory_limit`. Raises
    InputError, CaptureError, MismatchError, PlanError.
    """
    device = target_device(module)
    world = ensure_group(device)
    described = together(
        "checking the arguments of parallelize",
        lambda: _check_arguments(module, example, example_kwargs, cluster, memory_limit, batch, overlap, progress),
    )
    args, kwargs = tuple(example), dict(example_kwargs or {})
    check_equal("the class of the module", type(module).__qualname__)
    if described is not None and described.world_size != world:
        raise InputError(
            f"cluster {described.name} describes {described.world_size} devices but {world} ranks are running"
        )
    shapes = together("checking the mesh", lambda: mesh_shapes(mesh, world, device))
    call, rows = describe_example(module, args, kwargs, batch)
    program = together("capturing the example", lambda: capture(module, *call.global_arguments(rows), device=device))
    check_state(module)
    measured = described or known_cluster(device, refresh=cluster == MEASURE)
    wishes = _wishes(constraints, shapes or measured.mesh_shapes(), program)
    limit = memory_bytes(memory_limit)
    request = Request(measured, wishes.shapes, limit, wishes.fixed, wishes.forbidden, call.sharded, progress)
    return distribute(module, call, rows, program, request, mesh, device, batch)
