"""Every model of the catalogue, parallelized, equals one process: the losses of its steps, gradients, parameters, buffers.

A program that replicates everything equals one process and proves nothing. So every model runs under the plans of
`roads.py`, and for those that are free to split the work (fast links, random) the test asserts that they did: at most
0.6 of the floating-point operations on a rank at 2 ranks, 0.35 at 4. `WHOLE` names the operators that stand in the
way where a model cannot be split. What is not among the default tests is marked `full`.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

import shardwise as sw
from tests.dist.pool import run_world
from tests.dist.roads import SHARES, Arrival, Road, travel_all
from tests.equality import Run, reference_run, train
from tests.models import CASES

GROUPED = {"aten.convolution_backward.default"}
WHOLE: dict[tuple[str, tuple[int, ...], int | None], set[str]] = {
    # Groups of several channels are blocks of a dim, and discovery cuts dims anywhere. That leaves space, which one
    # axis can cut.
    ("depthwise", (4,), 1): GROUPED,
    ("depthwise", (2, 2), 1): GROUPED | {"aten.convolution.default"},
}
"""(case, mesh, rows where they are not the usual ones) -> operators that cannot be split."""

MESHES = ((2,), (4,), (2, 2))
FAST_TO_PLAN = (
    "mlp", "uneven_mlp", "toy_op", "inplace_net", "two_outputs", "two_gradients", "no_loss", "frozen", "buffers",
    "kwargs_pytree",
)  # fmt: skip
SLOW = ("lstm", "lstm_time_first", "encdec")
FIXED = ("machine", "fast", "batch", "parameters")


@lru_cache(maxsize=64)
def _reference(name: str, steps: int, rows: int) -> Run:
    """Eager PyTorch in one process; where something is random, the parallelized program on one rank."""
    case = CASES[name]
    if not case.random:
        return reference_run(case, steps, rows=rows)
    built = case.build()
    args, kwargs = built.make_batch(0, rows)
    module = sw.parallelize(built.module, args, example_kwargs=kwargs)
    return train(module, built.make_batch, built.loss_from, steps, rows=rows)


def check(roads: list[Road], timeout: float = 240.0) -> None:
    """Runs roads of one world size in one call of the pool, and reports all that fail."""
    worlds = {_size(road.mesh) for road in roads}
    assert len(worlds) == 1
    world = worlds.pop()
    rows = [CASES[r.case].rows if r.rows is None else r.rows for r in roads]
    references = [_reference(r.case, r.steps, n) for r, n in zip(roads, rows)]
    results = run_world(world, travel_all, roads, references, timeout=timeout)
    wrong = []
    for k, road in enumerate(roads):
        wrong += [
            f"{road}, rank {rank}: {result[k]}" for rank, result in enumerate(results) if isinstance(result[k], str)
        ]
        first = results[0][k]
        if isinstance(first, Arrival) and road.plan in ("fast", "random") and first.share > SHARES[world]:
            allowed = WHOLE.get((road.case, road.mesh, road.rows), set())
            if not first.whole or not first.whole.keys() <= allowed:
                wrong.append(f"{road}: {first.share:.2f} of the work on one rank; not split: {first.whole or 'uneven'}")
    assert not wrong, "\n".join(wrong)


def _size(mesh: tuple[int, ...]) -> int:
    found = 1
    for n in mesh:
        found *= n
    return found


@pytest.mark.parametrize("name", CASES)
def test_random_plan_at_2_ranks(name):
    check([Road(name, "random", (2,), steps=2 if name in SLOW else 5)])


@pytest.mark.parametrize(
    ("name", "mesh"), [(n, (4,) if len(n) % 2 == 0 else (2, 2)) for n in CASES if n not in SLOW], ids=str
)
def test_random_plan_at_4_ranks(name, mesh):
    # One mesh each, so that both are covered by about half of the cases; the other ones are among the full tests.
    check([Road(name, "random", mesh, seed=1, steps=2)])


def test_plans_that_wish_or_optimise_at_2_ranks():
    check([Road(name, plan, (2,)) for name in FAST_TO_PLAN for plan in FIXED])


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_plans_that_wish_or_optimise_at_4_ranks(mesh):
    names = ("uneven_mlp", "toy_op", "two_outputs", "buffers")
    check([Road(name, plan, mesh, steps=2) for name in names for plan in FIXED])


def test_every_rank_brings_its_own_rows():
    roads = [
        Road(n, p, (2,), batch="local", steps=2) for n in ("mlp", "buffers", "two_outputs") for p in ("fast", "random")
    ]
    check([*roads, Road("gpt", "random", (2,), batch="local", steps=2)])


@pytest.mark.parametrize("rows", [6, 1, 5])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_rows_that_no_mesh_divides(rows, mesh):
    check([Road(name, "random", mesh, rows=rows, steps=2) for name in ("mlp", "gpt", "two_outputs")])


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
def test_uneven_rows_of_their_own(mesh):
    # 6 rows on 4 ranks are brought as 2, 2, 2, 0; on (2, 2) the program wants 2, 1, 2, 1.
    check([Road("uneven_mlp", "random", mesh, batch="local", rows=6, steps=2)])


@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_ignored_labels_that_differ_by_rank(mesh):
    check([Road("ignored_labels", "random", mesh, batch=batch, seed=2, steps=2) for batch in ("global", "local")])


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "batch"), [*((p, "global") for p in (*FIXED, "random")), ("fast", "local"), ("random", "local")]
)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_full(name, plan, mesh, batch):
    if batch == "local" and CASES[name].batch_dim != 0:
        pytest.skip("batch='local' counts rows in dim 0")
    check([Road(name, plan, mesh, batch=batch, seed=3 if plan == "random" else 0, steps=5)], timeout=500.0)


@pytest.mark.full
@pytest.mark.parametrize("rows", [6, 1])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_full_uneven_rows(name, mesh, rows):
    check([Road(name, "random", mesh, rows=rows, steps=2)], timeout=500.0)
