"""Autocast around the call and inside the model: the parallelized program casts where eager PyTorch casts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.pool import run_world
from tests.dist.roads import Road, planned
from tests.equality import whole

ROWS, WIDTH, HIDDEN, CLASSES = 6, 12, 40, 7
TOLERANCE = 0.03
"""bfloat16 has 8 bits: a sum over pieces rounds each of them to 2^-8, a few times in a row."""


class Net(nn.Module):
    """What autocast casts (linear, matmul), what it keeps in float32 (softmax, norm, loss), and casts of its own."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.seen: dict[str, torch.dtype] = {}

    def body(self, x: Tensor) -> Tensor:
        h = self.up(x)
        scores = (h @ h.t()).softmax(-1)
        return self.down(self.norm(torch.tanh(scores @ h)))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.inside:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = self.body(x)
            with torch.autocast("cpu", enabled=False):
                return F.cross_entropy(out.float(), y), out
        out = self.body(x)
        return F.cross_entropy(out, y), out


def batch(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=source), torch.randint(CLASSES, (ROWS,), generator=source)


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def autocast(rank, world, mesh, inside):
    torch.manual_seed(4)
    plain = Net(inside)
    around = torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside)
    with around:  # the example is captured as it will be called
        ours = planned(Road("", "random", mesh, seed=2), copy.deepcopy(plain), batch(0), {})
    for step in range(2):
        results = []
        for module in (plain, ours):
            with around:
                loss, out = module(*batch(step))
            loss.backward()
            results.append((loss, out))
        (their_loss, their_out), (loss, out) = results
        assert (loss.dtype, out.dtype) == (their_loss.dtype, their_out.dtype) == (torch.float32, torch.bfloat16)
        assert relative(whole(loss), their_loss.detach()) < TOLERANCE
        assert relative(whole(out + 0), their_out.detach()) < TOLERANCE
    for name, theirs in plain.named_parameters():
        mine = dict(ours.named_parameters())[name]
        assert mine.grad.dtype == theirs.grad.dtype == torch.float32, name
        assert relative(whole(mine.grad), theirs.grad) < TOLERANCE, (name, relative(whole(mine.grad), theirs.grad))
    dtypes = {v.dtype for n in ours._shardwise.first.graph.nodes for v in n.results if v is not None}
    assert {"bfloat16", "float32"} <= dtypes
    assert len(ours._shardwise.programs) == 1
    if not inside:  # without autocast it is another program, in float32
        for module in (plain, ours):
            module.zero_grad()
            module(*batch(3))[0].backward()
        assert len(ours._shardwise.programs) == 2
        for name, theirs in plain.named_parameters():
            assert relative(whole(dict(ours.named_parameters())[name].grad), theirs.grad) < 1e-5, name
    assert ours.plan.flops_share <= (0.6 if world == 2 else 0.35)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_equals_eager_autocast(mesh, inside):
    run_world(4 if len(mesh) == 2 else 2, autocast, mesh, inside)
