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
from ..ir.graph import Graph, Input, Output
from ..plan.plan import Plan
from ..spmd.split import Phases, split
from .agreement import BACKWARD, GATHER, Council
from .capture import TENSOR, Program
from .compat import dtensor_of, local_of, spec_of
from .execute import Compiled, compile_graph
from .operators import dtype_of
from .outputs import GlobalOutput
from .state import local_piece
from .world import lost_ranks


@dataclass
class LocalProgram:
    """What this rank runs for one captured program."""

    program: Program
    plan: Plan
    phases: Phases
    forward: Compiled
    backward: Compiled | None
    coords: tuple[int, ...]
    groups: tuple[dist.ProcessGroup | None, ...]
    device: torch.device
    without: Callable[[frozenset[str]], Graph]
    """The lowered graph without the tangents of the outputs at these paths."""
    gathers: dict[str, Compiled]
    """Path of an output that lies in pieces -> the program that makes it whole."""
    pruned: dict[frozenset[str], tuple[Graph, Compiled]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self.program.graph

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path of an output -> its global shape."""
        values = self.graph.values
        return {o.path: values[o.name].shape for o in self.graph.outputs_of("output") if o.name is not None}

    def run(
        self, state: Callable[[str], torch.Tensor], leaves: list[torch.Tensor], seed: torch.Tensor, council: Council
    ) -> Any:
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
        found = _Step.apply(self, council, *tensors)
        results = {o.path: t for o, t in zip(outputs, found) if o.kind == "output"}
        changes = {o.path: t for o, t in zip(outputs, found) if o.kind == "mutation"}
        computed = iter(range(len(self.program.out_leaves)))
        out = [results[str(next(computed))] if x is TENSOR else x for x in self.program.out_leaves]
        return pytree.tree_unflatten(out, self.program.out_spec), changes

    def stand_in(self, output: Output, piece: torch.Tensor | None, council: Council) -> torch.Tensor | None:
        """An output that lies in pieces, as a tensor of the global shape that is gathered when first used."""
        call = council.calls
        gather = self.gathers.get(output.path) if output.kind == "output" else None
        if gather is None or piece is None or output.name is None:
            return piece

        def whole(piece: torch.Tensor) -> torch.Tensor:
            council.agree_on(GATHER, call, output.path)
            with lost_ranks("an output in pieces was gathered"):
                found = gather.call([piece])[0]
            assert found is not None
            return found

        return GlobalOutput.of(piece, self.shapes[output.path], whole)

    def local_input(self, item: Input, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of an input that it was given whole."""
        if item.kind != "input" or tuple(tensor.shape) == item.value.shape:
            return tensor
        layout = next(x for kind, path, x in self.plan.inputs if (kind, path) == ("input", item.path))
        return local_piece(tensor, layout, self.plan.mesh, self.coords).contiguous()

    def backward_for(self, absent: frozenset[str]) -> tuple[Graph, Compiled]:
        """The backward where the outputs at the paths `absent` receive no gradient."""
        assert self.phases.backward is not None and self.backward is not None
        if not absent:
            return self.phases.backward, self.backward
        if absent not in self.pruned:
            graph = split(self.without(absent)).backward
            assert graph is not None
            self.pruned[absent] = graph, compile_graph(graph, self.groups, self.device)
        return self.pruned[absent]


class _Step(torch.autograd.Function):
    """Forward and backward of a program as one node of autograd."""

    @staticmethod
    def forward(
        ctx: Any, program: LocalProgram, council: Council, *given: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        forward = program.phases.forward
        ctx.council, ctx.call = council, council.calls
        # DTensors are opened here and closed in backward by hand: to_local() would cost 60 us a parameter and step.
        tensors = [program.local_input(i, local_of(t)) for i, t in zip(forward.inputs, given)]
        ctx.specs = [spec_of(t) for t in given]
        results = program.forward.call(list(tensors))
        count = len(forward.outputs_of("output", "mutation"))
        outputs = results[:count]
        own = {id(t) for t in tensors}
        outputs = [t.clone() if t is not None and (id(t) in own or t._is_view()) else t for t in outputs]
        outputs = [program.stand_in(o, t, council) for o, t in zip(forward.outputs, outputs)]
        ctx.program = program
        ctx.set_materialize_grads(False)
        if program.backward is not None:
            names = [i.value.name for i in forward.inputs]
            table = dict(zip(names, tensors))
            mutated = {o.path for o in forward.outputs_of("mutation")}
            paths = {i.value.name: i.path for i in forward.inputs}
            given_by = dict(zip(names, given))
            ctx.read = [
                (paths[n], given_by[n], given_by[n]._version)
                for n in program.phases.saved_inputs
                if spec_of(given_by[n]) is not None and paths[n] not in mutated
            ]
            kept = [table[n].clone() if paths[n] in mutated else table[n] for n in program.phases.saved_inputs]
            ctx.save_for_backward(*results[count:], *kept)
        differentiable = {t.path for t in program.graph.inputs_of("tangent")}
        plain = [
            t
            for t, o in zip(outputs, forward.outputs)
            if t is not None and (o.kind == "mutation" or o.path not in differentiable)
        ]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # with create_graph=True alone
            raise UnsupportedError(
                "a planned program has no second derivative: create_graph=True is not possible through a parallelized "
                "module. Compute what needs it (a gradient penalty) with the plain module"
            )
        program: LocalProgram = ctx.program
        phases, forward = program.phases, program.phases.forward
        table = dict(zip((*phases.saved, *phases.saved_inputs), ctx.saved_tensors))
        if hasattr(ctx, "maybe_clear_saved_tensors"):
            ctx.maybe_clear_saved_tensors()
        outputs = forward.outputs_of("output", "mutation")
        given = {o.path: g for o, g in zip(outputs, gradients) if o.kind == "output"}
        tangents = program.graph.inputs_of("tangent")
        absent = frozenset(t.path for t in tangents if given[t.path] is None)
        # What autograd checks of the tensors that it saves, but not of DTensors, whose pieces were saved.
        if changed := [path for path, tensor, version in ctx.read if tensor._version != version]:
            ctx.council.fail()
            raise RuntimeError(
                f"{changed[0]} was changed in place between forward and backward, which needs its old value. Call "
                "backward before the step of an optimizer, and forward again after it"
            )
        ctx.council.agree_on(BACKWARD, ctx.call, " ".join(sorted(absent)))
        graph, compiled = program.backward_for(absent)
        inputs = []
        for item in graph.inputs:
            if item.kind == "tangent":
                gradient = given[item.path]
                assert gradient is not None
                inputs.append(gradient.contiguous())
            elif item.kind == "zero":
                dtype = dtype_of(item.value.dtype)
                inputs.append(torch.zeros((), dtype=dtype, device=program.device).expand(item.value.shape))
            else:
                inputs.append(table[item.value.name])
        del table
        with lost_ranks("backward ran"):
            found = compiled.call(inputs)
        by_path = {o.path: t for o, t in zip(graph.outputs, found)}
        result = []
        for item, spec in zip(forward.inputs, ctx.specs):
            key = f"input {item.path}" if item.kind == "input" else item.path
            gradient = by_path.get(key) if item.kind in ("parameter", "input") else None
            result.append(gradient if gradient is None or spec is None else dtensor_of(gradient.contiguous(), spec))
        return (None, None, *result)


def make_local(
    program: Program,
    plan: Plan,
    lowered: Callable[[frozenset[str]], Graph],
    coords: tuple[int, ...],
    groups: tuple[dist.ProcessGroup | None, ...],
    device: torch.device,
    gathers: dict[str, Graph],
) -> LocalProgram:
    """Splits and compiles a lowered graph.

    `lowered` makes it without the tangents of the outputs at some paths; `gathers` makes outputs that lie in pieces
    whole, by their paths.
    """
    phases = split(lowered(frozenset()))
    forward = compile_graph(phases.forward, groups, device)
    backward = None if phases.backward is None else compile_graph(phases.backward, groups, device)
    made = {path: compile_graph(graph, groups, device) for path, graph in gathers.items()}
    return LocalProgram(program, plan, phases, forward, backward, coords, groups, device, lowered, made)
