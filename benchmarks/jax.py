"""How well the plan of a JAX step foretells what XLA makes of it, and how long planning takes.

python -m benchmarks.jax [--json FILE] [--quick]

Steps with AdamW in float32, donated, on eight virtual devices; the cluster is described (a100x8, or with links so fast
or so slow that other plans are best). Every model has a case whose plan is not pure data parallel: `split_parameters`
counts the parameters that it cuts. From the compiled module: `compiled.memory_analysis()` of one device, and the bytes
of its collectives, loops counted as often as they run. The baseline is XLA alone under jax.jit, with whole parameters
and the batch cut over all devices. Rules are warm: they ship with the package.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Row, Target, child, is_child, report, run

TARGETS = (
    Target("memory_error_worst", 0.10),
    Target("collective_bytes_worst", 1.10),
    Target("shardings_match", 1.0, ">="),
    Target("bytes_vs_xla_worst", 1.0),
    Target("plan_s", 10.0),
)
CASES: tuple[dict[str, Any], ...] = (
    {"case": "mlp_8", "model": "mlp", "mesh": [8], "options": {"rows": 64, "width": 512}},
    {"case": "mlp_2x4", "model": "mlp", "mesh": [2, 4], "options": {"rows": 64, "width": 512}},
    {"case": "conv_8", "model": "conv", "mesh": [8], "options": {"rows": 16, "width": 256}},
    {"case": "gpt_8", "model": "gpt", "mesh": [8], "options": {"rows": 8, "block": 64, "width": 256, "layers": 4}},
    {"case": "gpt_2x4", "model": "gpt", "mesh": [2, 4], "options": {"rows": 8, "block": 64, "width": 256, "layers": 4}},
    {"case": "moe_8", "model": "moe", "mesh": [8], "options": {"rows": 256, "width": 256, "hidden": 512}},
    {"case": "moe_2x4", "model": "moe", "mesh": [2, 4], "options": {"rows": 256, "width": 256, "hidden": 512}},
    {"case": "equinox_8", "model": "equinox", "mesh": [8], "options": {"rows": 64}},
)
QUICK = ("mlp_8", "gpt_8", "moe_8")
LINKS = 1000.0


def work(case: dict[str, Any]) -> None:
    """One case, in a process of its own with eight devices."""
    import jax
    from tests.jaxpr.models import MODELS, adamw

    import shardwise.jax
    from benchmarks.hlo import collective_bytes
    from shardwise.cluster import Cluster
    from shardwise.jaxpr.apply import compiled_bytes

    step, args = MODELS[case["model"]](adamw(), dtype="float32", **case["options"])
    step = jax.jit(step, donate_argnums=(0, 1)) if case["model"] != "equinox" else step
    cluster = Cluster.load("a100x8").scaled(case.get("links", LINKS))
    parallel = shardwise.jax.parallelize(step, *args, mesh=tuple(case["mesh"]), cluster=cluster)
    compiled = parallel.compile()
    used = compiled_bytes(compiled)
    plan = parallel.plan
    wire = sum(collective_bytes(compiled.as_text()).values())
    alone = sum(collective_bytes(xla_alone(step, args, parallel)).values())
    foretold = plan_bytes(parallel)
    found = jax.tree.leaves(compiled.output_shardings)
    ranks = [len(o.shape) for o in jax.eval_shape(parallel._jitted, *parallel.program.structs)]
    match = sum(a.is_equivalent_to(b, n) for a, b, n in zip(found, parallel.out_shardings, ranks)) / len(found)
    report(
        case=case["case"], mesh=case["mesh"], links=case.get("links", LINKS), memory_bytes=used,
        foretold_memory_bytes=plan.peak_bytes, memory_error=abs(plan.peak_bytes / used - 1.0), wire_bytes=wire,
        foretold_wire_bytes=foretold, wire_ratio=wire / foretold if foretold else float(wire > 0), match=match,
        xla_alone_bytes=alone, bytes_vs_xla=wire / alone if alone else float(wire > 0), share=plan.flops_share,
        split_parameters=sum(any(str(p) != "R" for p in x) for k, _, x in plan.inputs if k == "parameter"),
    )  # fmt: skip


def plan_bytes(parallel: Any) -> float:
    """Bytes on the wire of one device, by the plan's own moves."""
    from shardwise.cost.collectives import bytes_on_wire
    from shardwise.ir.graph import ITEM_BYTES
    from shardwise.ir.placement import R, max_local_elements

    graph, mesh, total = parallel.program.graph, parallel.plan.mesh, 0.0
    done = set()
    for t in parallel.plan.transfers:
        value = graph.values[t.value]
        for move in parallel.resharding(t.value).path(value.shape, ITEM_BYTES[value.dtype], t.source, t.target):
            if move.kind in ("slice", "zero") or (t.value, t.phase, move.source, move.target) in done:
                continue
            done.add((t.value, t.phase, move.source, move.target))
            whole = (*move.source[: move.axis], R, *move.source[move.axis + 1 :])
            nbytes = max_local_elements(value.shape, whole, mesh) * ITEM_BYTES[value.dtype]
            total += bytes_on_wire(move.kind, nbytes, mesh[move.axis]) * graph.times[t.value]
    return total


