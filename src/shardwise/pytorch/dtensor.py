"""What the hand-written rules of `torch.distributed.tensor` allow, and what a DTensor makes of a call.

Its rules are read as they are registered: strategies over one mesh axis as lists; strategies over several as the list
that they give for operands of every placement; what has none of these by torch's tracing through the decomposition.
That is the order in which DTensor asks; the old propagation rules come last and none is left alone in torch 2.13. A
DTensor itself runs on two simulated devices in this process (`LocalTensorMode` over a process group that sends
nothing), with all that it moves and rewrites on the way.

Everything here changes the state of the process (a process group): run it in a child.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial as TorchPartial
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from ..ir.graph import Arg, Literal, Ref
from ..ir.placement import Partial, Placement, R, Shard
from ..ir.runner import Call
from ..rules.audit import Combination, Ran
from ..rules.enact import gathered, scattered
from .compat import (
    DecompShardingStrategy,
    DTensorSpec,
    FakeStore,
    LocalTensor,
    LocalTensorMode,
    MaskPartial,
    OpSchema,
    OpSpec,
    OpStrategy,
    ShardingPlaceholder,
    SpecMeta,
    TupleStrategy,
    sharding_propagator,
    simulated_parts,
)
from .operators import dtype_of, find_op, from_literal
from .runner import flatten_results

DEVICES = 2
MAX_ASKED = 200
"""Of an operator with a decomposition at most so many placements of its operands are traced."""
MASKED = "shifts and masks the indices"
REWRITTEN = "rewrites the sizes in the arguments"
TRACED = "traced through the decomposition"


def peer_name() -> str:
    """What rules are compared with."""
    return "DTensor of torch " + torch.__version__.split("+")[0]


class DTensorPeer:
    """DTensor as a peer to audit against (`rules.audit.Peer`)."""

    def __init__(self) -> None:
        self.name = peer_name()
        warnings.simplefilter("ignore")
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)
        self.mesh = DeviceMesh("cpu", list(range(DEVICES)))
        self.propagator: Any = sharding_propagator()

    def allows(self, call: Call) -> dict[Combination, str]:
        """The combinations that DTensor lists for a call, with the help that they need. Raises what torch raises."""
        op = find_op(call.op)
        found: dict[Combination, str] = {}
        help_ = REWRITTEN if op in self.propagator.op_to_shape_and_stride_idx else ""
        if op in self.propagator.op_single_dim_strategy_funcs:
            found |= _keyed(self._single_axis(call), call, help_)
        elif op in self.propagator.op_strategy_funcs:
            found |= _keyed(self._strategies(call, self.propagator.op_strategy_funcs[op]), call, help_)
        elif DecompShardingStrategy.has_decomp(op):
            found |= _keyed(self._decomposed(call), call, TRACED)
        return found

    def is_quick(self, call: Call) -> bool:
        """Whether a rule is registered: what is traced through a decomposition takes seconds a run."""
        op, known = find_op(call.op), self.propagator
        return any(op in t for t in (known.op_single_dim_strategy_funcs, known.op_strategy_funcs, known.op_to_rules))

    def _single_axis(self, call: Call) -> Iterator[tuple[list[Any], list[Any]]]:
        """(operands, results) of a list for one axis: results come first in it."""
        count = len(self._result_metas(call))
        func = self.propagator.op_single_dim_strategy_funcs[find_op(call.op)]
        args, kwargs = _arguments(call, lambda k: _meta(call, k))
        for row in func(find_op(call.op), args, kwargs):
            placed = [TorchShard(p.dim) if isinstance(p, ShardingPlaceholder) else p for p in row]
            yield placed[count:], placed[:count]

    def _strategies(self, call: Call, func: Callable[[Any], Any]) -> Iterator[tuple[list[Any], list[Any]]]:
        """(operands, results) of what a strategy function gives for operands of every placement."""

        def every(k: int) -> Any:
            return OpStrategy([OpSpec(self._spec(call, k, p)) for p in _choices(call, k)])

        args, kwargs = _arguments(call, every, tuples=lambda items: TupleStrategy(tuple(items)))
        yield from _listed(func(self._schema(call, args, kwargs)), len(self._result_metas(call)))

    def _decomposed(self, call: Call) -> Iterator[tuple[list[Any], list[Any]]]:
        """(operands, results) found by tracing; every cut is tried where one operand is cut."""
        sizes = [len(m.shape) + 1 for m in call.operands]
        ranked = [k for k, m in enumerate(call.operands) if m.shape]
        if not ranked or prod(sizes) > MAX_ASKED:
            return
        seed = {ranked[0]: TorchShard(0)}
        args, kwargs = _arguments(call, lambda k: self._spec(call, k, seed.get(k, TorchReplicate())))
        self.propagator.decomp_strategy.ensure_schema_info(find_op(call.op))
        found = self.propagator.decomp_strategy.propagate_strategy(self._schema(call, args, kwargs))
        if found is not None:
            yield from _listed(found, len(self._result_metas(call)))

    def _spec(self, call: Call, k: int, placement: TorchPlacement) -> Any:
        return DTensorSpec(self.mesh, (placement,), tensor_meta=_meta(call, k))

    def _schema(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        op = find_op(call.op)
        info = self.propagator.op_to_schema_info.get(op)
        info = info or self.propagator.op_to_schema_info_for_single_dim_strategy.get(op)
        return OpSchema(op, args, kwargs, schema_info=info)

    def _result_metas(self, call: Call) -> list[torch.Tensor | None]:
        args, kwargs = _arguments(call, lambda k: _empty(call, k))
        return flatten_results(find_op(call.op)(*args, **kwargs))

    def runs(self, call: Call, operands: list[np.ndarray], placements: tuple[Placement, ...]) -> Ran:
        """Runs a call on DTensors that lie so on two devices."""
        rng = np.random.default_rng(23)
        try:
            with LocalTensorMode(DEVICES), torch.no_grad():
                given = [
                    self._distributed(array, scattered(array, meta, placement, DEVICES, rng), placement)
                    for array, meta, placement in zip(operands, call.operands, placements)
                ]
                args, kwargs = _arguments(call, lambda k: given[k])
                found = [_whole(r) for r in flatten_results(find_op(call.op)(*args, **kwargs))]
        except Exception as error:  # whatever torch raises is an answer
            return Ran(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
        return Ran(tuple(whole for whole, _ in found), tuple(placement for _, placement in found))

    def _distributed(self, whole: np.ndarray, parts: list[np.ndarray], placement: Placement) -> DTensor:
        tensors = {k: torch.from_numpy(np.ascontiguousarray(p).reshape(p.shape).copy()) for k, p in enumerate(parts)}
        like = torch.from_numpy(np.ascontiguousarray(whole).reshape(whole.shape))
        local = LocalTensor(tensors)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return DTensor.from_local(
            local, self.mesh, [_to_torch(placement)], run_check=False, shape=like.shape, stride=like.stride()
        )


def _whole(result: Any) -> tuple[np.ndarray | None, Placement | None]:
    """(the whole that the label of a result promises, the label); shapes that do not fit are kept as they are."""
    if result is None:
        return None, None
    if not isinstance(result, DTensor):
        raise TypeError(f"a result is a {type(result).__name__}, no DTensor")
    label = result.placements[0]
    placement = _from_torch(label)
    local: Any = result.to_local()
    parts = [t.numpy() for t in simulated_parts(local)]
    if placement is None or isinstance(label, MaskPartial):
        return _plain(result.full_tensor()), Partial("sum") if placement is None else placement
    whole = gathered(parts, placement)
    return parts[0] if whole is None else whole, placement


def _plain(tensor: Any) -> np.ndarray:
    inner = simulated_parts(tensor)[0] if isinstance(tensor, LocalTensor) else tensor
    return inner.numpy()


def _to_torch(placement: Placement) -> TorchPlacement:
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    if isinstance(placement, Partial):
        return TorchPartial({"prod": "product"}.get(placement.op, placement.op))
    return TorchReplicate()


def _from_torch(placement: Any) -> Placement | None:
    """None for a kind that we have no word for."""
    if placement is None or isinstance(placement, TorchReplicate):
        return R
    if type(placement) is TorchShard:
        return Shard(placement.dim)
    if isinstance(placement, MaskPartial):
        return Partial("sum")
    if type(placement) is TorchPartial:
        op = str(placement.reduce_op)
        return Partial("prod" if op == "product" else op)
    return None


def _keyed(found: Iterator[tuple[list[Any], list[Any]]], call: Call, help_: str) -> dict[Combination, str]:
    """In our words; what has no words there is left out."""
    table: dict[Combination, str] = {}
    for operands, results in found:
        masked = any(isinstance(p, MaskPartial) for p in operands)
        left = tuple(R if isinstance(p, MaskPartial) else _from_torch(p) for p in operands)
        right = tuple(None if p is None else _from_torch(p) for p in results)
        if len(left) != len(call.operands) or None in left or any(a is None and b for a, b in zip(right, results)):
            continue
        table.setdefault(Combination(left, right), MASKED if masked else help_)  # pyright: ignore[reportArgumentType]
    return table


def _listed(strategy: Any, count: int) -> Iterator[tuple[list[Any], list[Any]]]:
    """(operands, results) of every entry of a strategy. One result spec stands for all results."""
    if not isinstance(strategy, OpStrategy):
        return
    for spec in strategy.strategies:
        if spec.input_specs is None:
            continue
        outputs = spec.output_specs
        outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs] * count
        yield [s.placements[0] for s in spec.input_specs], [None if o is None else o.placements[0] for o in outputs]


def _choices(call: Call, k: int) -> list[TorchPlacement]:
    """Placements to ask for: whole, every cut, and summands of numbers."""
    meta = call.operands[k]
    cuts = [TorchShard(d) for d, size in enumerate(meta.shape) if size > 1]
    partial = [TorchPartial()] if meta.dtype.startswith(("float", "complex", "bfloat")) else []
    return [TorchReplicate(), *cuts, *partial]


def _meta(call: Call, k: int) -> Any:
    tensor = _empty(call, k)
    return SpecMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _empty(call: Call, k: int) -> torch.Tensor:
    return torch.empty(call.operands[k].shape, dtype=dtype_of(call.operands[k].dtype), device="meta")


def _arguments(
    call: Call, operand: Callable[[int], Any], tuples: Callable[[list[Any]], Any] = list
) -> tuple[tuple, dict[str, Any]]:
    """The arguments as torch takes them, with `operand(k)` for operand k; `tuples` makes lists of operands."""

    def convert(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return operand(int(arg.name))
        if isinstance(arg, Literal):
            return from_literal(arg, torch.device("cpu"))
        if isinstance(arg, tuple):
            items = [convert(item) for item in arg]
            return tuples(items) if arg and all(isinstance(a, Ref) for a in arg) else items
        return arg

    return tuple(convert(a) for a in call.args), {k: convert(a) for k, a in call.kwargs}
