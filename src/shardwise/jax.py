"""The public face for JAX: `shardwise.jax.parallelize` and `shardwise.jax.plan`.

step = shardwise.jax.parallelize(step, params, opt_state, batch, mesh=(2, 4))
params, opt_state, loss = step(params, opt_state, batch)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .cluster import Cluster
from .cluster.probe import probe_local
from .cluster.units import memory_bytes
from .errors import InputError, MemoryLimitError
from .ir.graph import Graph
from .ir.placement import Partial, Shard
from .plan.plan import Plan
from .plan.reshard import Resharding
from .plan.wishes import Constraints, Wish, fitting_shapes, fixed_and_forbidden, read_wishes

try:
    import jax
except ImportError as error:
    raise ImportError(
        "shardwise.jax needs jax, which is not installed: pip install 'shardwise[jax]' (for a GPU: "
        "pip install 'jax[cuda13]')"
    ) from error

from .jaxpr.apply import ShardedStep
from .jaxpr.capture import capture
from .jaxpr.planning import Planned, Progress, Wanted, plan_step, silent

MAX_AXES = 3


def plan(
    step: Callable[..., Any],
    *example: Any,
    mesh: Any = None,
    cluster: Cluster | str | os.PathLike[str] = "a100x8",
    memory_limit: int | str | None = None,
    constraints: Constraints | None = None,
    progress: Progress = silent,
) -> Plan:
    """Plans a step for a described cluster, without devices or arrays: `example` may hold `jax.ShapeDtypeStruct`s.

    `mesh` is a shape such as (2, 4), or None for the planner's choice. `memory_limit` is per device, in bytes or as
    "40GiB". `constraints` maps the path of an argument, such as "params.w", or "output K" to a layout that it must
    have, "S0" or "[S0, R]", or must not have: "!R". Raises InputError, ConstraintError, CaptureError, MemoryLimitError.
    """
    return plan_model(
        step,
        *example,
        mesh=mesh,
        cluster=cluster,
        memory_limit=memory_limit,
        constraints=constraints,
        progress=progress,
    ).plan


def plan_model(
    step: Callable[..., Any],
    *example: Any,
    mesh: Any = None,
    cluster: Cluster | str | os.PathLike[str] = "a100x8",
    memory_limit: int | str | None = None,
    constraints: Constraints | None = None,
    progress: Progress = silent,
    use_disk: bool = True,
    use_plans: bool = True,
) -> Planned:
    """As `plan`, with the captured program and the rules. `use_disk`: read and write the cache of rules;
    `use_plans`: that of plans."""
    limit, wishes = memory_bytes(memory_limit), read_wishes(constraints)
    described = Cluster.of(cluster)
    shape = mesh_shape(mesh, described.world_size)
    program = capture(step, example)
    shapes = (shape,) if shape is not None else described.mesh_shapes()
    wishes, shapes = _fitting(wishes, shapes, program.graph)
    wanted = Wanted(described, shapes, limit, *fixed_and_forbidden(wishes), progress, use_disk, use_plans)
    return plan_step(program, wanted)


def parallelize(
    step: Callable[..., Any],
    *example: Any,
    mesh: Any = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    memory_limit: int | str | None = None,
    constraints: Constraints | None = None,
    progress: Progress = silent,
) -> ShardedStep:
    """A training step that runs on all devices of a mesh, called like `step`.

    `step` takes parameters, optimizer state and a batch, and returns the new ones; arguments that come back keep one
    layout. `mesh` is a `jax.sharding.Mesh`, a shape such as (2, 4), or None for the planner's choice over all devices.
    What `step`'s own jax.jit donates is donated. A `memory_limit` holds for the compiled step. `cluster` describes the
    machine; this machine's processors are estimated without it. See `plan` for the rest. Raises InputError,
    CaptureError, PlanError, MemoryLimitError.
    """
    devices = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else jax.devices()
    shape = mesh_shape(mesh, len(devices))
    described = machine(devices) if cluster is None else _matching(Cluster.of(cluster), len(devices))
    found = plan_model(
        step,
        *example,
        mesh=shape,
        cluster=described,
        memory_limit=memory_limit,
        constraints=constraints,
        progress=progress,
    )
    if not isinstance(mesh, jax.sharding.Mesh):
        names = tuple(f"axis{k}" for k in range(len(found.plan.mesh)))
        mesh = jax.make_mesh(found.plan.mesh, names, devices=devices, axis_types=_automatic(len(names)))
    links = described.axes(found.plan.mesh)
    parallel = ShardedStep(found, mesh, Resharding(found.plan.mesh, links), step)
    if (limit := memory_bytes(memory_limit)) is not None and (used := parallel.compiled_bytes()) > limit:
        raise MemoryLimitError(
            f"the plan needs {found.plan.peak_bytes} bytes per device and keeps the limit of {limit}, but the compiled "
            f"step needs {used} with the compiler's scratch memory. Raise memory_limit, or use more devices",
            used,
        )
    return parallel


def _automatic(count: int) -> tuple[Any, ...]:
    return (jax.sharding.AxisType.Auto,) * count


def machine(devices: list[Any]) -> Cluster:
    """What the devices are, where nobody describes them. Raises InputError for those that cannot be estimated."""
    if devices[0].platform != "cpu":
        raise InputError(
            f"cluster: name what the {len(devices)} {devices[0].platform} devices are, a Cluster, a file or a preset "
            "such as 'a100x8'; only this machine's processors are estimated"
        )
    return probe_local(len(devices))


def mesh_shape(mesh: Any, world: int) -> tuple[int, ...] | None:
    """The shape of a mesh over so many devices; None for the planner's choice. Raises InputError."""
    if mesh is None:
        return None
    shape = tuple(mesh.devices.shape) if isinstance(mesh, jax.sharding.Mesh) else mesh
    if not isinstance(shape, tuple | list) or not shape or any(not _is_size(n) for n in shape):
        raise InputError(f"mesh: expected a jax.sharding.Mesh or a shape such as (2, 4), got {mesh!r}")
    if len(shape) > MAX_AXES:
        raise InputError(f"mesh: {tuple(shape)} has {len(shape)} axes; at most {MAX_AXES} are planned")
    if math.prod(shape) != world:
        raise InputError(
            f"mesh: {tuple(shape)} has {math.prod(shape)} devices, there are {world}. Give a shape over all of them, "
            "or a jax.sharding.Mesh over some; on CPUs XLA_FLAGS=--xla_force_host_platform_device_count=N makes N"
        )
    return tuple(int(n) for n in shape)


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def _matching(cluster: Cluster, world: int) -> Cluster:
    if cluster.world_size != world:
        raise InputError(f"cluster {cluster.name} describes {cluster.world_size} devices but there are {world}")
    return cluster


def _fitting(
    wishes: tuple[Wish, ...], shapes: tuple[tuple[int, ...], ...], graph: Graph
) -> tuple[tuple[Wish, ...], tuple[tuple[int, ...], ...]]:
    """(wishes by the paths of the graph, shapes with as many axes as they name). Raises InputError."""
    paths = {i.path: i.path if i.kind == "parameter" else f"input {i.path}" for i in graph.inputs}
    paths |= {f"output {o.path}": f"output {o.path}" for o in graph.outputs_of("output")}
    shapes = fitting_shapes(wishes, shapes, list(paths), "step", "the path of an argument such as params.w")
    for wish in wishes:
        if any(isinstance(p, Partial) or (isinstance(p, Shard) and p.outer * p.unit > 1) for p in wish.layout):
            raise InputError(f"constraints[{wish.path!r}]: {wish} is no sharding of an array; use R and S<dim>")
    return tuple(replace(wish, path=paths[wish.path]) for wish in wishes), shapes
