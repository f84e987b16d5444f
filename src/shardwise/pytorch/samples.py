"""Sample calls of operators, from PyTorch's own operator database: what runs below autograd, forward and backward.

A call that writes into an operand is left out, since captured graphs are functional; so is one with an argument that no
graph can hold (sparse tensors, generators).
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import InputError, UnsupportedError
from ..ir.graph import Ref
from ..ir.runner import Call, TensorMeta
from ..rules.proxy import format_call, proxy_of
from .compat import TorchDispatchMode, is_mutable, operator_database, operator_names
from .operators import dtype_name, find_op, op_name, to_arg
from .runner import TorchRunner

DTYPES = (torch.float32, torch.int64)
EVEN_SIZES = (6, 12, 18, 24, 30, 36, 42, 48, 54, 60, 66, 72, 78, 84, 90, 96)
"""Sizes of sample calls: 2 and 3 pieces of each are equal."""
SAMPLES = 40
"""Of one entry of the database at most so many samples are run for an audit."""
PER_OPERATOR = 3

Progress = Callable[[int, int], None]


def database() -> list[Any]:
    """The entries of PyTorch's operator database. Raises UnsupportedError where it cannot be imported."""
    try:
        return operator_database()
    except ImportError as error:
        raise UnsupportedError(
            f"PyTorch's operator database cannot be imported ({error}); it needs pip install expecttest"
        ) from error


def record(entry: Any, dtype: torch.dtype, calls: dict[str, Call], limit: int | None = None) -> tuple[int, int]:
    """Runs the samples of an entry of the database and adds their calls, by printed form. Returns (samples, failed)."""
    if not entry.supports_dtype(dtype, "cpu"):
        return 0, 0
    backward = entry.supports_autograd and dtype.is_floating_point
    samples = failed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in islice(entry.sample_inputs("cpu", dtype, requires_grad=backward), limit):
            samples += 1
            try:
                _run(entry, sample, backward, calls)
            except Exception:  # samples of the database that this build cannot run
                failed += 1
    return samples, failed


def _run(entry: Any, sample: Any, backward: bool, calls: dict[str, Call]) -> None:
    """One sample forward and backward, its ATen calls recorded."""

    def needing_grad(tree: Any) -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]

    with _Recorder(calls):
        out = needing_grad(entry(sample.input, *sample.args, **sample.kwargs))
        inputs = needing_grad((sample.input, sample.args, sample.kwargs))
        if backward and out and inputs:
            torch.autograd.grad(out, inputs, [torch.ones_like(o) for o in out], allow_unused=True)


class _Recorder(TorchDispatchMode):
    """Notes every operator that runs."""

    def __init__(self, calls: dict[str, Call]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        call = _call(func, args, kwargs or {})
        if call is not None:
            self.calls.setdefault(format_call(call), call)
        return func(*args, **(kwargs or {}))


def _call(func: Any, args: tuple, kwargs: dict) -> Call | None:
    """The call of an operator; None for what is left out."""
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


def matching(wanted: str, known: Iterable[str]) -> list[str]:
    """The operators that a name means: `mm`, `sum.dim_IntList`, `aten.mm` or `aten.mm.default`."""
    parts = wanted.split(".")
    return sorted(op for op in known if any(op.split(".")[k:n] == parts for k, n in ((0, 3), (0, 2), (1, 3), (1, 2))))


def registered() -> list[str]:
    """All operators of torch, as `namespace.name.overload`."""
    found = []
    for name in operator_names():
        space, rest = name.split("::")
        found.append(f"{space}.{rest if '.' in rest else rest + '.default'}")
    return found


def check_names(wanted: Sequence[str]) -> None:
    """Raises InputError for a name that no operator has."""
    known = registered()
    for name in wanted:
        if not matching(name, known):
            bases = sorted({op.split(".")[1] for op in known if op.startswith("aten.")})
            close = difflib.get_close_matches(name.removeprefix("aten.").split(".")[0], bases, 3)
            raise InputError(
                f"audit: {name!r} is no operator of torch; close: {', '.join(close) or 'none'}. Give names such as mm, "
                "aten.mm or aten.mm.default"
            )


def sample_calls(
    wanted: Sequence[str],
    runner: TorchRunner,
    progress: Progress = lambda done, total: None,
    per_operator: int = PER_OPERATOR,
    entries: Sequence[Any] | None = None,
) -> list[Call]:
    """Calls to audit, at most `per_operator` of a kind for each operator: those with most dims, in small even sizes.

    `wanted` empty: all operators of the database. Raises InputError for an unknown operator, or one without samples.
    """
    check_names(wanted)
    entries = list(database() if entries is None else entries)
    if wanted:
        bases = [name.removeprefix("aten.").split(".")[0] for name in wanted]
        entries.sort(key=lambda e: -max(_alike(b, e) for b in bases))
    calls: dict[str, Call] = {}
    for k, entry in enumerate(entries):
        before = len(calls)
        for dtype in DTYPES:
            record(entry, dtype, calls, SAMPLES)
        progress(k + 1, len(entries))
        if wanted and len(calls) == before:
            continue
        if wanted and max(_alike(b, entry) for b in bases) < 1 and all(_has(name, calls) for name in wanted):
            break
    missing = [name for name in wanted if not _has(name, calls)]
    if missing:
        raise InputError(
            f"audit: no samples of {', '.join(missing)} in PyTorch's operator database: it writes into its operands, "
            "or nothing there reaches it. Try another overload, or audit without names to see which operators are known"
        )
    return _chosen(wanted, list(calls.values()), runner, per_operator)


def _alike(base: str, entry: Any) -> float:
    """How much an entry's name resembles an operator's; 1 where one holds the other."""
    names = [n for n in (entry.name.split(".")[-1], entry.aten_name or "") if n]
    if any(n == base or (min(len(n), len(base)) > 2 and (n in base or base in n)) for n in names):
        return 1.0
    return max(difflib.SequenceMatcher(None, base, n).ratio() for n in names)


def _has(name: str, calls: dict[str, Call]) -> bool:
    return bool(matching(name, {c.op for c in calls.values()}))


def _chosen(wanted: Sequence[str], calls: list[Call], runner: TorchRunner, per_operator: int) -> list[Call]:
    """The calls with the most dims of every operator, in even sizes, each kind once."""
    ops = {c.op for c in calls}
    kept = {op for name in wanted for op in matching(name, ops)} if wanted else ops
    by_op: dict[str, list[Call]] = {}
    for call in calls:
        if call.op in kept and call.operands:
            by_op.setdefault(call.op, []).append(call)
    found: list[Call] = []
    for op in sorted(by_op):
        ranked = sorted(by_op[op], key=lambda c: (-_dims(c), format_call(c)))
        kinds: dict[str, Call] = {}
        for call in ranked:
            if len(kinds) >= per_operator:
                break
            small = proxy_of(call, runner, EVEN_SIZES)
            if small is not None:
                kinds.setdefault(format_call(small), small)
        found += kinds.values()
    return found


def _dims(call: Call) -> int:
    return sum(size > 1 for meta in call.operands for size in meta.shape)
