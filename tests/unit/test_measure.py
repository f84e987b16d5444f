"""The measurements of a process group: short, and the same numbers on every rank."""

import json
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.cluster import COLLECTIVES, Cluster
from shardwise.pytorch.measure import local_cluster, measure_device, measure_links

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


def test_one_dtype():
    rates = measure_device(torch.bfloat16, device=torch.device("cpu"))
    assert rates.flops_per_s > 0 and rates.memory_bytes_per_s > 0 and rates.launch_s > 0
