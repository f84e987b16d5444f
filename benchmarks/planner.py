"""How long planning takes and how near to the best the plans are.

python -m benchmarks.planner [--json FILE] [--quick]

Models: GPT of the demo's width with 2, 4, 8 and 32 layers, batch 8, on meshes (8) and (2,4); one MLP block on (2,2,2);
GPT with 4 layers under a memory limit of 60 % of the peak of its unlimited plan. The cluster is described, not
measured: the preset a100x8. Rules are warm. A row's time is that of building the tables and solving them: the least of
`repeats`, since other programs on the machine only add to it.

The baseline, in the same run with --baseline: the program with every pair of layouts from the start (`full_s`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shardwise.cluster import Cluster
from shardwise.ir.graph import Graph
from shardwise.ir.passes import recompute
from shardwise.models import GPT
from shardwise.models.gpt import demo_config
from shardwise.plan import reshard
from shardwise.plan.fold import fold
from shardwise.plan.formulate import Formulation
from shardwise.plan.network import FORBIDDEN, build_network
from shardwise.plan.planner import GAP, Outcome, optimise
from shardwise.plan.problem import Settings, build_problem
from shardwise.pytorch.capture import capture
from shardwise.pytorch.flops import count_flops
from shardwise.pytorch.runner import TorchRunner
from shardwise.rules.book import RuleBook
from shardwise.rules.rule import Rule

CLUSTER = "a100x8"
BATCH = 8
LIMITED = 0.6
"""Of the peak of the unlimited plan."""


@dataclass(frozen=True)
class Model:
    """A captured model with its rules."""

    graph: Graph
    rules: tuple[Rule, ...]
    flops: dict[str, float]


def model(layers: int) -> Model:
    """GPT with so many layers; one MLP block for 0."""
    if layers:
        config = replace(demo_config(), n_layer=layers)
        tokens = torch.zeros(BATCH, config.block_size, dtype=torch.long)
        program = capture(GPT(config), (tokens, tokens))
    else:
        block = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        program = capture(block, (torch.randn(64, 128, 1024),))
    graph = recompute(program.graph)
    return Model(graph, RuleBook(TorchRunner()).of_graph(graph), count_flops(graph))


def plan(subject: Model, mesh: tuple[int, ...], limit: int | None = None) -> tuple[float, float, Outcome]:
    """Seconds to build the tables and to solve, and the result. Nothing is remembered from earlier calls."""
    for table in (reshard._table, reshard._steps, reshard._path):
        table.cache_clear()
    start = time.perf_counter()
    settings = Settings(mesh, memory_limit_bytes=limit)
    problem = build_problem(subject.graph, subject.rules, Cluster.load(CLUSTER), settings, subject.flops)
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


def cases(quick: bool) -> Iterator[tuple[str, int, tuple[int, ...], bool]]:
    """(name, layers, mesh, whether memory is limited)"""
    yield "mlp_2x2x2", 0, (2, 2, 2), False
    for layers in (2, 4, 32) if quick else (2, 4, 8, 32):
        yield f"gpt{layers}_8", layers, (8,), False
        yield f"gpt{layers}_2x4", layers, (2, 4), False
    if not quick:
        yield "gpt4_8_limited", 4, (8,), True
        yield "gpt4_2x4_limited", 4, (2, 4), True


def row(name: str, subject: Model, mesh: tuple[int, ...], limit: int | None, repeats: int) -> tuple[dict, Outcome]:
    """One case, solved `repeats` times; the fastest counts."""
    runs = [plan(subject, mesh, limit) for _ in range(repeats)]
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
    }, outcome


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
    small = [r["gap"] for r in free if not r["case"].startswith(("gpt8", "gpt32"))]
    return [
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
    models: dict[int, Model] = {}
    for name, layers, mesh, limited in cases(options.quick):
        subject = models.setdefault(layers, model(layers)) if layers not in models else models[layers]
        unlimited = next((r for r in rows if r["case"] == name.removesuffix("_limited")), None)
        limit = int(LIMITED * unlimited["peak_bytes"]) if limited and unlimited else None
        found, _ = row(name, subject, mesh, limit, 1 if options.quick or limited or layers > 8 else 2)
        if options.baseline and layers in (0, 2) and not limited:
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
