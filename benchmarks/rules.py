"""What discovery makes of PyTorch's own operator database, and whether every rule holds on inputs that it has not seen.

python -m benchmarks.rules [--json FILE] [--quick] [--seed N]

Every sample of `op_db` (float32 and int64) is run forward and, where it has gradients, backward; the ATen calls below
autograd are what a captured graph would hold. Calls that write into an operand are left out, since captured graphs are
functional. A call is processed when a rule was found after the operator ran on at least three kinds of inputs, or
read exactly from the strides of a view. Each rule is then verified on fresh inputs at 2, 3 and 4 pieces, uneven ones
included; what has no input that the operator accepts cannot be wrong. --quick takes at most 2 calls per operator.

`recall_vs_dtensor` is not measured yet: the comparison with DTensor's own rules is still to come.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
import warnings
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


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, float | None]]:
    """All targets but recall."""
    start = time.perf_counter()
    arguments = {"per_operator": 2 if options.quick else None, "seed": options.seed}
    try:
        rows = harness.child("benchmarks.rules", arguments, OMP_NUM_THREADS="1")
    except SystemExit as died:
        return [{"name": "the process that discovers", "died": str(died)[-500:]}], {"parent_crashes": 1}
    found = next(row for row in rows if row["name"] == "found")
    values: dict[str, float | None] = {
        "processed": found["processed"] / found["calls"],
        "wrong_rules": found["wrong"],
        "parent_crashes": 0,
        "all_minutes": None if options.quick else (time.perf_counter() - start) / 60,
    }
    return rows, values


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
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    calls: dict[str, Any] = {}
    samples = failed = 0
    for op in op_db:
        for dtype in (torch.float32, torch.int64):
            if not op.supports_dtype(dtype, "cpu"):
                continue
            backward = op.supports_autograd and dtype.is_floating_point
            for sample in op.sample_inputs("cpu", dtype, requires_grad=backward):
                samples += 1
                try:
                    _run(op, sample, backward, calls)
                except Exception:  # samples of the database that this build cannot run
                    failed += 1
    return list(calls.values()), (len(op_db), samples), failed


def _run(op: Any, sample: Any, backward: bool, calls: dict[str, Any]) -> None:
    """One sample forward and backward, its ATen calls recorded."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardwise.rules.proxy import format_call

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            call = _call(func, args, kwargs or {})
            if call is not None:
                calls.setdefault(format_call(call), call)
            return func(*args, **(kwargs or {}))

    def needing_grad(tree: Any) -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]

    with Recorder():
        out = needing_grad(op(sample.input, *sample.args, **sample.kwargs))
        inputs = needing_grad((sample.input, sample.args, sample.kwargs))
        if backward and out and inputs:
            torch.autograd.grad(out, inputs, [torch.ones_like(o) for o in out], allow_unused=True)


def _call(func: Any, args: tuple, kwargs: dict) -> Any:
    """The call of an operator; None where it writes into an operand, is no operator of torch's registry, or has an
    argument that no graph can hold (sparse tensors, generators)."""
    import torch

    from shardwise.ir.graph import Ref
    from shardwise.ir.runner import Call, TensorMeta
    from shardwise.pytorch.compat import is_mutable
    from shardwise.pytorch.operators import dtype_name, find_op, op_name, to_arg

    metas: list[TensorMeta] = []

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                raise TypeError("a sparse tensor")
            metas.append(TensorMeta(tuple(value.shape), dtype_name(value.dtype)))
            return Ref(str(len(metas) - 1))
        return tuple(map(convert, value)) if isinstance(value, list | tuple) else to_arg(value)

    try:
        if is_mutable(func):
            return None
        find_op(op_name(func))
        given = tuple(map(convert, args)), tuple((k, convert(v)) for k, v in kwargs.items())
    except (TypeError, AttributeError, ValueError):
        return None
    return Call(op_name(func), tuple(metas), *given)


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
        work(**arguments)
    else:
        harness.run(__doc__, TARGETS, measure, _options)
