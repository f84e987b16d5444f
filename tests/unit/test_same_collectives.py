"""All devices start the same collectives in the same order: where one does not, the others wait for it for ever.

Devices that have nothing of a tensor compute nothing, so that their programs differ from those of the others. Random
plans of many models, on meshes on which many pieces are empty.
"""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from shardwise.cluster import Cluster
from shardwise.ir.graph import Graph
from shardwise.pipeline import Planned, Request, plan_program
from shardwise.plan.random_plan import random_planner
from shardwise.plan.reshard import Resharding
from shardwise.pytorch.capture import capture
from shardwise.spmd.device import collectives, device_program
from shardwise.spmd.prune import prune
from tests.dist.toys import fast
from tests.models import CASES

MESHES = ((4,), (2, 2), (3, 2))


def programs(
    found: Planned, cluster: Cluster, mesh: tuple[int, ...], absent: frozenset[str] = frozenset()
) -> list[Graph]:
    """The programs of all devices."""
    resharding = Resharding(mesh, cluster.axes(mesh))
    what = prune(found.graph, found.rules, found.plan, absent)
    everywhere = product(*map(range, mesh))
    return [device_program(*what, resharding, coords) for coords in everywhere]


def made_before_read(graph: Graph) -> bool:
    """Whether every operand was made before."""
    made = {i.value.name for i in graph.inputs}
    for node in graph.nodes:
        if not made.issuperset(node.operands):
            return False
        made |= {v.name for v in node.results if v is not None}
    return made.issuperset(o.name for o in graph.outputs if o.name is not None)


def check(name: str, mesh: tuple[int, ...], rows: int, seeds: int) -> None:
    built = CASES[name].build()
    args, kwargs = built.make_batch(0, rows)
    program = capture(built.module, args, kwargs)
    cluster = fast(prod(mesh))
    for seed in range(seeds):
        found = plan_program(program, Request(cluster, (mesh,), choose=random_planner(seed)))
        paths = [o.path for o in found.graph.outputs_of("output") if o.name is not None]
        for absent in (frozenset[str](), *({frozenset(paths[:1])} if len(paths) > 1 else ())):
            first, *others = programs(found, cluster, mesh, absent)
            assert made_before_read(first)
            expected = collectives(first)
            assert expected, "a random plan sends something"
            for k, other in enumerate(others, 1):
                where = f"{name}, plan {seed} on {mesh}, device {k}"
                assert made_before_read(other), where
                assert collectives(other) == expected, f"{where}: it and device 0 would wait for ever"


@pytest.mark.parametrize("name", ["inplace_net", "convnet", "encoder", "moe"])
def test_all_devices_start_the_same_collectives(name):
    check(name, (4,), CASES[name].rows, seeds=4)
    check(name, (2, 2), CASES[name].rows, seeds=2)
    check(name, (3, 2), 1, seeds=2)


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_devices_start_the_same_collectives_full(name, mesh):
    for rows in (CASES[name].rows, 1):
        check(name, mesh, rows, seeds=4)
