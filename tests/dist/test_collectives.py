"""Every `comm.*` operator against the whole tensor, uneven and empty pieces, several dtypes, 2 and 4 ranks."""

import torch
import torch.distributed as dist

from shardwise.ir.placement import chunk
from shardwise.pytorch import collectives
from tests.dist.pool import run_world

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)


def lens_of(n, world):
    return tuple(stop - start for start, stop in (chunk(n, world, k) for k in range(world)))


def piece(whole, place, rank):
    dim, outer, unit, lens = place
    start = sum(lens[:rank])
    return collectives.slice_piece(whole, dim, outer, unit, start, start + lens[rank]).contiguous()


def places(shape, world):
    """Whole dims, and dims read as (outer, n, unit)."""
    found = [(d, 1, 1, lens_of(size, world)) for d, size in enumerate(shape)]
    for d, size in enumerate(shape):
        for outer in (2, 3):
            if size % outer == 0:
                found.append((d, outer, 1, lens_of(size // outer, world)))
                found.append((d, 1, outer, lens_of(size // outer, world)))
        if size % 6 == 0:
            found.append((d, 2, 3, lens_of(size // 6, world)))
    return found


def make(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-4, 5, shape, generator=generator)
    return whole > 0 if dtype == torch.bool else whole.to(dtype)


def check(rank, world):
    group = dist.group.WORLD
    done = 0
    for shape in ((6, 5), (12, 1, 3), (1, 7), (2, 18)):
        for dtype in DTYPES:
            whole = make(shape, dtype, 1)
            for place in places(shape, world):
                got = collectives.all_gather(piece(whole, place, rank), group, place).wait()
                assert torch.equal(got, whole), ("all_gather", shape, dtype, place)
                for target in places(shape, world):
                    if target != place:
                        got = collectives.all_to_all(piece(whole, place, rank), group, place, target).wait()
                        assert torch.equal(got, piece(whole, target, rank)), ("all_to_all", shape, place, target)
                        done += 1
                for op in ("sum", "max", "min") if dtype != torch.bool else ("max", "min"):
                    summands = [make(shape, dtype, 10 + r) for r in range(world)]
                    stack = torch.stack(summands)
                    expected = stack.sum(0).to(dtype) if op == "sum" else getattr(stack.to(torch.int64), f"a{op}")(0)
                    expected = expected.to(dtype)
                    got = collectives.reduce_scatter(summands[rank], group, op, place).wait()
                    assert torch.equal(got, piece(expected, place, rank)), ("reduce_scatter", op, shape, place)
                    got = collectives.all_reduce(summands[rank].clone(), group, op, in_place=True).wait()
                    assert torch.equal(got, expected), ("all_reduce", op, shape)
                    done += 2
    turned = torch.arange(12.0).reshape(3, 4).t()
    got = collectives.all_reduce(turned, group, "sum", in_place=True).wait()
    assert torch.equal(got, world * torch.arange(12.0).reshape(3, 4).t())
    mixed = [torch.full((3,), 1.0 + rank), torch.full((2, 2), 2.0), torch.zeros(0)]
    buffer, shapes = torch.cat([t.reshape(-1) for t in mixed]), [t.shape for t in mixed]
    got = [p.wait() for p in collectives.all_reduce_many(buffer, shapes, group, "sum")]
    assert torch.equal(got[0], torch.full((3,), sum(1.0 + r for r in range(world))))
    assert torch.equal(got[1], torch.full((2, 2), 2.0 * world)) and got[2].shape == (0,)
    return done


def test_collectives_equal_the_whole_on_2_ranks():
    assert run_world(2, check)[0] > 500


def test_collectives_equal_the_whole_on_4_ranks():
    assert run_world(4, check)[0] > 500


def test_fill_is_neutral():
    x = torch.tensor([-3, 0, 5])
    for dtype in (torch.float32, torch.int64):
        for op, combine in (("sum", torch.add), ("prod", torch.mul), ("max", torch.maximum), ("min", torch.minimum)):
            neutral = collectives.fill((3,), dtype, op, torch.device("cpu"))
            assert torch.equal(combine(x.to(dtype), neutral), x.to(dtype))
