"""One GPU: capture there, rules verified again there, the planned program against eager, predicted against measured
memory.

python -m benchmarks.gpu [--json FILE] [--quick]

Under four minutes; without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from benchmarks.harness import Row, Target, run
from shardwise.api import parallelize
from shardwise.ir.passes import recompute
from shardwise.ir.runner import call_of
from shardwise.models.training import Recipe, demo_batches, demo_model
from shardwise.pipeline import find_rules
from shardwise.pytorch.capture import capture
from shardwise.pytorch.peak import peak_increase_bytes, state_bytes
from shardwise.pytorch.runner import TorchRunner
from shardwise.rules.proxy import format_call, proxy_of
from shardwise.rules.verify import verify_rule

BUDGET_S = 120.0
"""For the verification of rules; what does not fit is counted."""
TARGETS = (
    Target("gpu_equality_error", 1e-9),
    Target("gpu_rules_wrong", 0.0),
    Target("gpu_peak_error", 0.15),
)


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, float | None]]:
    """All targets, or none where there is no GPU."""
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} finds no CUDA device" + ("" if torch.version.cuda else ": it is a CPU build")
        return [{"name": "skipped", "reason": why}], {}
    device = torch.device("cuda")
    values: dict[str, float | None] = {}
    rows: list[Row] = []
    recipe = Recipe()
    # float64 for equality: only then an error of the program is told from the rounding of the device.
    module = demo_model(recipe).to(device, torch.float64)
    example = tuple(t.to(device) for t in next(demo_batches(recipe, 1)))
    start = time.perf_counter()
    program = capture(module, example, None)
    rows.append({"name": "capture", "seconds": time.perf_counter() - start, "nodes": len(program.graph.nodes)})
    found, wrong = _verify(program, 30.0 if options.quick else BUDGET_S)
    rows += found
    values["gpu_rules_wrong"] = float(wrong)
    reference = _gradients(module, example)
    planned = parallelize(module, example)
    gradients = _gradients(planned, example)
    norm = sum(float(g.square().sum()) for g in reference.values()) ** 0.5
    errors = [float((gradients[name] - g).abs().max()) / norm for name, g in reference.items()]
    values["gpu_equality_error"] = max(errors)
    rows.append({"name": "equality", "largest_error": max(errors), "plan_s": planned._shardwise.origin.plan_s})
    predicted, measured = _peak(recipe, device)
    rows.append({"name": "memory", "predicted_bytes": predicted, "measured_bytes": measured})
    values["gpu_peak_error"] = abs(predicted - measured) / measured
    return rows, values


def _verify(program: Any, budget_s: float) -> tuple[list[Row], int]:
    """Rules found on the CPU, executed again on the GPU."""
    ruled = find_rules(recompute(program.graph))
    runner = TorchRunner("cuda")
    seen, wrong, rows, checked, start = set(), 0, [], 0, time.perf_counter()
    for node, rule in zip(ruled.graph.nodes, ruled.rules, strict=True):
        proxy = proxy_of(call_of(node, ruled.graph.values)[0], runner)
        if proxy is None or rule.found_on == "view" or format_call(proxy) in seen:
            continue
        seen.add(format_call(proxy))
        if time.perf_counter() - start > budget_s:
            continue
        checked += 1
        errors = verify_rule(proxy, rule, runner, prober=TorchRunner())
        if errors:
            wrong += 1
            rows.append({"name": "wrong rule", "operator": node.op, "errors": errors})
    rows.append({"name": "rules", "checked": checked, "of": len(seen), "wrong": wrong})
    return rows, wrong


def _gradients(module: Any, example: tuple) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module(*example).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _peak(recipe: Recipe, device: torch.device) -> tuple[int, int]:
    """Predicted and measured, in float32 and with AdamW."""
    module = demo_model(recipe).to(device)
    example = tuple(t.to(device) for t in next(demo_batches(recipe, 1)))
    module = parallelize(module, example)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def turn() -> None:
        module(*example).backward()
        optimizer.step()
        optimizer.zero_grad()

    turn()
    turn()
    held = state_bytes(module, optimizer, example)
    return module.plan.peak_bytes, held + peak_increase_bytes(turn, "cuda")


if __name__ == "__main__":
    run(__doc__, TARGETS, measure)
