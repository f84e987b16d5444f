"""Peak memory, measured by the allocator's events: what checkpointed regions save, and what the plan predicted."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.cluster import Device, Level
from shardwise.models.gpt import GPT, GPTConfig
from shardwise.pytorch.peak import peak_increase_bytes, state_bytes
from tests.dist.pool import run_world

WIDTH, ROWS, BLOCKS = 64, 4096, 6


class Deep(nn.Module):
    """Blocks whose activations outweigh their parameters."""

    def __init__(self, regions: bool, drop: float = 0.0):
        super().__init__()
        self.regions = regions
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.regions else block(x))
        return nn.functional.mse_loss(x, y)


def peak(regions: bool, drop: float, cluster: sw.Cluster | None, constraints: dict | None) -> tuple[int, int]:
    """(measured, predicted) bytes of one step with Adam, on this rank."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    module = sw.parallelize(Deep(regions, drop), (x, y), cluster=cluster, constraints=constraints)
    optimizer = torch.optim.Adam(module.parameters())

    def step() -> None:
        module(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    held = state_bytes(module, optimizer, (x, y))
    return held + peak_increase_bytes(step), module.plan.peak_bytes


def increase(module: nn.Module, args: tuple[Tensor, ...]) -> int:
    """The most bytes of a forward and backward beyond those before it."""

    def step() -> None:
        module(*args).backward()
        module.zero_grad()

    step()
    return peak_increase_bytes(step)


def test_values_die_after_their_last_use_as_in_eager():
    """Passing on saved tensors and arguments would keep them to the end of backward: 72 MiB where eager has 44."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        tokens = torch.randint(61, (8, 64))
        cases = (
            (Deep(False), (x, y)),
            (GPT(GPTConfig(61, 64, n_layer=3, n_head=4, n_embd=64)), (tokens, tokens.flip(1))),
        )
        for plain, args in cases:
            eager = increase(plain, args)
            ours = increase(sw.parallelize(copy.deepcopy(plain), args), args)
            assert ours <= 1.1 * eager, f"{type(plain).__name__}: {ours} where eager has {eager}"
    finally:
        torch.set_num_threads(before)


def measure(rank, world, drop):
    # Data parallel: the allocator's events miss what gloo's own threads free, which here are gradients alone.
    constraints = {name: "R" for name, _ in Deep(False).named_parameters()} | {"input 0": "S0", "input 1": "S0"}
    device = Device("described", {"float32": 1e10}, 1 << 34, 1e10, 1e-6)
    slow = sw.Cluster("slow links", device, (Level("link", world, 1e-4, 1e9),), "described")
    found = {regions: peak(regions, drop, slow, constraints) for regions in (True, False)}
    check(found, drop)
    return found


def check(found: dict[bool, tuple[int, int]], drop: float) -> None:
    # aten.native_dropout_backward makes a product inside that no graph shows, one activation of those at the peak.
    error = 0.22 if drop else 0.15
    for regions, (measured, predicted) in found.items():
        text = f"regions={regions}: predicted {predicted}, measured {measured}"
        assert abs(predicted - measured) <= error * measured, text
    assert found[True][0] < 0.6 * found[False][0], found  # six blocks hold what one of them does, and their inputs
    assert found[True][1] < 0.6 * found[False][1], found


@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["plain", "dropout"])
def test_checkpointed_regions_save_what_the_plan_predicts_in_one_process(drop):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check({regions: peak(regions, drop, None, None) for regions in (True, False)}, drop)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["plain", "dropout"])
def test_checkpointed_regions_save_what_the_plan_predicts_on_two_ranks(drop):
    run_world(2, measure, drop)
