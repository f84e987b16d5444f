"""`OpRunner` for torch: runs single ATen (and custom) operators for the discovery of rules."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..ir.graph import Arg, Graph, Literal, Path, Ref
from ..ir.runner import Call, OperatorError, TensorMeta, ViewOf
from .compat import arguments_of, is_mutable, size_arguments, storage_key
from .operators import dtype_name, dtype_of, find_op, from_literal
from .random.detect import is_random


class TorchRunner:
    """Runs operators on one device; shapes come from the meta device or fake tensors."""

    def __init__(self, device: str = "cpu"):
        self.device = torch.device(device)
        self.framework = "torch-" + torch.__version__.split("+")[0]
        self._runs = 0

    def prepare_child(self) -> None:
        """A forked child must not use the parent's thread pool: it would wait for threads that are not there."""
        torch.set_num_threads(1)
        torch.manual_seed(0)

    def meta(self, call: Call) -> tuple[TensorMeta | None, ...]:
        results = self._meta_results(call)[1]
        return tuple(None if t is None else TensorMeta(tuple(t.shape), dtype_name(t.dtype)) for t in results)

    def _meta_results(self, call: Call) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        tensors = [torch.empty(m.shape, dtype=dtype_of(m.dtype), device="meta") for m in call.operands]
        return tensors, self._call(call, tensors, torch.device("meta"))

    def run(self, call: Call, operands: list[np.ndarray]) -> list[np.ndarray | None]:
        self._runs += 1
        tensors = [torch.from_numpy(_guarded(a, self._runs % 2)).to(self.device) for a in operands]
        with _filled_memory(), _one_thread():
            results = self._call(call, tensors, self.device)
        arrays = [None if t is None else t.detach().resolve_conj().resolve_neg().cpu().numpy().copy() for t in results]
        _poison([*tensors, *results])
        return arrays

    def _call(self, call: Call, tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor | None]:
        try:
            op = find_op(call.op)
        except (AttributeError, ValueError) as error:
            raise OperatorError(f"{call.op} is not registered") from error

        def convert(arg: Arg) -> Any:
            if isinstance(arg, Ref):
                return tensors[int(arg.name)]
            if isinstance(arg, Literal):
                return from_literal(arg, device)
            if isinstance(arg, tuple):
                return [convert(item) for item in arg]
            return arg

        try:
            with torch.no_grad():
                out = op(*(convert(a) for a in call.args), **{k: convert(a) for k, a in call.kwargs})
        except Exception as error:
            raise OperatorError(f"{call.op}: {type(error).__name__}: {error}") from error
        return flatten_results(out)

    def size_leaves(self, call: Call) -> tuple[Path, ...]:
        return size_paths(call)

    def views(self, call: Call) -> tuple[ViewOf, ...] | None:
        if is_mutable(find_op(call.op)):
            return None
        tensors, results = self._meta_results(call)
        found = []
        for result in results:
            owners = [k for k, t in enumerate(tensors) if result is not None and _shares(t, result)]
            if result is None or not owners or not _reads_as_it_is(tensors[owners[0]], result):
                return None
            found.append(ViewOf(owners[0], tuple(result.shape), tuple(result.stride()), int(result.storage_offset())))
        return tuple(found)

    def may_draw(self, call: Call) -> bool:
        op = find_op(call.op)
        return op.namespace not in ("aten", "prims") or is_random(op)

    def decompose(self, call: Call) -> Graph | None:
        from .decompose import decompose

        return decompose(call)


GUARD = 256
"""Elements before and after every operand that do not belong to it, at least."""


def _guarded(array: np.ndarray, content: int) -> np.ndarray:
    """A copy amid memory that holds something else from run to run: an operator that does not check its indices and
    reads there does not repeat itself."""
    guard = max(GUARD, array.size)
    memory = np.full(guard + array.size + guard, content, array.dtype)
    inner = memory[guard : guard + array.size].reshape(array.shape)
    inner[...] = array
    return inner


@contextlib.contextmanager
def _filled_memory() -> Iterator[None]:
    """While active, memory that an operator leaves unwritten on purpose (an empty tensor) has a fixed content."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Where several indices are the same the last one to be written may count: with several threads that is any."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _poison(tensors: Sequence[torch.Tensor | None]) -> None:
    """Overwrites memory before it is given back. An operator that accepts operands of sizes that do not fit may leave
    its result unwritten or read past an operand: it would find the right numbers of the run before."""
    for tensor in tensors:
        if tensor is not None and tensor.layout == torch.strided:
            torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(0xFF)


def _reads_as_it_is(operand: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view neither reinterprets nor conjugates nor negates the elements."""
    return operand.dtype == view.dtype and not view.is_conj() and not view.is_neg()


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return storage_key(a) == storage_key(b)


def flatten_results(out: Any) -> list[torch.Tensor | None]:
    """The results of an operator as a flat list; a list result (split) is spread out."""
    if isinstance(out, torch.Tensor):
        return [out]
    if out is None:
        return [None]
    if isinstance(out, list | tuple):
        return [t if isinstance(t, torch.Tensor) else None for t in out]
    return [None]


def size_paths(call: Call) -> tuple[Path, ...]:
    """Paths of the integers whose type in the schema is SymInt: sizes, strides, counts of rows."""
    op = find_op(call.op)
    sizes = _size_arguments(op)
    by_name = dict(call.kwargs)
    found: list[Path] = []
    for k, argument in enumerate(arguments_of(op)):
        if argument.name not in sizes:
            continue
        key: int | str = argument.name
        if k < len(call.args):
            key, value = k, call.args[k]
        elif argument.name in by_name:
            value = by_name[argument.name]
        else:
            continue
        if isinstance(value, tuple):
            found += [(key, i) for i, item in enumerate(value) if _is_int(item)]
        elif _is_int(value):
            found.append((key,))
    return tuple(found)


_size_arguments = lru_cache(maxsize=4096)(size_arguments)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
