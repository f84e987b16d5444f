"""How ranks wait for one another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwise.pytorch import world as ranks
from tests.dist.pool import run_world


def words(rank, world):
    """While rank 0 works it is heard; the result and what comes after are the same on every rank."""
    ranks.BEAT_S = 0.001
    heard = []
    broadcast = dist.broadcast

    def counting(tensor, *args, **kwargs):
        found = broadcast(tensor, *args, **kwargs)
        heard.append(1)
        return found

    dist.broadcast = counting
    try:

        def work():
            assert rank == 0
            while len(heard) < 20:  # goes on for as long as nobody hears of it
                torch.ones(64).sum()
            return {"plan": [1, 2]}

        assert ranks.from_rank_0(work) == {"plan": [1, 2]}
        assert len(heard) >= 20
    finally:
        dist.broadcast = broadcast
        ranks.BEAT_S = 2.0
    assert ranks.from_rank_0(lambda: 3) == 3
    assert ranks.gather_objects(rank) == list(range(world))


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_works_for_long_says_so(world):
    run_world(world, words)


def test_one_process_works_for_itself():
    assert ranks.from_rank_0(lambda: 5) == 5
