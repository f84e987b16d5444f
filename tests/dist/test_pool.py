from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.conftest import ROOT
from tests.dist.pool import Pool, RankDied, RankError, RankTimeout, run_world


def add_up(rank, world, x):
    t = torch.tensor([float(x + rank)])
    dist.all_reduce(t)
    return rank, world, t.item()


def environment(rank, world):
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GLOO_SOCKET_IFNAME"], torch.get_num_threads()


def draw(rank, world):
    torch.set_default_dtype(torch.float64)
    return torch.rand(3)


def raise_in_one(rank, world, which):
    if rank == which:
        raise ValueError(f"no such thing on {rank}")
    dist.barrier()


def raise_unpicklable(rank, world):
    class Local(Exception):
        pass

    raise Local("made here")


def return_unpicklable(rank, world):
    return lambda: None


def die(rank, world):
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(rank, world):
    if rank == 1:
        time.sleep(600)


def raise_while_the_other_works(rank, world):
    if rank == 0:
        raise ValueError("left early")
    time.sleep(600)


def out_of_step(rank, world):
    """Leaves a side group, a collective that is never waited for, and a failure of one rank."""
    group = dist.new_group(list(range(world)))
    if rank:
        dist.all_reduce(torch.ones(1), group=group, async_op=True)
    else:
        raise ValueError("left early")


def read_a_shard(rank, world, groups_before):
    """The global value of a result on a mesh whose groups have other names than those of the run before."""
    for _ in range(groups_before):
        dist.new_group(list(range(world)))
    mesh = init_device_mesh("cpu", (world // 2, 2))
    shard = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)])
    return shard.detach().mul(2).full_tensor().sum().item()


def hold_pids(rank, world):
    if os.fork() == 0:
        time.sleep(600)
    return os.getpid()


def gone(pid: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_results_come_in_rank_order(ranks):
    total = sum(range(ranks.world)) + 10 * ranks.world
    assert ranks.run(add_up, 10) == [(rank, ranks.world, total) for rank in range(ranks.world)]


def test_processes_are_kept(ranks):
    ranks.run(add_up, 1)
    before = ranks.pids
    started = time.monotonic()
    for x in range(10):
        ranks.run(add_up, x)
    assert ranks.pids == before
    assert time.monotonic() - started < 5


def test_every_function_starts_alike(ranks):
    first, again = ranks.run(draw), ranks.run(draw)
    assert all(torch.equal(t, first[0]) for t in first + again)
    assert ranks.run(environment) == [(str(r), str(ranks.world), "lo", 1) for r in range(ranks.world)]


@pytest.mark.parametrize("which", [0, 1])
def test_an_exception_names_the_rank_and_where(ranks, which):
    before = ranks.pids
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(raise_in_one, which)
    text = str(caught.value)
    assert text.startswith(f"rank {which} of {ranks.world} failed in tests.dist.test_pool.raise_in_one: ValueError")
    assert f"no such thing on {which}" in text and "in raise_in_one" in text
    assert caught.value.rank == which
    assert time.monotonic() - started < 20, "the other ranks waited for their collective to time out"
    ranks.run(add_up, 0)
    assert not before or ranks.pids == before, "an exception cost the processes"


def test_what_cannot_be_pickled_is_reported():
    with pytest.raises(RankError, match="Local: made here"):
        run_world(2, raise_unpicklable)
    with pytest.raises(RankError, match="pickle"):
        run_world(2, return_unpicklable)
    with pytest.raises(TypeError, match="cannot be sent to a rank"):
        run_world(2, lambda rank, world: None)
    assert run_world(2, add_up, 0)[0] == (0, 2, 1.0)


def test_a_group_out_of_step_does_not_reach_the_next_test(ranks):
    for _ in range(3):
        with pytest.raises(RankError, match="left early"):
            ranks.run(out_of_step)
        assert ranks.run(add_up, 0)[0][2] == sum(range(ranks.world))


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_meshes_of_an_earlier_group_do_not_reach_the_next_test(ranks):
    assert [ranks.run(read_a_shard, n) for n in (3, 0)] == [[56.0] * 4] * 2


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_killed_rank_is_named_and_replaced(ranks):
    ranks.run(add_up, 0)
    before = ranks.pids
    started = time.monotonic()
    with pytest.raises(RankDied, match=rf"died \(signal SIGKILL\) while it ran tests\.dist\.test_pool\.die") as caught:
        ranks.run(die)
    assert time.monotonic() - started < 20
    assert caught.value.rank == ranks.world - 1
    assert all(gone(pid) for pid in before)
    assert ranks.run(add_up, 0)[0][2] == sum(range(ranks.world))
    assert not set(ranks.pids) & set(before)


def test_a_rank_killed_between_two_runs_is_replaced():
    own = Pool(2)
    try:
        own.run(add_up, 0)
        victim = own.pids[1]
        os.kill(victim, signal.SIGKILL)
        while any(child.pid == victim for child in multiprocessing.active_children()):
            time.sleep(0.01)
        assert own.run(add_up, 0) == [(0, 2, 1.0), (1, 2, 1.0)]
    finally:
        own.close()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_hanging_rank_is_named_with_its_stack_and_replaced(ranks):
    ranks.run(add_up, 0)
    before = ranks.pids
    with pytest.raises(RankTimeout, match=rf"rank 1 of {ranks.world} did not answer within 1 s") as caught:
        ranks.run(hang, timeout=1)
    assert "in hang" in str(caught.value), "the stack of the rank is missing"
    assert all(gone(pid) for pid in before)
    assert ranks.run(add_up, 0)[0][2] == sum(range(ranks.world))


def test_a_failure_does_not_wait_for_ranks_that_go_on(monkeypatch):
    monkeypatch.setattr("tests.dist.pool._GRACE_S", 0.5)
    with pytest.raises(RankTimeout, match="left early") as caught:
        run_world(2, raise_while_the_other_works)
    assert caught.value.rank == 0 and "in raise_while_the_other_works" in str(caught.value)
    assert run_world(2, add_up, 0)[0] == (0, 2, 1.0)


def test_close_leaves_no_process():
    own = Pool(2)
    pids = own.run(hold_pids)
    pids += [child for pid in pids for child in children_of(pid)]
    assert len(pids) == 4
    own.close()
    assert all(gone(pid) for pid in pids)


SESSION = """
import os, signal, sys
from tests.conftest import ROOT
from tests.dist.pool import pool
from tests.dist.test_pool import add_up, hang
pool(2).run(add_up, 0)
print(*pool(2).pids, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end, code",
    [
        ("sys.exit(3)", 3),
        ("signal.setitimer(signal.ITIMER_REAL, 1); pool(2).run(hang)", -signal.SIGALRM),
    ],
    ids=["exit", "killed while ranks work"],
)
def test_the_end_of_the_session_leaves_no_process(end, code):
    command = [sys.executable, "-c", SESSION.format(end=end)]
    session = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert session.returncode == code
    pids = [int(pid) for pid in session.stdout.split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
