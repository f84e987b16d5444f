"""The measurements of a process group: short, and the same numbers on every rank."""

import json
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.cluster import COLLECTIVES, Cluster
from shardwise.pytorch import measure
from shardwise.pytorch.measure import local_cluster, measure_links

RANKS = 2


def _measure(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    start = time.perf_counter()
    samples = measure_links()
    links_s = time.perf_counter() - start
    cluster = local_cluster(dtypes=(torch.float32,))
    with open(f"{results}/{rank}.json", "w") as file:
        json.dump({"links_s": links_s, "samples": samples, "cluster": cluster.to_dict()}, file)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(60)
def test_two_ranks_measure_the_same(tmp_path):
    context = mp.spawn(_measure, (tmp_path / "store", tmp_path), nprocs=RANKS, join=False)
    try:
        deadline = time.monotonic() + 55
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks did not finish"
    finally:
        for process in context.processes:
            process.kill()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    assert first["samples"] == second["samples"] and first["cluster"] == second["cluster"]
    for kind in COLLECTIVES:
        rows = [(nbytes, seconds) for k, nbytes, seconds in first["samples"] if k == kind]
        assert 2 <= len(rows) <= 5 and rows[0][0] == 4096
        assert all(seconds > 0 for _, seconds in rows)
    assert first["links_s"] < 10  # about 0.4 s where the cores are free; others may be busy
    cluster = Cluster.from_dict(first["cluster"])
    assert cluster.world_size == RANKS and "measured" in cluster.source
    assert set(cluster.levels[0].fits) == set(COLLECTIVES)
    assert cluster.axes((RANKS,))[0].fits == cluster.levels[0].fits


def test_without_a_process_group_it_is_one_device():
    assert measure_links() == []
    cluster = local_cluster(dtypes=(torch.float32,))
    assert cluster.world_size == 1
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert 1e6 < cluster.device.flops_per_s["float32"] < 1e16
    assert 1e6 < cluster.device.memory_bytes_per_s < 1e14
    assert 1e-9 < cluster.device.launch_s < 1e-1


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_moment_during_one_pass_changes_nothing(slow):
    """The figures of a pass in which everything, or only the work alone, took ten times as long do not count."""
    quiet = (0.004, {("all_reduce", 4096): 0.005, ("all_gather", 4096): 0.006})
    expected = [("all_gather", 4096, pytest.approx(5e-4)), ("all_reduce", 4096, pytest.approx(2.5e-4))]
    for busy in ((0.04, {key: 10 * s for key, s in quiet[1].items()}), (0.04, quiet[1]), (0.004, {})):
        passes = [quiet, busy] if slow else [busy, quiet]
        assert measure._faster(passes) == expected


def test_the_faster_pass_of_a_device_counts(monkeypatch):
    passes = iter([measure.Rates((1e-9,), 1e-8, 2e-5), measure.Rates((2e-9,), 1e-9, 1e-5)])
    monkeypatch.setattr(measure, "_rates", lambda *_: next(passes))
    device = local_cluster(dtypes=(torch.float32,)).device
    assert device.flops_per_s == {"float32": pytest.approx(1e9)}
    assert (device.memory_bytes_per_s, device.launch_s) == (pytest.approx(1e9), 1e-5)
