"""Ranks that call parallelize differently: all end at once, and the error says which rank and what."""

from __future__ import annotations

import copy
import json
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise import pipeline
from shardwise.errors import ConstraintError, InputError, MemoryLimitError, MismatchError, UnsupportedError
from shardwise.pytorch.state import as_dtensor
from shardwise.pytorch.world import gather_objects
from shardwise.ir.placement import R
from tests.dist.pool import run_world
from tests.dist.toys import Net, batch, close, fast, make, parallel, same

SOON_S = 20.0
"""Far below the timeout of the pool's groups, which is what a rank that waits in vain would take."""


def differ(text, rank, world, **options):
    """parallelize with options of this rank's own raises MismatchError everywhere; the module is as it was."""
    options.setdefault("cluster", fast(world))
    model = make(Net)
    start = time.monotonic()
    with pytest.raises(MismatchError, match=text):
        sw.parallelize(model, batch(), **options)
    assert time.monotonic() - start < SOON_S
    assert type(model) is Net and not any(hasattr(p, "placements") for p in model.parameters())


def options(rank, world, folder):
    """Each option valid on every rank, but not the same."""
    first = rank == 0
    everywhere = "Give the same on every rank"
    wish = {"up.weight": "S0"}
    differ(
        rf"constraints\['up.weight'\] is S0 on rank 0 but S1 on rank 1\. {everywhere}",
        rank,
        world,
        constraints=wish if first else {"up.weight": "S1"},
    )
    differ("is S0 on rank 0 but !S0 on", rank, world, constraints=wish if first else {"up.weight": "!S0"})
    differ(
        r"\['up.weight'\] is S0 on rank 0 but not given on rank 1",
        rank,
        world,
        constraints=wish if first else None,
    )
    differ("batch is 'global' on rank 0 but 'local' on rank 1", rank, world, batch="global" if first else "local")
    differ("memory_limit is 1024 bytes on rank 0", rank, world, memory_limit="1KiB" if first else "2KiB")
    differ("memory_limit is not given on rank 0 but 99 bytes", rank, world, memory_limit=None if first else 99)
    differ("overlap is True on rank 0 but False on", rank, world, overlap=first)
    differ("overlap is 'bitwise' on rank 0 but True on", rank, world, overlap="bitwise" if first else True)
    differ(r"mesh is \(2,\) on rank 0 but \(2, 1\) on rank 1", rank, world, mesh=(2,) if first else (2, 1))
    differ(r"mesh is not given on rank 0 but \(2,\)", rank, world, mesh=None if first else 2)
    mesh = init_device_mesh("cpu", (world,))
    differ(r"mesh is a DeviceMesh of \[0, 1\] on rank 0 but \(2,\)", rank, world, mesh=mesh if first else (2,))
    differ(
        r"cluster is fast \(\w+\) on rank 0 but measured now on", rank, world, cluster=fast(2) if first else "measure"
    )
    differ("cluster is not given on rank 0 but fast", rank, world, cluster=None if first else fast(world))
    data = fast(world).to_dict()  # one file on each machine, of the same name and not of the same content
    data["levels"][0]["alpha_s"] *= 1 + rank
    path = f"{folder}/{rank}.json"
    with open(path, "w") as file:
        json.dump(data, file)
    differ(r"cluster is fast \(\w+\) on rank 0 but fast \(\w+\) on rank 1", rank, world, cluster=path)
    differ(
        "batch is .*; constraints.* is not given on rank 0 but S0 on rank 1",
        rank,
        world,
        batch="global" if first else "local",
        constraints=None if first else wish,
    )


def same_in_other_words(rank, world):
    """What means the same is the same."""
    words = [
        {"mesh": 2, "memory_limit": "1GiB", "constraints": {"up.weight": "S0", "down.weight": "[S1]"}},
        {"mesh": (2,), "memory_limit": 1 << 30, "constraints": {"down.weight": " S1", "up.weight": "[ S0 ]"}},
    ]
    plain = make(Net)
    ours = parallel(copy.deepcopy(plain), world, batch(), **words[rank])
    ours(*batch()).backward()
    plain(*batch()).backward()
    same(ours, plain)


class Fails(nn.Module):
    """Cannot be initialised on one rank."""

    fails = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12, 12, device="meta"))

    def reset_parameters(self):
        if self.fails:
            raise OSError("no such file of weights")
        torch.nn.init.ones_(self.weight)

    def forward(self, x, y):
        return (x @ self.weight.double()).square().mean() + y.double().mean()


def failures(rank, world):
    """One rank raises its own error, the other one that names it, at once."""

    def fails_on_1(kind, text, module=None, example=None, **options):
        options.setdefault("cluster", fast(world))
        start = time.monotonic()
        found = module or make(Net)
        with pytest.raises(kind if rank == 1 else MismatchError, match=text) as caught:
            sw.parallelize(found, example or batch(), **options)
        assert time.monotonic() - start < SOON_S
        assert rank == 1 or ("rank 1 failed while" in str(caught.value) and kind.__name__ in str(caught.value))
        assert gather_objects(rank) == list(range(world)), "the ranks are in step"

    odd = rank == 1
    fails_on_1(InputError, "not a placement: 'X'", constraints={"up.weight": "X" if odd else "S0"})
    fails_on_1(InputError, "describes 4 devices but 2 ranks", cluster=fast(4) if odd else fast(2))
    fails_on_1(InputError, "batch: expected", batch="mine" if odd else "global")
    fails_on_1(InputError, "product must be 2", mesh=(3,) if odd else (2,))
    fails_on_1(InputError, "expected a torch.nn.Module, got str", module="a model" if odd else None)
    x, y = batch()
    placed = as_dtensor(x, init_device_mesh("cpu", (world,)), (R,))
    fails_on_1(UnsupportedError, "an argument is a DTensor", example=(placed if odd else x, y))
    broken = Fails()
    broken.fails = odd
    fails_on_1(OSError, "no such file of weights", module=broken)


