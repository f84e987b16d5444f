"""A compiled program of this rank, and its place in autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ..errors import UnsupportedError
from ..ir.graph import Graph, Output
from ..plan.plan import Plan
from ..spmd.split import Phases, split
from .capture import TENSOR, Program
from .compat import dtensor_of, local_of, spec_of
from .execute import Compiled, compile_graph
from .outputs import GlobalOutput
from .world import lost_ranks


@dataclass
class LocalProgram:
    """What this rank runs for one captured program."""

    program: Program
    plan: Plan
    phases: Phases
    forward: Compiled
    backward: Compiled | None
    gathers: dict[str, Compiled] = field(default_factory=dict)
    """Path of an output that lies in pieces -> the program that makes it whole."""

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self.program.graph

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path of an output -> its global shape."""
        values = self.graph.values
        return {o.path: values[o.name].shape for o in self.graph.outputs_of("output") if o.name is not None}

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

    def stand_in(self, output: Output, piece: torch.Tensor | None) -> torch.Tensor | None:
        """An output that lies in pieces, as a tensor of the global shape that is gathered when first used."""
        gather = self.gathers.get(output.path) if output.kind == "output" else None
        if gather is None or piece is None or output.name is None:
            return piece

        def whole(piece: torch.Tensor) -> torch.Tensor:
            found = gather.call([piece])[0]
            assert found is not None
            return found

        return GlobalOutput.of(piece, self.shapes[output.path], whole)


class _Step(torch.autograd.Function):
    """Forward and backward of a program as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, program: LocalProgram, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        forward = program.phases.forward
        # DTensors are opened here and closed in backward by hand: to_local() would cost 60 us a parameter and step.
        tensors = [local_of(t) for t in given]
        ctx.specs = [spec_of(t) for t in given]
        results = program.forward.call(list(tensors))
        count = len(forward.outputs_of("output", "mutation"))
        outputs = results[:count]
        own = {id(t) for t in tensors}
        outputs = [t.clone() if t is not None and (id(t) in own or t._is_view()) else t for t in outputs]
        outputs = [program.stand_in(o, t) for o, t in zip(forward.outputs, outputs)]
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
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph=True alone
            raise UnsupportedError(
                "a planned program has no second derivative: create_graph=True is not possible through a parallelized "
                "module. Compute what needs it (a gradient penalty) with the plain module"
            )
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
        with lost_ranks("backward ran"):
            found = program.backward.call(inputs)
        by_path = {o.path: t for o, t in zip(graph.outputs, found)}
        result = []
        for item, spec in zip(forward.inputs, ctx.specs):
            key = f"input {item.path}" if item.kind == "input" else item.path
            gradient = by_path.get(key) if item.kind in ("parameter", "input") else None
            result.append(gradient if gradient is None or spec is None else dtensor_of(gradient.contiguous(), spec))
        return (None, *result)


def make_local(
    program: Program,
    plan: Plan,
    local_graph: Graph,
    groups: tuple[dist.ProcessGroup | None, ...],
    device: torch.device,
    gathers: dict[str, Graph],
) -> LocalProgram:
    """Splits and compiles a lowered graph. `gathers` makes outputs that lie in pieces whole, by their paths."""
    phases = split(local_graph)
    forward = compile_graph(phases.forward, groups, device)
    backward = None if phases.backward is None else compile_graph(phases.backward, groups, device)
    made = {path: compile_graph(graph, groups, device) for path, graph in gathers.items()}
    return LocalProgram(program, plan, phases, forward, backward, made)
