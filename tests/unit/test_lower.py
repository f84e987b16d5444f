"""One device's program: what is moved, how often, and that shapes are those of the pieces."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.ir.graph import Graph
from shardwise.ir.placement import local_shape
from shardwise.pipeline import Request, plan_program
from shardwise.plan.random_plan import random_planner
from shardwise.plan.reshard import Resharding
from shardwise.pytorch.capture import capture
from shardwise.spmd.lower import lower
from tests.dist.toys import fast
from tests.models import CASES

MOVES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


def lowered(name: str, mesh: tuple[int, ...], seed: int, coords: tuple[int, ...]) -> tuple[Graph, Graph, object]:
    """(the graph, the program of one device, the plan)."""
    built = CASES[name].build()
    args, kwargs = built.make_batch(0, CASES[name].rows)
    world = 1
    for n in mesh:
        world *= n
    cluster = fast(world)
    request = Request(cluster, (mesh,), choose=random_planner(seed))
    found = plan_program(capture(built.module, args, kwargs), request)
    resharding = Resharding(mesh, cluster.axes(mesh))
    return found.graph, lower(found.graph, found.rules, found.plan, resharding, coords), found.plan


@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "convnet"])
@pytest.mark.parametrize(("mesh", "coords"), [((2,), (1,)), ((2, 2), (0, 1))], ids=str)
def test_nothing_is_moved_twice_within_forward_or_within_backward(name, mesh, coords):
    for seed in range(2):
        _, program, _ = lowered(name, mesh, seed, coords)
        moved = [n for n in program.nodes if n.op.startswith(("comm.", "shard."))]
        moves = Counter((n.phase, n.op, n.args, n.kwargs) for n in moved)
        assert moves, "a random plan moves something"
        twice = [key for key, count in moves.items() if count > 1]
        assert not twice, twice


@pytest.mark.parametrize(("mesh", "coords"), [((2,), (1,)), ((4,), (3,)), ((2, 2), (1, 0))], ids=str)
def test_inputs_and_gradients_have_the_shapes_of_their_pieces(mesh, coords):
    for name in ("uneven_mlp", "gpt"):
        graph, program, plan = lowered(name, mesh, 3, coords)
        shapes = {i.path: i.value.shape for i in graph.inputs_of("parameter")}
        layouts = {path: layout for kind, path, layout in plan.inputs if kind == "parameter"}
        cut = 0
        values = program.values
        for item in program.inputs_of("parameter"):
            expected = local_shape(shapes[item.path], layouts[item.path], mesh, coords)
            assert item.value.shape == expected, item.path
            cut += expected != shapes[item.path]
        for output in program.outputs_of("gradient"):
            if output.name is not None:
                assert values[output.name].shape == local_shape(shapes[output.path], layouts[output.path], mesh, coords)
        assert cut, "a random plan cuts parameters"


def test_a_program_names_collectives_of_the_dialect_alone():
    _, program, _ = lowered("gpt", (2, 2), 0, (0, 0))
    kinds = {n.op.split(".")[1] for n in program.nodes if n.op.startswith("comm.")}
    assert kinds and kinds <= MOVES
    axes = {n.args[1] for n in program.nodes if n.op.startswith("comm.")}
    assert axes == {0, 1}
