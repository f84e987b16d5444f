"""Models that other people wrote (shared/zoo), parallelized on 2 and 4 ranks, equal one process."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise.errors import CaptureError
from tests.dist.pool import run_world
from tests.dist.roads import SHARES, Arrival, Road, planned, unsplit
from tests.equality import FLOOR, TOLERANCE, Run, compare, train

FAST = ("gpt2", "custom_op_mlp", "inplace_net", "uneven_mlp")
SLOW = (
    "mistral", "mixtral", "bert", "t5", "deberta_v2", "mamba", "timm_resnet", "swin", "of3_evoformer", "lstm_lm",
)  # fmt: skip
STEPS = 3
LR = 0.01
SINGLE = 1e-5
"""Tolerance where the model itself computes parts in float32: sums in another order differ by some 1e-7 a step."""
ONLY_SINGLE = {"mixtral"}
"""Entries with an operator that knows no float64: the experts' grouped product, torch._grouped_mm."""
SINGLE_FLOOR = 1e-3
"""Likewise: what is zero in theory holds rounding errors of some 1e-9 of the gradients' norm."""


def load(folder: Path) -> Any:
    """The zoo as a module."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module("zoo_shared")


def build(folder: Path, name: str) -> tuple[Any, Any, Any]:
    """(module, make_batch, loss_from), in fp64 where the model can be; the batch is the same in every step."""
    module, args, kwargs, loss_from = load(folder).build(name)

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    if name in ONLY_SINGLE:
        return module, lambda step, rows: (tuple(args), dict(kwargs)), loss_from
    batch = pytree.tree_map(double, (tuple(args), dict(kwargs)))
    return module.double(), lambda step, rows: batch, loss_from


def reference(folder: Path, name: str) -> Run:
    """Eager PyTorch; the program on one rank where something is random."""
    module, make_batch, loss_from = build(folder, name)
    if load(folder).ENTRIES[name].stochastic:
        args, kwargs = make_batch(0, 0)
        module = sw.parallelize(module, args, example_kwargs=kwargs)
    return train(module, make_batch, loss_from, STEPS, LR)


def travel(rank: int, world: int, folder: Path, road: Road, expected: Run) -> Arrival:
    """Trains an entry on this rank and compares."""
    module, make_batch, loss_from = build(folder, road.case)
    module = planned(road, module, *make_batch(0, 0))
    exact = (SINGLE, SINGLE_FLOOR) if _computes_in_single(module) else (TOLERANCE, FLOOR)
    error = compare(train(module, make_batch, loss_from, STEPS, LR), expected, *exact)
    return Arrival(error, module.plan.flops_share, unsplit(module), (0.0, 0.0))


def _computes_in_single(module: Any) -> bool:
    """Whether a model that was made fp64 casts to float32 inside, as losses and norms of transformers do."""
    graph = module._shardwise.first.graph
    return any(v is not None and v.dtype == "float32" and v.numel > 1 for n in graph.nodes for v in n.results)


def check(shared_dir: Path, name: str, plan: str, mesh: tuple[int, ...] = (2,)) -> None:
    folder = shared_dir / "zoo"
    try:
        expected = reference(folder, name)
    except ImportError as error:
        pytest.skip(f"{name} needs a package: {error}")
    world = math.prod(mesh)
    arrival = run_world(world, travel, folder, Road(name, plan, mesh), expected, timeout=570.0)[0]
    assert arrival.share <= SHARES[world], f"{arrival.share:.2f} of the work on one rank; not split: {arrival.whole}"


@pytest.mark.parametrize("name", FAST)
def test_random_plan(shared_dir, name):
    check(shared_dir, name, "random")


@pytest.mark.full
@pytest.mark.parametrize("name", SLOW)
def test_random_plan_full(shared_dir, name):
    check(shared_dir, name, "random")


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_random_plan_on_four_ranks(shared_dir, name, mesh):
    check(shared_dir, name, "random", mesh)


@pytest.mark.full
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_plan_for_fast_links(shared_dir, name):
    check(shared_dir, name, "fast")


def test_a_loop_over_data_is_refused_with_its_line(shared_dir):
    try:
        module, args, kwargs, _ = load(shared_dir / "zoo").build("mixtral_loop")
    except ImportError as error:
        pytest.skip(f"mixtral_loop needs a package: {error}")
    with pytest.raises(CaptureError, match=r"nonzero.*modeling_mixtral\.py:\d+"):
        sw.plan(module, args, example_kwargs=kwargs)
