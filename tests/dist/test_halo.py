"""Images, sequences and volumes cut in space: every rank trains on its part of them, and equals one process."""

import pytest
import torch
import torch.distributed as dist

from shardwise.ir.placement import chunk
from shardwise.pytorch import collectives
from tests.dist.halo_nets import Net, reference, travel
from tests.dist.pool import run_world


def arrivals(net, mesh, dims, steps=5):
    """What became of a network on all ranks. Equality is checked on every rank."""
    world = 1
    for n in mesh:
        world *= n
    return run_world(world, travel, net, mesh, dims, steps, reference(net, steps), timeout=240.0)


def exchanges(found):
    """The number of exchanges, the same on every rank (else they would wait for each other)."""
    counts = {arrival.operators.get("comm.exchange", 0) for arrival in found}
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.parametrize("dim", [2, 3])
def test_image_on_2_ranks(dim):
    found = arrivals(Net((16, 16)), (2,), (dim,))
    # Three convolutions, forward and backward; the pooling reads its own piece alone.
    assert exchanges(found) == 6
    assert found[0].share <= 0.6


def test_image_on_4_ranks():
    found = arrivals(Net((16, 16)), (2, 2), (2, 3))
    assert exchanges(found) == 12
    assert found[0].share <= 0.35


@pytest.mark.parametrize("pool", [pytest.param("avg", marks=pytest.mark.full), "max"])
def test_uneven_image_with_strides(pool):
    found = arrivals(Net((13, 11), strides=(2, 1), kernels=(3, 4), pool=pool), (4,), (2,), steps=3)
    assert exchanges(found) >= 6


@pytest.mark.full
def test_rows_for_some_ranks_only():
    # 6 planes on 4 ranks are 2, 2, 2, 0: the last has nothing, and takes part in every exchange.
    found = arrivals(Net((6, 5, 6), pool="none"), (4,), (2,), steps=2)
    assert exchanges(found) == 6
    assert found[0].share <= 0.7


def test_sequence():
    found = arrivals(Net((24,), strides=(1, 2)), (2,), (2,))
    assert exchanges(found) >= 5
    assert found[0].share <= 0.6


@pytest.mark.parametrize("dims", [None, ()], ids=["planned", "random"])
def test_plans_that_are_free_to_cut_space(dims):
    # One image cannot be cut in rows; channels of 3 and 5 do not divide well.
    found = arrivals(Net((16, 16), rows=1), (2,), dims, steps=2)
    assert found[0].share <= 0.7


def exchange(rank, world):
    generator = torch.Generator().manual_seed(1)
    done = 0
    for shape, dim in (((9, 4), 0), ((3, 10), 1), ((2, 7, 3), 1)):
        whole = torch.randint(-9, 9, shape, generator=generator)
        n = shape[dim]
        owned = tuple(chunk(n, world, k) for k in range(world))
        edges = (0, 1, n // 2, n - 1)
        for shift in (*edges, n):
            for width in (0, 1, 3, n):
                spans = [(max(0, a - shift), min(n, b + width)) if b > a else (0, 0) for a, b in owned]
                for dtype in (torch.float64, torch.int64, torch.bool):
                    start, stop = owned[rank]
                    piece = whole.to(dtype).narrow(dim, start, stop - start)
                    got = collectives.exchange(piece, dist.group.WORLD, dim, owned, tuple(spans)).wait()
                    low, high = spans[rank]
                    assert torch.equal(got, whole.to(dtype).narrow(dim, low, high - low)), (shape, spans)
                    done += 1
    return done


@pytest.mark.parametrize("world", [2, 4])
def test_exchange_gets_what_is_needed_from_whoever_has_it(world):
    assert run_world(world, exchange) == [180] * world
