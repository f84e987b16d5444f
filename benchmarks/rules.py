"""What discovery makes of PyTorch's own operator database, and whether every rule holds on inputs that it has not seen.

python -m benchmarks.rules [--json FILE] [--quick] [--seed N]

Every sample of `op_db` (float32 and int64) is run forward and, where it has gradients, backward; the ATen calls below
autograd are what a captured graph would hold. Calls that write into an operand are left out, since captured graphs are
functional. A call is processed when a rule was found after the operator ran on at least three kinds of inputs, or
read exactly from the strides of a view. Each rule is then verified on fresh inputs at 2, 3 and 4 pieces, uneven ones
included; what has no input that the operator accepts cannot be wrong. --quick takes at most 2 calls per operator.

`recall_vs_dtensor` comes from the audit (`shardwise audit`, docs/audit.md), whose time is not part of `all_minutes`: of
the placements that DTensor's rules allow and execution confirms, the share that ours allow too. --quick audits the
operators of QUICK alone, which are always the same.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row, Target

TARGETS = (
    Target("processed", 0.95, ">="),
    Target("wrong_rules", 0),
    Target("parent_crashes", 0),
    Target("recall_vs_dtensor", 0.98, ">="),
    Target("all_minutes", 30),
)
MEMORY_BYTES = 9 << 30
VERIFY_SEEDS = (3, 4, 5)
QUICK = (
    "mm", "bmm", "addmm", "add.Tensor", "mul.Tensor", "where", "sum.dim_IntList", "amax", "var.correction", "argmax",
    "cumsum", "sort", "topk", "cat", "view", "transpose.int", "slice.Tensor", "split.Tensor", "expand", "gather",
    "index_select", "embedding", "_softmax", "native_layer_norm", "convolution", "nll_loss_forward",
)  # fmt: skip
"""Operators of every kind, for the quick audit."""


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, float | None]]:
    """All targets; `all_minutes` in a full run only."""
    start = time.perf_counter()
    arguments = {"per_operator": 2 if options.quick else None, "seed": options.seed}
    try:
        rows = harness.child("benchmarks.rules", arguments, OMP_NUM_THREADS="1")
    except SystemExit as died:
        return [{"name": "the process that discovers", "died": str(died)[-500:]}], {"parent_crashes": 1}
    minutes = (time.perf_counter() - start) / 60
    audited = harness.child("benchmarks.rules", {"audit": QUICK if options.quick else ()}, OMP_NUM_THREADS="1")
    found = next(row for row in rows if row["name"] == "found")
    recall = next(row for row in audited if row["name"] == "audit")
    values: dict[str, float | None] = {
        "processed": found["processed"] / found["calls"],
        "wrong_rules": found["wrong"],
        "parent_crashes": 0,
        "recall_vs_dtensor": recall["recall"],
        "all_minutes": None if options.quick else minutes,
    }
    return rows + audited, values


def audit(operators: list[str]) -> None:
    """Audits against DTensor, and reports every miss and every conflict."""
    from shardwise.api import audit_rules
    from shardwise.rules.audit import category

    start = time.perf_counter()
    report = audit_rules(operators)
    for audited in report.calls:
        for finding in audited.findings:
            if finding.verdict in ("miss", "conflict"):
                harness.report(
                    name=finding.verdict, operator=audited.call.op, placements=str(finding.combination),
                    reason=finding.reason or "no factor of ours",
                )  # fmt: skip
    categories = Counter(category(calls) for calls in report.operators().values())
    harness.report(
        name="audit", operators=len(report.operators()), calls=len(report.calls), recall=report.recall,
        recall_of_all=report.recall_of_all, **{k.replace(" ", "_"): n for k, n in sorted(categories.items())},
        seconds=round(time.perf_counter() - start, 1),
    )  # fmt: skip


def work(per_operator: int | None, seed: int) -> None:
    """Collects, discovers and verifies."""
    import torch

    from shardwise.pytorch.runner import TorchRunner
    from shardwise.rules.sandbox import discover_all

    torch.set_num_threads(1)
    start = time.perf_counter()
    calls, samples, failed = _collected()
    harness.report(name="samples", operators=samples[0], samples=samples[1], calls=len(calls), failed=failed)
    random.Random(seed).shuffle(calls)
    runner = TorchRunner()
    proxies, views, count = _stand_ins(calls, runner, per_operator)
    # An operator that asks for all memory fails by itself, and takes nothing else with it.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    keys = list(proxies)
    rules = dict(zip(keys, discover_all([proxies[k] for k in keys], runner)))
    known = sum(n for k, n in count.items() if k in views or rules[k].found_on == runner.framework)
    wrong, crashed = 0, 0
    subjects = [(k, proxies[k], rules[k]) for k in keys] + [(k, c, r) for k, (c, r) in views.items()]
    for key, errors in _verified(subjects, runner):
        crashed += errors is None
        real = [e for e in errors or () if not e.endswith("accepts no input")]
        if real:
            wrong += 1
            harness.report(name="wrong", call=key, error=real[0], rule=str(rules.get(key) or views[key][1]))
    reasons = Counter(r.found_on for r in rules.values() if r.found_on != runner.framework)
    for reason, number in reasons.most_common(8):
        harness.report(name="not processed", stand_ins=number, reason=reason)
    harness.report(
        name="found", calls=sum(count.values()), processed=known, stand_ins=len(proxies), views=len(views), wrong=wrong,
        replicable_only=sum(not r.factors for r in rules.values()), died_while_verified=crashed,
        seconds=round(time.perf_counter() - start, 1),
    )  # fmt: skip


def _collected() -> tuple[list[Any], tuple[int, int], int]:
    """(calls, (operators, samples), samples that fail by themselves)."""
    from shardwise.pytorch.samples import DTYPES, database, record

    calls: dict[str, Any] = {}
    entries, samples, failed = database(), 0, 0
    for entry in entries:
        for dtype in DTYPES:
            seen, broken = record(entry, dtype, calls)
            samples, failed = samples + seen, failed + broken
    return list(calls.values()), (len(entries), samples), failed


def _stand_ins(calls: list[Any], runner: Any, limit: int | None) -> tuple[dict, dict, Counter]:
    """(stand-ins by key, (call in double precision, rule) of views by key, how many calls each stands for)."""
    from shardwise.ir.runner import OperatorError, TensorMeta
    from shardwise.rules.proxy import dtype_class, format_call, proxy_of
    from shardwise.rules.views import view_rule

    proxies: dict[str, Any] = {}
    views: dict[str, tuple] = {}
    count: Counter = Counter()
    taken: Counter = Counter()
    for call in calls:
        if limit is not None and taken[call.op] >= limit:
            continue
        taken[call.op] += 1
        try:
            rule = view_rule(call, runner)
        except OperatorError:
            rule = None
        if rule is not None:
            double = tuple(TensorMeta(m.shape, dtype_class(m.dtype)) for m in call.operands)
            key = format_call(call)
            views[key] = call.with_operands(double), rule
        else:
            proxy = proxy_of(call, runner) or call
            key = format_call(proxy)
            proxies[key] = proxy
        count[key] += 1
    return proxies, views, count


def _verified(subjects: list[tuple], runner: Any) -> Iterator[tuple[str, list[str] | None]]:
    """(key, what does not hold) of every rule, checked in children that may die; None where one did."""
    from shardwise.rules.sandbox import messages

    start = 0
    while start < len(subjects):
        done = start
        for key, errors in messages(_checks(subjects[start:], runner), 60.0):  # type: ignore[misc]
            yield key, errors
            done += 1
        if done < len(subjects):
            yield subjects[done][0], None
        start = done + 1


def _checks(subjects: list[tuple], runner: Any) -> Callable[[Callable[[object], None]], None]:
    from shardwise.rules.verify import verify_rule

    def work(send: Callable[[object], None]) -> None:
        runner.prepare_child()
        for key, call, rule in subjects:
            errors: list[str] = []
            for seed in VERIFY_SEEDS:
                try:
                    errors += verify_rule(call, rule, runner, seed)
                except (TypeError, RuntimeError, ValueError) as error:
                    if rule.factors or rule.linear:
                        errors.append(f"{type(error).__name__}: {error}")
            send((key, errors))

    return work


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="order in which calls are taken")


if __name__ == "__main__":
    if (arguments := harness.is_child()) is not None:
        audit(arguments["audit"]) if "audit" in arguments else work(**arguments)
    else:
        harness.run(__doc__, TARGETS, measure, _options)
