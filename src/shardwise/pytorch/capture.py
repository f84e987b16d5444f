"""Captures forward and backward of a module as one graph, under fake tensors.

AOTAutograd traces a fake copy of the module (the user's own is never touched), so a model on the meta device that is
larger than memory works. The copy's tensors lie on the target device, so that a meta and a real module give the same
graph. `torch.compiler.is_compiling()` is true while tracing: models skip the shortcuts that read values.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import CaptureError, InputError
from ..ir.graph import Graph
from ..ir.text import format_graph
from . import host_random
from .compat import FakeTensorMode, ValueLess, aot_export_joint_with_descriptors
from .flat import TENSOR, Flat
from .from_fx import graph_from_fx
from .keys import overlaps
from .random import random_decompositions
from .state import refuse_alone


@dataclass
class Program:
    """A captured program: the graph and how it meets the module's arguments, state and outputs."""

    graph: Graph
    in_spec: pytree.TreeSpec
    tensor_leaves: tuple[int, ...]
    """Positions of the tensors among the flattened (args, kwargs)."""
    out_spec: pytree.TreeSpec
    out_leaves: tuple[Any, ...]
    """The flattened outputs: `TENSOR` for those that the graph computes, values for the others."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    """Value name -> tensor, for inputs of kind "constant"."""
    training: bool = True
    """Whether gradients are computed."""


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """While active, `torch.compiler.is_compiling()` is true."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def flatten_inputs(args: tuple, kwargs: dict) -> tuple[list[Any], pytree.TreeSpec, tuple[int, ...]]:
    """(leaves, structure, positions of the tensors) of a call's arguments."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return leaves, spec, tuple(k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A fake tensor of the same shape, strides, dtype and requires_grad on `device`."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module that may be parallelized already."""
    runtime = module.__dict__.get("_shardwise")
    return type(module) if runtime is None else runtime.original