class Wide(nn.Module):
    """Has a parameter more on one rank."""

    def __init__(self, more: bool = True):
        super().__init__()
        self.up = nn.Linear(12, 12)
        if more:
            self.more = nn.Parameter(torch.ones(3))

    def forward(self, x, y):
        return self.up(x).square().mean() + y.double().mean()


def paths(rank, world):
    """A path that the model of one rank alone lacks, and one that all lack."""
    start = time.monotonic()
    model = Wide(more=rank == 0).double()
    with torch.no_grad():
        model.up.weight.fill_(0.5)
        model.up.bias.fill_(0.5)
    with pytest.raises(MismatchError if rank == 0 else InputError, match="the model has no 'more'; try"):
        sw.parallelize(model, batch(), cluster=fast(world), constraints={"more": "R"})
    with pytest.raises(MismatchError, match="only one of rank 0 and rank 1 has more: build the same model"):
        sw.parallelize(model, batch(), cluster=fast(world))
    with pytest.raises(InputError, match="the model has no 'nope'"):
        sw.parallelize(model, batch(), cluster=fast(world), constraints={"nope": "R"})
    odd = {"up.weight": "S0"} if rank == 0 else {"nope": "R"}
    with pytest.raises(MismatchError, match=r"\['nope'\] is not given on rank 0 but R on rank 1"):
        sw.parallelize(model, batch(), cluster=fast(world), constraints=odd)
    assert time.monotonic() - start < SOON_S


def refusals(rank, world):
    """What rank 0 raises while it plans reaches all, with its numbers."""
    for limit in ("1KiB", 1):
        with pytest.raises(MemoryLimitError, match=r"the least that would do is [\d.]+ KiB") as caught:
            parallel(make(Net), world, batch(), memory_limit=limit)
        least = gather_objects((caught.value.least_bytes, caught.value.mesh, str(caught.value)))
        assert least[0] == least[1] and least[0][0] > 1024 and least[0][1] == (2,)
    ours = parallel(make(Net), world, batch(), memory_limit=least[0][0])
    assert ours.plan.peak_bytes == least[0][0]
    close(ours(*batch()).detach(), make(Net)(*batch()).detach())
    with pytest.raises(ConstraintError, match="up.weight cannot be placed as S7"):
        parallel(make(Net), world, batch(), constraints={"up.weight": "S7"})


def penalties(rank, world):
    """A penalty on the parameters outside the module: the two ways that docs/run.md names."""
    plain = make(Net)
    loss = plain(*batch()) + 0.1 * sum(p.abs().sum() for p in plain.parameters())
    loss.backward()
    for wish in (None, {"up.weight": "S0", "up.bias": "S0", "down.weight": "S1"}):
        ours = parallel(make(Net), world, batch(), constraints=wish)
        together = ours(*batch()) + 0.1 * sum(p.abs().sum().full_tensor() for p in ours.parameters())
        close(together.detach(), loss.detach())
        together.backward()
        same(ours, plain)
        ours = parallel(make(Net), world, batch(), constraints=wish)
        ours(*batch()).backward()
        (0.1 * sum(p.abs().sum() for p in ours.parameters())).backward()
        same(ours, plain)


def outputs(rank, world):
    """Ranks that do different things with the outputs: all are told, and can go on."""
    first = rank == 0
    start = time.monotonic()
    ours = parallel(make(Net), world, batch(), example_kwargs={"logits": True}, constraints={"output 1": "S0"})
    plain = make(Net)

    loss, logits = ours(*batch(), logits=True)
    with pytest.raises(MismatchError, match="rank 1 differs from rank 0: in which outputs receive gradients"):
        extra = logits.sum()  # gathered on both
        (loss if first else loss + extra).backward()

    losses = [ours(*batch(step), logits=True)[0] for step in range(2)]
    with pytest.raises(MismatchError, match=r"rank 1 differs from rank 0 \(\[2, 3\] by rank\): in the call whose"):
        losses[0 if first else 1].backward()

    loss, logits = ours(*batch(), logits=True)
    with pytest.raises(
        MismatchError, match="rank 1 would run backward; rank 0 would use an output that lies in pieces"
    ):
        _ = float(logits.sum()) if first else loss.backward()

    ours.zero_grad()
    loss, logits = ours(*batch(), logits=True)
    expected = plain(*batch(), logits=True)
    close(logits.detach(), expected[1].detach())
    (loss + logits.square().mean()).backward()
    (expected[0] + expected[1].square().mean()).backward()
    same(ours, plain)

    loss, _ = ours(*batch(), logits=True)
    with pytest.raises(MismatchError, match="rank 1 would call it; rank 0 would run backward"):
        _ = loss.backward() if first else ours(*batch(), logits=True)
    assert time.monotonic() - start < SOON_S


def orders(rank, world):
    """Programs that would start other collectives raise when they are made, on every rank."""
    made = pipeline.collectives
    pipeline.collectives = lambda graph: made(graph)[: None if rank == 0 else -1]
    try:
        with pytest.raises(AssertionError, match="other orders"):
            parallel(make(Net), world, batch(), every=True)
    finally:
        pipeline.collectives = made
    ours = parallel(make(Net), world, batch(), every=True)
    close(ours(*batch()).detach(), make(Net)(*batch()).detach())


CHECKS = [same_in_other_words, failures, paths, refusals, penalties, outputs, orders]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_two_ranks(check):
    run_world(2, check)


def test_options(tmp_path):
    run_world(2, options, str(tmp_path))