def xla_alone(step: Any, args: tuple[Any, ...], parallel: Any) -> str:
    """The module that XLA makes of the step itself, with whole parameters and the batch cut over all devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    program, mesh = parallel.program, parallel.mesh
    leaves, tree = jax.tree.flatten(args)
    names = tuple(mesh.axis_names)
    structs = []
    for struct, path in zip(program.structs, program.names):
        batch = path not in program.state and struct.shape and struct.shape[0] % mesh.size == 0
        spec = PartitionSpec(names) if batch else PartitionSpec()
        structs.append(jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, spec)))

    def flat(*arrays: Any) -> list[Any]:
        full = list(leaves)
        for k, a in zip(program.arrays, arrays):
            full[k] = a
        return [x for x in jax.tree.leaves(step(*jax.tree.unflatten(tree, full))) if isinstance(x, jax.Array)]

    donated = program.donated
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(flat, donate_argnums=donated, out_shardings=whole).lower(*structs).compile().as_text()


def plan_time() -> None:
    """A GPT with 12 layers on (2,2,2): capture, rules from the book, tables and solver; no plan is read from disk."""
    import jax
    from tests.jaxpr.models import adamw, gpt

    import shardwise.jax

    step, args = gpt(adamw(), rows=8, block=128, width=384, heads=6, layers=12, vocabulary=256, dtype="float32")
    shapes = jax.eval_shape(lambda a: a, args)
    mesh = (2, 2, 2)
    shardwise.jax.plan_model(step, *shapes, mesh=(8,), use_disk=True)  # what is known of rules is read once
    start = time.perf_counter()
    found = shardwise.jax.plan_model(step, *shapes, mesh=mesh, use_plans=False)
    seconds = time.perf_counter() - start
    report(case="gpt12_plan_2x2x2", mesh=mesh, plan_s=seconds, nodes=len(found.plan.nodes), gap=found.plan.gap,
           solve_s=found.plan_s, rules_s=found.rules_s, status=found.plan.status)  # fmt: skip


def measure(options: argparse.Namespace) -> tuple[list[Row], Mapping[str, float | None]]:
    """All cases and all targets."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    chosen = [c for c in CASES if not options.quick or c["case"] in QUICK]
    rows = [row for case in chosen for row in child("benchmarks.jax", case, **flags)]
    timed = child("benchmarks.jax", {"plan": True}, **flags)
    values = {
        "memory_error_worst": max(r["memory_error"] for r in rows),
        "collective_bytes_worst": max(r["wire_ratio"] for r in rows),
        "shardings_match": min(r["match"] for r in rows),
        "bytes_vs_xla_worst": max(r["bytes_vs_xla"] for r in rows),
        "plan_s": timed[0]["plan_s"],
    }
    return [*rows, *timed], values


if __name__ == "__main__":
    given = is_child()
    if given is None:
        run(__doc__, TARGETS, measure)
    elif "plan" in given:
        plan_time()
    else:
        work(given)
