"""The plans under which every model must equal one process, and the run of a model under one of them.

machine     chosen for the ranks as they are measured
fast        chosen for a described cluster whose links are 1,000 times faster
batch       every input cut in rows, every parameter whole
parameters  every parameter cut along its largest dim
random      drawn from a seed, replicating only what cannot be split
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.cluster import Device, Level
from shardwise.ir.placement import R, Shard, format_layout, is_valid
from shardwise.pipeline import Request, distribute
from shardwise.plan.random_plan import random_planner
from shardwise.pytorch.call import describe_example
from shardwise.pytorch.capture import capture
from shardwise.pytorch.measure import local_cluster
from tests.equality import Run, compare, reference_run, train
from tests.models import CASES

PLANS = ("machine", "fast", "batch", "parameters", "random")
SHARES = {2: 0.6, 4: 0.35}
"""The part of the floating-point work that a rank may have, by the number of ranks."""


@dataclass(frozen=True)
class Road:
    """One way to run a case: plan, mesh, batch mode, rows of the global batch (None: those of the case)."""

    case: str
    plan: str
    mesh: tuple[int, ...]
    batch: str = "global"
    rows: int | None = None
    seed: int = 0
    steps: int = 5

    def __str__(self) -> str:
        rows = "" if self.rows is None else f" rows={self.rows}"
        seed = f":{self.seed}" if self.plan == "random" else ""
        return f"{self.case} {self.plan}{seed} on {self.mesh} {self.batch}{rows}"


@dataclass(frozen=True)
class Arrival:
    """What became of it on one rank."""

    error: float
    share: float
    whole: dict[str, float]
    """Operators that no axis splits, with the part of all floating-point work that they are."""
    seconds: tuple[float, float]
    """Of capture and planning, and of the steps."""


_measured: dict[int, sw.Cluster] = {}


def cluster_for(plan: str, world: int) -> sw.Cluster:
    """The measured cluster, or one with links 1,000 times faster than this machine's."""
    if plan == "machine":
        if world not in _measured:
            _measured[world] = local_cluster()
        return _measured[world]
    device = Device("described", {"float64": 1e9, "float32": 2e9, "bfloat16": 2e9}, 1 << 34, 1e10, 1e-6)
    return sw.Cluster("fast links", device, (Level("link", world, 1e-7, 1e12),), "described")


def wishes(plan: str, module: nn.Module, inputs: list[torch.Tensor], mesh: tuple[int, ...], batch: str) -> dict:
    """The constraints of a plan, as a user would write them."""
    found = {}
    if plan == "batch" and batch == "global":
        rows = next((t.shape[0] for t in inputs if t.ndim), 0)
        for k, tensor in enumerate(inputs):
            if tensor.ndim and tensor.shape[0] == rows > 1:
                found[f"input {k}"] = (Shard(0),) * len(mesh)
    for name, parameter in module.named_parameters():
        if plan == "batch":
            found[name] = (R,) * len(mesh)
        elif plan == "parameters" and parameter.numel() > 1:
            dim = max(range(parameter.ndim), key=lambda d: parameter.shape[d])
            found[name] = (Shard(dim),) * len(mesh)
            assert is_valid(tuple(parameter.shape), found[name], mesh)
    return found


def planned(road: Road, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    """The module, parallelized as the road asks."""
    world = torch.distributed.get_world_size()
    inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    layouts = wishes(road.plan, module, inputs, road.mesh, road.batch)
    cluster = cluster_for(road.plan, world)
    if road.plan != "random":
        constraints = {path: format_layout(layout) for path, layout in layouts.items()}
        return sw.parallelize(
            module,
            args,
            example_kwargs=kwargs,
            mesh=road.mesh,
            cluster=cluster,
            constraints=constraints,
            batch=road.batch,
        )
    device = torch.device("cpu")
    call, rows = describe_example(module, args, kwargs, road.batch)
    program = capture(module, *call.global_arguments(rows), device=device)
    request = Request(cluster, (road.mesh,), sharded_inputs=call.sharded, choose=random_planner(road.seed))
    return distribute(module, call, rows, program, request, None, device, road.batch)


def travel(rank: int, world: int, road: Road, reference: Run | None = None) -> Arrival:
    """Trains a case on this rank and compares it with the reference (by default eager PyTorch in one process)."""
    case = CASES[road.case]
    built = case.build()
    rows = case.rows if road.rows is None else road.rows

    def local(step: int, rows: int) -> Any:
        batch = built.make_batch(step, rows)
        return case.local_rows(batch, rows, rank, world) if road.batch == "local" else batch

    start = time.perf_counter()
    module = planned(road, built.module, *local(0, rows))
    middle = time.perf_counter()
    run = train(module, local, built.loss_from, road.steps, rows=rows)
    end = time.perf_counter()
    if reference is None:
        assert not case.random
        reference = reference_run(case, road.steps, rows=rows)
    error = compare(run, reference)
    return Arrival(error, module.plan.flops_share, unsplit(module), (middle - start, end - middle))


def unsplit(module: Any) -> dict[str, float]:
    """Operators with floating-point work that the plan leaves whole on some axis -> their part of the work."""
    from shardwise.pytorch.flops import count_flops

    program = module._shardwise.first
    flops = count_flops(program.program.graph)
    total = sum(flops.values())
    found: dict[str, float] = {}
    nodes = {n.name: n for n in program.program.graph.nodes}
    for plan in module.plan.nodes:
        work = flops.get(plan.name, 0.0)
        if work and any(kind != "factor" for kind, *_ in plan.choice):
            op = nodes[plan.name].op
            found[op] = found.get(op, 0.0) + work / total
    return found


def travel_all(rank: int, world: int, roads: list[Road], references: list[Run | None]) -> list[Arrival | str]:
    """Several roads, one after the other; the text of the error where one fails on this rank.

    A road on which only one rank fails leaves the others waiting: the pool's time-out ends that.
    """
    found: list[Arrival | str] = []
    for road, reference in zip(roads, references):
        torch.manual_seed(0)
        found.append(_attempt(lambda road=road, reference=reference: travel(rank, world, road, reference)))
    return found


def _attempt(run: Callable[[], Arrival]) -> Arrival | str:
    import traceback

    try:
        return run()
    except Exception:
        return traceback.format_exc()
