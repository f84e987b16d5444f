"""How long planning takes and how near to the best the plans are.

python -m benchmarks.planner [--json FILE] [--quick]

Models: GPT of the demo's width with 2, 4, 8 and 32 layers, batch 8, on meshes (8) and (2,4); one MLP block on (2,2,2);
GPT with 4 layers under a memory limit of 60 % of the peak of its unlimited plan; LLaMA-3-8B (needs transformers) on
(8), (8,8) and (2,8,8). The clusters are described, not measured: a100x8, and nodes of h100x64 for LLaMA. Rules are
warm and capture is not counted. A row's time is that of building the tables and solving them: the least of
`repeats`, since other programs on the machine only add to it.

The baseline, in the same run with --baseline: the program with every pair of layouts from the start (`full_s`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.planner_models import BATCH, MODELS, Model
from shardwise.cluster import Cluster
from shardwise.plan import reshard
from shardwise.plan.fold import fold
from shardwise.plan.formulate import Formulation
from shardwise.plan.network import FORBIDDEN, build_network
from shardwise.plan.planner import GAP, Outcome, optimise
from shardwise.plan.problem import Settings, build_problem

CLUSTER = "a100x8"
LARGE_CLUSTER = "h100x64"
LARGE = ("llama",)
"""What the names of cases begin with whose models need more than one node."""
LIMITED = 0.6
"""Of the peak of the unlimited plan."""


def described(mesh: tuple[int, ...], large: bool) -> Cluster:
    """The cluster of a case: large models run on nodes of eight H100."""
    if not large:
        return Cluster.load(CLUSTER)
    whole, nodes = Cluster.load(LARGE_CLUSTER), math.prod(mesh) // 8
    inner, outer = whole.levels
    return replace(whole, levels=(inner, replace(outer, size=nodes)) if nodes > 1 else (inner,))


def plan(
    subject: Model, mesh: tuple[int, ...], cluster: Cluster, limit: int | None = None
) -> tuple[float, float, Outcome]:
    """Seconds to build the tables and to solve, and the result. Nothing is remembered from earlier calls."""
    for table in (reshard._table, reshard._steps, reshard._path):
        table.cache_clear()
    start = time.perf_counter()
    settings = Settings(mesh, memory_limit_bytes=limit)
    problem = build_problem(subject.graph, subject.rules, cluster, settings, subject.flops)
    built = time.perf_counter()
    outcome = optimise(problem)
    return built - start, time.perf_counter() - built, outcome


def full(subject: Model, mesh: tuple[int, ...]) -> tuple[float, int, float]:
    """Seconds, variables and optimum of the linear program with every pair from the start and no reduction."""
    start = time.perf_counter()
    problem = build_problem(subject.graph, subject.rules, Cluster.load(CLUSTER), Settings(mesh), subject.flops)
    network = build_network(problem)
    form = Formulation(problem, network, fold(network, None), limited=False)
    pairs = []
    for h, hub in enumerate(form.folded.hubs):
        rest = (hub.micros < FORBIDDEN) & ~form.have[h]
        pairs += [(h, int(o), int(q)) for o, q in np.argwhere(rest)]
    form.add(pairs)
    optimum = form.program.solve()
    return time.perf_counter() - start, form.program.columns, optimum.objective / 1e6


def cases(quick: bool) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
    """(name, model, mesh, whether memory is limited)"""
    yield "mlp_2x2x2", "mlp", (2, 2, 2), False
    for layers in (2, 4, 32) if quick else (2, 4, 8, 32):
        yield f"gpt{layers}_8", f"gpt{layers}", (8,), False
        yield f"gpt{layers}_2x4", f"gpt{layers}", (2, 4), False
    if not quick:
        yield "gpt4_8_limited", "gpt4", (8,), True
        yield "gpt4_2x4_limited", "gpt4", (2, 4), True
        for mesh in ((8,), (8, 8), (2, 8, 8)):
            yield f"llama8b_{'x'.join(map(str, mesh))}", "llama8b", mesh, False


def row(name: str, subject: Model, mesh: tuple[int, ...], limit: int | None, repeats: int) -> dict:
    """One case, solved `repeats` times; the fastest counts."""
    cluster = described(mesh, name.startswith(LARGE))
    runs = [plan(subject, mesh, cluster, limit) for _ in range(repeats)]
    build_s, solve_s, outcome = min(runs, key=lambda run: run[0] + run[1])
    return {
        "case": name,
        "mesh": list(mesh),
        "memory_limit_bytes": limit,
        "peak_bytes": outcome.evaluation.peak_bytes,
        "build_s": build_s,
        "solve_s": solve_s,
        "total_s": build_s + solve_s,
        "variables": outcome.variables,
        "nodes": outcome.nodes,
        "status": outcome.status,
        "objective_s": outcome.evaluation.seconds,
        "bound_s": outcome.bound_s,
        "gap": 0.0 if outcome.status == "optimal" else outcome.gap,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def target(name: str, value: float | None, limit: float) -> dict:
    """A target in the form that all benchmarks share."""
    met = None if value is None else value <= limit
    return {"name": name, "value": value, "limit": limit, "sense": "<=", "met": met, "modelled": False}


def targets(rows: list[dict]) -> list[dict]:
    """Every target, measured or not."""
    by_name = {r["case"]: r for r in rows}

    def total(case: str) -> float | None:
        return by_name[case]["total_s"] if case in by_name else None

    four, deep = total("gpt4_2x4"), total("gpt32_2x4")
    free = [r for r in rows if r["memory_limit_bytes"] is None]
    small = [r["gap"] for r in free if not r["case"].startswith(("gpt8", "gpt32", *LARGE))]
    large = [r for r in rows if r["case"].startswith(LARGE)]

    def slowest(axes: int) -> float | None:
        return max((r["total_s"] for r in large if len(r["mesh"]) == axes), default=None)

    return [
        target("1d_worst_s", slowest(1), 3.0),
        target("2d_worst_s", slowest(2), 10.0),
        target("3d_worst_s", slowest(3), 30.0),
        target("memory_gb", max((r["memory_gb"] for r in large), default=None), 4.0),
        target("gpt4_2x4_s", four, 5.0),
        target("mlp_2x2x2_s", total("mlp_2x2x2"), 2.0),
        target("depth_ratio", deep / four if four and deep else None, 3.0),
        target("gap_to_4_layers", max(small) if small else None, 0.0),
        target("gap_worst", max(r["gap"] for r in free) if free else None, 0.02),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer cases, each once")
    parser.add_argument("--baseline", action="store_true", help="also the program with all pairs: minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict] = []
    models: dict[str, Model] = {}
    for name, kind, mesh, limited in cases(options.quick):
        try:
            subject = models[kind] = models.get(kind) or MODELS[kind]()
        except ImportError as error:
            print(f"{name:18} not measured: {error}")
            continue
        unlimited = next((r for r in rows if r["case"] == name.removesuffix("_limited")), None)
        limit = int(LIMITED * unlimited["peak_bytes"]) if limited and unlimited else None
        once = options.quick or limited or kind not in ("mlp", "gpt2", "gpt4", "gpt8")
        found = row(name, subject, mesh, limit, 1 if once else 2)
        if options.baseline and kind in ("mlp", "gpt2") and not limited:
            found["full_s"], found["full_variables"], found["full_objective_s"] = full(subject, mesh)
        rows.append(found)
        print(
            f"{name:18} build {found['build_s']:6.2f} s  solve {found['solve_s']:7.2f} s  "
            f"{found['variables']:7} variables  {found['objective_s'] * 1e6:10.2f} us  "
            f"bound {found['bound_s'] * 1e6:10.2f} us  gap {found['gap']:.2e}  {found['status']}",
            flush=True,
        )
    result = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": 1,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cluster": CLUSTER,
            "batch": BATCH,
            "gap_that_counts_as_none": GAP,
        },
        "rows": rows,
        "targets": targets(rows),
    }
    for t in result["targets"]:
        value = "not measured" if t["value"] is None else f"{t['value']:.4g}"
        print(f"{t['name']:16} {value:>12} <= {t['limit']:<6g} met: {t['met']}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
