"""The GPT of the demo on two local ranks: step time beside DDP, predicted beside measured memory, time to plan.

python -m benchmarks.training [--json FILE] [--quick] [--profile]

Step times: in one run, on the same ranks, the planned model and DDP at five bucket sizes take turns, one step each a
round, with the same threads, batch and optimizer; of each the median counts, and of DDP the best. Memory is measured
in a run of its own. Times to find rules and to plan are those of fresh processes; `plan_*` includes the capture.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row, Target

RANKS = 2
BUCKETS_MB = (1, 5, 25, 50, 100)
CLUSTER = "cpu-gloo"
TARGETS = (
    Target("step_vs_ddp", 1.05),
    Target("peak_error", 0.15),
    Target("rules_cold_s", 20.0),
    Target("rules_warm_s", 0.3),
    Target("plan_cold_s", 20.0),
    Target("plan_warm_s", 2.0),
)


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, float | None]]:
    """All targets."""
    values: dict[str, float | None] = {}
    rows: list[Row] = []
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    with tempfile.TemporaryDirectory() as folder:
        env = {"SHARDWISE_CACHE": folder, "OMP_NUM_THREADS": str(threads)}
        repeats = 1 if options.quick else 3
        for what in ("rules_cold", "rules_warm", "plan_cold", "plan_warm"):
            times = []
            for _ in range(repeats):
                times += [row["seconds"] for row in child({"what": what}, **env)]
            rows.append({"name": what, "seconds": statistics.median(times), "of": len(times)})
            values[f"{what}_s"] = statistics.median(times)
        rounds = 6 if options.quick else 20
        steps = child({"what": "steps", "rounds": rounds, "profile": options.profile}, RANKS, **env)
        rows += steps
        if options.profile:
            print(next(row.pop("profile") for row in steps if "profile" in row))
        times = {row["name"]: row["seconds"] for row in steps if "seconds" in row}
        best = min(seconds for name, seconds in times.items() if name.startswith("ddp"))
        values["step_vs_ddp"] = times["shardwise"] / best
        # Memory that malloc keeps would hide a rise of the resident set; the timings above must not pay for this.
        peaks = child({"what": "memory"}, RANKS, MALLOC_MMAP_THRESHOLD_="65536", **env)
        rows += peaks
        values["peak_error"] = max(abs(r["predicted_bytes"] - r["measured_bytes"]) / r["measured_bytes"] for r in peaks)
    return rows, values


def child(arguments: dict[str, Any], ranks: int | None = None, **env: str) -> list[Row]:
    """This benchmark in processes of its own."""
    return harness.child("benchmarks.training", arguments, ranks, **env)


def work(what: str, **more: Any) -> None:
    """A child."""
    {"steps": steps, "memory": memory}.get(what, lambda: plan_time(what))(**more)


def plan_time(what: str) -> None:
    """Seconds to find rules, or to plan."""
    from shardwise.api import plan_model
    from shardwise.ir import disk
    from shardwise.ir.passes import recompute
    from shardwise.models.training import Recipe, demo_batches, demo_model
    from shardwise.pipeline import find_rules
    from shardwise.pytorch.capture import capture
    from shardwise.pytorch.runner import TorchRunner
    from shardwise.rules.book import RuleBook
    from shardwise.rules.descend import descend

    recipe = Recipe()
    module, example = demo_model(recipe), next(demo_batches(recipe, 1))
    if what == "plan_cold":
        for path in (disk.cache_dir() / "plans").glob("*.json"):
            path.unlink()
    graph = recompute(capture(module, example, None).graph) if what.startswith("rules") else None
    start = time.perf_counter()
    if what == "rules_cold":
        assert graph is not None
        descend(graph, RuleBook(TorchRunner(), use_disk=False, use_shipped=False))
    elif what == "rules_warm":
        assert graph is not None
        discovered = find_rules(graph).discovered
        if discovered:  # the first of the runs fills the cache
            start = time.perf_counter()
            assert not find_rules(graph).discovered
    else:
        cached = plan_model(module, example, mesh=(RANKS,), cluster=CLUSTER).origin.plan_cached
        assert cached == (what == "plan_warm"), what
    harness.report(seconds=time.perf_counter() - start)


def steps(rounds: int, profile: bool) -> None:
    """Step times of all candidates, taking turns."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import shardwise
    from shardwise.models.training import Recipe, demo_batches, demo_model, demo_optimizer

    dist.init_process_group("gloo")
    recipe, rank = Recipe(), dist.get_rank()
    example = next(demo_batches(recipe, 1))
    rows = recipe.rows // RANKS
    local = [t[rank * rows : (rank + 1) * rows] for t in example]
    planned = shardwise.parallelize(demo_model(recipe), example)
    models: dict[str, tuple[Any, list[Any]]] = {"shardwise": (planned, list(example))}
    for size in BUCKETS_MB:
        ddp = DistributedDataParallel(demo_model(recipe), bucket_cap_mb=size, gradient_as_bucket_view=True)
        models[f"ddp {size} MB"] = (ddp, local)
    models["no communication"] = (demo_model(recipe), local)
    turns = {name: _turn(module, batch, demo_optimizer(module, recipe)) for name, (module, batch) in models.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for number in range(rounds + 2):
        for name, turn in turns.items():
            dist.barrier()
            times = turn()
            if number >= 2:
                found[name].append(times)
    slowest: dict[str, list[torch.Tensor]] = {}
    for name, pairs in found.items():
        both = torch.tensor(pairs)
        dist.all_reduce(both, dist.ReduceOp.MAX)  # a step is over when the last rank's is
        slowest[name] = list(both.median(0).values)
    text = _profile(turns["shardwise"]) if profile else None
    if rank == 0:
        plan = planned.plan
        for name, (whole, half) in slowest.items():
            row: Row = {"name": name, "seconds": float(whole), "forward_backward_s": float(half), "rounds": rounds}
            if name == "shardwise":
                row |= {"predicted_forward_backward_s": plan.seconds, "compute_s": plan.compute_s}
            harness.report(**row)
        if text is not None:
            harness.report(name="profile", profile=text)
    dist.destroy_process_group()


def _turn(module: Any, batch: list[Any], optimizer: Any) -> Callable[[], tuple[float, float]]:
    def turn() -> tuple[float, float]:
        start = time.perf_counter()
        module(*batch).backward()
        half = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start, half

    return turn


def _profile(turn: Callable[[], object]) -> str:
    """What a step spends its time on, by torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        turn()
        seconds = time.perf_counter() - start
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50)
    return f"one step under the profiler: {seconds:.3f} s\n{table}"


def memory() -> None:
    """Predicted and measured peak of every rank."""
    import torch.distributed as dist

    import shardwise
    from shardwise.models.training import Recipe, demo_batches, demo_model, demo_optimizer
    from shardwise.pytorch.peak import peak_increase_bytes, resident_increase_bytes, state_bytes

    dist.init_process_group("gloo")
    recipe = Recipe()
    example = next(demo_batches(recipe, 1))
    module = shardwise.parallelize(demo_model(recipe), example)
    optimizer = demo_optimizer(module, recipe)
    turn = _turn(module, list(example), optimizer)
    turn()
    turn()
    held = state_bytes(module, optimizer, example)
    resident = resident_increase_bytes(turn)
    measured = held + peak_increase_bytes(turn)
    rows: list[Any] = [None] * RANKS
    row = {
        "name": f"memory of rank {dist.get_rank()}",
        "predicted_bytes": module.plan.peak_bytes,
        "measured_bytes": measured,
        "held_bytes": held,
        "by_vmhwm_bytes": None if resident is None else held + resident,
    }
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        for row in rows:
            harness.report(**row)
    dist.destroy_process_group()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", action="store_true", help="also print what one step spends its time on")


if __name__ == "__main__":
    if (arguments := harness.is_child()) is not None:
        work(**arguments)
    else:
        harness.run(__doc__, TARGETS, measure, _options)
