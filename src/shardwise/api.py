"""The public face: `parallelize` and `plan`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .cluster import Cluster
from .errors import InputError
from .ir.placement import Layout, parse_layout
from .pipeline import Planned, Request, distribute, plan_program, silent
from .plan.plan import Plan
from .pytorch.call import describe_example
from .pytorch.capture import capture
from .pytorch.known import known_cluster
from .pytorch.module import check_module
from .pytorch.state import check_state
from .pytorch.world import check_equal, ensure_group, mesh_shapes, target_device, together

Constraints = Mapping[str, str]
MEASURE = "measure"


def memory_bytes(limit: int | str | None) -> int | None:
    """`"40GiB"` -> bytes. Raises InputError for anything else than a positive size."""
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit > 0):
        return limit
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(limit))
    try:
        assert match is not None
        value = int(float(match[1]) * units[match[2]])
        assert value > 0
        return value
    except (AssertionError, KeyError, ValueError):
        raise InputError(f"memory_limit: expected bytes or a size such as '40GiB', got {limit!r}") from None


def _constraints(
    constraints: Constraints | None, shapes: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[str, Layout], ...], tuple[tuple[int, ...], ...]]:
    """The wishes, and those of the mesh shapes that have as many axes as they speak of."""
    if constraints is not None and not isinstance(constraints, Mapping):
        raise InputError(
            f"constraints: expected a dictionary such as {{'fc.weight': 'S0'}}, got {type(constraints).__name__}"
        )
    found = []
    for path, text in (constraints or {}).items():
        try:
            layout = parse_layout(text)
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"constraints[{path!r}]: {error}") from None
        left = tuple(s for s in shapes if len(s) == len(layout))
        if not left:
            raise InputError(
                f"constraints[{path!r}]: {text} has {len(layout)} axes, the mesh has {len(shapes[0])}; write one "
                "placement per axis, such as '[S0, R]' on two, or choose the mesh with mesh="
            )
        shapes = left
        found.append((path, layout))
    return tuple(found), shapes


def _cluster(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster | None:
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
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
    "40GiB". `constraints` maps the path of a parameter or input to a layout such as "S0" or "[S0, R]". Raises
    InputError, CaptureError, MemoryLimitError.
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
    check_module(module)
    found = _cluster(cluster)
    assert found is not None
    shapes = mesh_shapes(mesh, found.world_size) or found.mesh_shapes()
    program = capture(module, _example(example), example_kwargs)
    wishes, shapes = _constraints(constraints, shapes)
    request = Request(found, shapes, memory_bytes(memory_limit), wishes, progress=progress)
    return plan_program(program, request)


def _example(example: Any) -> tuple:
    if not isinstance(example, tuple | list):
        raise InputError(
            f"example: expected a tuple of positional arguments, got {type(example).__name__}; "
            "for one argument write example=(x,)"
        )
    return tuple(example)


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
    choice; `cluster` describes the machine: by default it is measured once a week, with "measure" now. The parameters become DTensors under their own
    names. See DESIGN for `constraints` and `memory_limit`. Raises InputError, CaptureError, MismatchError, PlanError.
    """
    check_module(module)
    if batch not in ("global", "local"):
        raise InputError(f"batch: expected 'global' or 'local', got {batch!r}")
    if overlap not in (True, False, "bitwise"):
        raise InputError(f"overlap: expected True, False or 'bitwise', got {overlap!r}")
    args, kwargs = _example(example), dict(example_kwargs or {})
    device = target_device(module)
    world = ensure_group(device)
    check_equal("the class of the module", type(module).__qualname__)
    described = None if cluster == MEASURE else _cluster(cluster)
    if described is not None and described.world_size != world:
        raise InputError(
            f"cluster {described.name} describes {described.world_size} devices but {world} ranks are running"
        )
    shapes = mesh_shapes(mesh, world, device)
    call, rows = describe_example(module, args, kwargs, batch)
    program = together("capturing the example", lambda: capture(module, *call.global_arguments(rows), device=device))
    check_state(module)
    measured = described or known_cluster(device, refresh=cluster == MEASURE)
    wishes, shapes = _constraints(constraints, shapes or measured.mesh_shapes())
    request = Request(measured, shapes, memory_bytes(memory_limit), wishes, call.sharded, progress)
    return distribute(module, call, rows, program, request, mesh, device, batch)