def fake_module(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy of the module whose parameters and buffers are fake; ties between them are kept."""
    memo: dict[int, Any] = {}
    if (runtime := module.__dict__.get("_shardwise")) is not None:
        memo[id(runtime)] = None
    for tensor in [*module.parameters(), *module.buffers()]:
        memo[id(tensor)] = fake_like(tensor, mode, device)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied for tracing: {type(error).__name__}: {error}. "
            "Give the class a __deepcopy__, or drop what cannot be copied before calling parallelize."
        ) from error


def capture(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    *,
    training: bool | None = None,
    device: torch.device | str = "cpu",
) -> Program:
    """Captures one call of `module` on tensors like those in `args` and `kwargs` (real, fake or meta).

    `training` says whether gradients are wanted; by default when grad mode is on and a parameter or input asks for
    them. Raises InputError where the module rejects the example, CaptureError where it cannot be traced, or where it
    draws from generators that are not torch's and depends on it.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(module).__name__}; wrap the function in a module")
    _warn_of_hooks(module)
    before = host_random.state()
    program = _captured(module, args, kwargs or {}, training, torch.device(device))
    if host_random.state() != before:
        for _ in range(host_random.TRIES):
            again = _captured(module, args, kwargs or {}, training, torch.device(device))
            if not _same(program, again):
                raise CaptureError(f"{type(module).__name__} cannot be captured: {host_random.REFUSED}")
    return program


def _warn_of_hooks(module: nn.Module) -> None:
    """Hooks inside the model are traced: what they compute is part of the program, anything else they do is not."""
    for name, sub in module.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            for hook in getattr(sub, kind).values() if sub is not module else ():
                if inspect.isfunction(hook) and hook is not refuse_alone and not hook.__module__.startswith("torch."):
                    warnings.warn(
                        f"{name} has the hook {hook.__qualname__}: it runs when the model is captured, not in every "
                        "step. What it changes is part of the program; what it records is not: use hooks of the whole "
                        "model, or return what is to be recorded",
                        stacklevel=3,
                    )
                    return


def _same(one: Program, two: Program) -> bool:
    """Whether two captures compute the same."""
    pairs = [(one.constants[name], two.constants.get(name)) for name in one.constants]
    equal = all(b is not None and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
    return equal and format_graph(one.graph) == format_graph(two.graph)


def _captured(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], training: bool | None, device: torch.device
) -> Program:
    leaves, spec, positions = flatten_inputs(args, kwargs)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inner = fake_module(module, mode, device)
    inner.__class__ = original_class(module)
    tensors = [fake_like(leaves[k], mode, device) for k in positions]
    flat = Flat(inner, leaves, positions, spec)
    flat.training = module.training
    if training is None:
        wants = any(p.requires_grad for p in module.parameters()) or any(t.requires_grad for t in tensors)
        training = torch.is_grad_enabled() and wants
    with mode:
        seed = torch.empty((), dtype=torch.int64, device=device)
    graph_module = _trace(module, flat, (seed, *tensors), mode, training)
    assert flat.out_spec is not None
    try:
        graph, constants = graph_from_fx(graph_module, type(module).__name__)
    except (TypeError, NotImplementedError) as error:
        raise CaptureError(f"{type(module).__name__} cannot be captured: {error}") from error
    _check_aliases(module, graph, [leaves[k] for k in positions])
    return Program(graph, spec, positions, flat.out_spec, flat.out_leaves, constants, training)


def _check_aliases(module: nn.Module, graph: Graph, tensors: list[torch.Tensor]) -> None:
    """Raises CaptureError where forward writes into an argument that shares memory with another."""
    written = {o.path for o in graph.outputs_of("mutation")}
    for pair in overlaps(tensors):
        if any(f"input {k}" in written for k in pair):
            raise CaptureError(
                f"{type(module).__name__} cannot be captured: forward writes into an argument that shares memory with "
                f"another (tensors {pair[0]} and {pair[1]} of the arguments, in order). Give one of them as a clone"
            )


def _trace(
    module: nn.Module, flat: Flat, tensors: tuple[torch.Tensor, ...], mode: FakeTensorMode, training: bool
) -> torch.fx.GraphModule:
    if not training:
        for tensor in [*flat.parameters(), *flat.buffers(), *tensors]:
            tensor.requires_grad_(False)
    grad = contextlib.nullcontext() if training else torch.no_grad()
    try:
        with contextlib.ExitStack() as stack, mode, _compiling(), grad:
            joint = aot_export_joint_with_descriptors(
                stack, flat, tensors, decompositions=random_decompositions(flat.random)
            )
            return joint.graph_module
    except CaptureError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {_first_line(error)}{_user_line(error)}"
        if rejection := _rejection(module, flat, tensors, mode):
            raise InputError(
                f"{type(module).__name__} rejects the example: {rejection.rstrip('.')}. Give the arguments that the "
                "module takes"
            ) from error
        advice = f". {_VALUES}" if isinstance(error, ValueLess) else ""
        raise CaptureError(f"{type(module).__name__} cannot be captured: {what}{advice}") from error


_VALUES = (
    "What is computed there depends on the value of a tensor (.item(), float(), bool(), torch.equal, a loop over it), "
    "which a program for all batches cannot know. Compute with tensors instead (torch.where, masks of a fixed size), "
    "or do it outside of forward"
)


def _rejection(module: nn.Module, flat: Flat, tensors: tuple[torch.Tensor, ...], mode: FakeTensorMode) -> str | None:
    """What the model says against the example where it is called without a tracer; None where it takes it.

    Fake tensors have no values: a model that asks for one fails for that reason, not for the example.
    """
    try:
        with mode, torch.no_grad():
            flat(*tensors)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AssertionError) as error:
        if isinstance(error, ValueLess) or "fake" in type(error).__module__:
            return None
        return f"{type(error).__name__}: {_first_line(error)}{_user_line(error)}"
    except Exception:
        return None
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else ""


_NOT_USERS = (f"{os.path.dirname(torch.__file__)}{os.sep}", f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}")
"""Folders of torch and of this package."""


def _user_line(error: BaseException) -> str:
    """The last line of the traceback that is neither torch's nor ours."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(("<", *_NOT_USERS)):
            place = f" (at {name}:{trace.tb_lineno} in {trace.tb_frame.f_code.co_name})"
        trace = trace.tb_next
    return place


__all__ = ["TENSOR", "Program", "capture"]
