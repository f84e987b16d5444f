"""A compiled program of this rank, and its place in autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..ir.graph import Graph
from ..plan.plan import Plan
from ..spmd.split import Phases, split
from .capture import TENSOR, Program
from .execute import Compiled, compile_graph


@dataclass
class LocalProgram:
    """What this rank runs for one captured program."""

    program: Program
    plan: Plan
    phases: Phases
    forward: Compiled
    backward: Compiled | None

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self.program.graph

    def run(self, state: Callable[[str], torch.Tensor], leaves: list[torch.Tensor], seed: torch.Tensor) -> Any:
        """One call. `state` gives a parameter or buffer, plain or DTensor, by its path; `leaves` are the local input
        tensors in order. Returns (outputs in the user's structure, new values of buffers by path)."""
        tensors: list[torch.Tensor] = []
        for item in self.phases.forward.inputs:
            if item.kind in ("parameter", "buffer"):
                tensors.append(state(item.path))
            elif item.kind == "constant":
                tensors.append(self.program.constants[item.value.name])
            elif item.kind == "seed":
                tensors.append(seed)
            else:
                tensors.append(leaves[int(item.path)])
        outputs = self.phases.forward.outputs_of("output", "mutation")
        found = _Step.apply(self, *tensors)
        results = {o.path: t for o, t in zip(outputs, found) if o.kind == "output"}
        changes = {o.path: t for o, t in zip(outputs, found) if o.kind == "mutation"}
        computed = iter(range(len(self.program.out_leaves)))
        out = [results[str(next(computed))] if x is TENSOR else x for x in self.program.out_leaves]
        return pytree.tree_unflatten(out, self.program.out_spec), changes


class _Step(torch.autograd.Function):
    """Forward and backward of a program as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, program: LocalProgram, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        forward = program.phases.forward
        ctx.stored = [
            (t.device_mesh, t.placements, t.shape, t.stride()) if isinstance(t, DTensor) else None for t in tensors
        ]
        tensors = tuple(t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        results = program.forward.call(list(tensors))
        count = len(forward.outputs_of("output", "mutation"))
        outputs = results[:count]
        given = {id(t) for t in tensors}
        outputs = [t.clone() if t is not None and (id(t) in given or t._is_view()) else t for t in outputs]
        ctx.program = program
        ctx.set_materialize_grads(False)
        if program.backward is not None:
            names = [i.value.name for i in forward.inputs]
            table = dict(zip(names, tensors))
            mutated = {o.path for o in forward.outputs_of("mutation")}
            paths = {i.value.name: i.path for i in forward.inputs}
            kept = [table[n].clone() if paths[n] in mutated else table[n] for n in program.phases.saved_inputs]
            ctx.save_for_backward(*results[count:], *kept)
        plain = [
            t
            for t, o in zip(outputs, forward.outputs)
            if t is not None and (o.kind == "mutation" or not (t.is_floating_point() or t.is_complex()))
        ]
        ctx.mark_non_differentiable(*plain)
        ctx.like = [None if t is None else (t.shape, t.dtype, t.device) for t in outputs]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        program: LocalProgram = ctx.program
        forward, graph = program.phases.forward, program.phases.backward
        assert graph is not None and program.backward is not None
        inputs = list(ctx.saved_tensors)
        if hasattr(ctx, "maybe_clear_saved_tensors"):
            ctx.maybe_clear_saved_tensors()
        outputs = [o for o in forward.outputs if o.kind in ("output", "mutation")]
        place = {o.path: k for k, o in enumerate(outputs) if o.kind == "output"}
        for tangent in graph.inputs_of("tangent"):
            k = place[tangent.path]
            gradient = gradients[k]
            if gradient is None:
                shape, dtype, device = ctx.like[k]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            inputs.append(gradient.contiguous())
        found = program.backward.call(inputs)
        by_path = {o.path: t for o, t in zip(graph.outputs, found)}
        result = []
        for item, stored in zip(forward.inputs, ctx.stored):
            key = f"input {item.path}" if item.kind == "input" else item.path
            gradient = by_path.get(key) if item.kind in ("parameter", "input") else None
            result.append(_like(gradient, stored))
        return (None, *result)


def _like(gradient: torch.Tensor | None, stored: Any) -> torch.Tensor | None:
    """A local gradient as what its parameter is: `stored` says how a DTensor lies, None that it is plain."""
    if gradient is None or stored is None:
        return gradient
    mesh, placements, shape, stride = stored
    return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)


def make_local(
    program: Program, plan: Plan, local_graph: Graph, groups: tuple[dist.ProcessGroup | None, ...], device: torch.device
) -> LocalProgram:
    """Splits and compiles a lowered graph."""
    phases = split(local_graph)
    forward = compile_graph(phases.forward, groups, device)
    backward = None if phases.backward is None else compile_graph(phases.backward, groups, device)
    return LocalProgram(program, plan, phases, forward, backward)
