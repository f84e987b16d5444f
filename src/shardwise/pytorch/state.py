"""Parameters and buffers as DTensors: placing them, loading into them, and putting them together again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..errors import MismatchError, UnsupportedError
from ..ir.placement import Layout, R, local_cuts
from ..ir.placement import Shard as IrShard
from .agreement import checksum
from .compat import COMPOSABLE_STATE
from .world import gather_objects


def placements(layout: Layout) -> tuple[Placement, ...]:
    """DTensor's placements of a stored layout (whole dims cut in chunks, or whole tensors)."""
    return tuple(Shard(p.dim) if isinstance(p, IrShard) else Replicate() for p in layout)


def stored_layout(tensor: DTensor) -> Layout:
    """The inverse of `placements`."""
    return tuple(IrShard(p.dim) if isinstance(p, Shard) else R for p in tensor.placements)


def local_piece(tensor: torch.Tensor, layout: Layout, mesh: tuple[int, ...], coords: tuple[int, ...]) -> torch.Tensor:
    """This device's piece of a whole tensor, as a view."""
    for dim, cuts in local_cuts(tuple(tensor.shape), layout, mesh, coords).items():
        for cut in cuts:
            tensor = tensor.narrow(dim, cut.start, cut.stop - cut.start)
    return tensor


def as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A DTensor from a whole tensor that every rank has; nothing is communicated."""
    coords = mesh.get_coordinate()
    assert coords is not None
    # A copy, so that the whole is freed.
    piece = local_piece(tensor.detach(), layout, tuple(mesh.shape), tuple(coords)).clone(
        memory_format=torch.contiguous_format
    )
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(piece, mesh, placements(layout), run_check=False, shape=tensor.shape, stride=stride)


def tensors_of(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """(path, table, name in it, tensor) of every parameter and buffer under every name that it has."""
    for prefix, sub in module.named_modules(remove_duplicate=False):
        for table in (sub._parameters, sub._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, cast("dict[str, Any]", table), name, tensor


def copied(tensor: DTensor) -> DTensor:
    """A copy with its gradient. torch's own deepcopy takes a gradient that lies inside a buffer for a plain tensor."""
    made: Any = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    if tensor.grad is not None:
        made.grad = tensor.grad.detach().clone()
    return made


def place_state(module: nn.Module, mesh: DeviceMesh | None, layouts: dict[str, Layout]) -> list[torch.Tensor]:
    """Replaces every parameter and buffer by a DTensor in its layout (Replicate where none is given).

    Returns the parameters that were there before. Gradients that have gathered so far are placed likewise.
    """
    if mesh is None:
        return []
    whole: Layout = (R,) * mesh.ndim
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for path, table, name, tensor in list(tensors_of(module)):
        if isinstance(tensor, DTensor):
            continue  # a submodule under two names: placed under the first
        if id(tensor) not in made:
            layout = layouts.get(path, whole)
            placed: torch.Tensor = as_dtensor(tensor, mesh, layout)
            if isinstance(tensor, nn.Parameter):
                placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
                if tensor.grad is not None:
                    placed.grad = as_dtensor(tensor.grad, mesh, layout)
            made[id(tensor)] = (tensor, placed)
        table[name] = made[id(tensor)][1]
    return [old for old, _ in made.values() if isinstance(old, nn.Parameter)]


def check_state(module: nn.Module) -> None:
    """Raises MismatchError on every rank where the ranks' parameters or buffers have other values."""
    names = [(n, t) for n, t in [*module.named_parameters(), *module.named_buffers()] if not t.is_meta]
    marks = [(name, tuple(t.shape), checksum([t])) for name, t in names]
    told = gather_objects(marks)
    for k, other in enumerate(told):
        odd = {name for name, *_ in told[0]} ^ {name for name, *_ in other}
        if odd:
            which = ", ".join(sorted(odd)[:4])
            raise MismatchError(f"only one of rank 0 and rank {k} has {which}: build the same model on every rank")
        for ours, theirs in zip(told[0], other):
            if ours != theirs:
                raise MismatchError(
                    f"{theirs[0]} differs between rank 0 and rank {k}: build the same model from the same seed on "
                    "every rank (torch.manual_seed before it), or load the same state dict on all"
                )


def load_pre_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *_: Any
) -> None:
    """Before a submodule loads: whole tensors, and DTensors of another mesh or placement, become the pieces it holds.

    Tensors of a wrong shape stay as they are: torch reports them.
    """
    for table in (module._parameters, module._buffers):
        for name, own in table.items():
            given = state_dict.get(prefix + name)
            if not isinstance(own, DTensor) or not isinstance(given, torch.Tensor) or given.shape != own.shape:
                continue
            if isinstance(given, DTensor):
                if given.device_mesh == own.device_mesh and given.placements == own.placements:
                    if not local_metadata.get("assign_to_params_buffers"):
                        continue
                given = given.full_tensor()
            piece = as_dtensor(given.to(own.to_local().device), own.device_mesh, stored_layout(own))
            if local_metadata.get("assign_to_params_buffers") and given.dtype == own.dtype:
                # Written in place, and then assigned to itself: tied parameters stay one, and optimizers keep theirs.
                with torch.no_grad():
                    own.copy_(piece)
                state_dict[prefix + name] = own
            else:
                state_dict[prefix + name] = piece


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The global value, without history. A collective for sharded DTensors: every rank must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state_dict(module: nn.Module, *, device: torch.device | str | None = "cpu") -> OrderedDict[str, torch.Tensor]:
    """`module.state_dict()` with plain whole tensors, as one process has it, on every rank.

    Every rank must call it; one of them may then save. It loads into the plain model and into a parallelized one.
    Ties are kept: two names of one parameter share storage.
    """
    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    made: dict[int, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                made[id(value)] = whole_tensor(value).to(device) if device is not None else whole_tensor(value)
            value = made[id(value)]
        found[name] = value
    return found


def plain_copy(module: nn.Module, original: type[nn.Module]) -> nn.Module:
    """A module of the user's own class with whole tensors, as one process has it. Every rank must call it."""
    memo: dict[int, Any] = {id(module.__dict__["_shardwise"]): None}
    for _, _, _, tensor in tensors_of(module):
        if id(tensor) not in memo:
            whole = whole_tensor(tensor).clone()
            memo[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
    found = object.__new__(original)
    memo[id(module)] = found
    found.__dict__.update({k: copy.deepcopy(v, memo) for k, v in module.__dict__.items() if k != "_shardwise"})
    remove_hooks(found)
    return found


def refuse_alone(module: nn.Module, args: Any) -> None:
    """The forward pre-hook of every submodule of a parallelized module."""
    if not torch.compiler.is_compiling():  # not while the whole is captured
        raise UnsupportedError(
            f"{type(module).__name__} is a part of a parallelized module and cannot be called alone: its parameters "
            "are spread over the ranks. Call the whole module, or parallelize this part instead"
        )


class _NotComposable(dict):
    """In the place where torch's composable parallelism looks first: the one place where it can be refused."""

    def __contains__(self, key: object) -> bool:
        name = getattr(key, "__name__", "another parallelism")
        raise UnsupportedError(
            f"{name} cannot be applied to a parallelized module or a part of it: its parameters are spread over the "
            "ranks already, as its plan says. Use it as it is; memory_limit= makes the plan spread more"
        )


def add_hooks(module: nn.Module) -> None:
    """Every submodule takes whole tensors when it loads, refuses to be called alone and to be spread again."""
    for sub in module.modules():
        sub.__dict__.setdefault(COMPOSABLE_STATE, _NotComposable())
        sub.register_load_state_dict_pre_hook(load_pre_hook)
        if sub is not module:
            sub.register_forward_pre_hook(refuse_alone)


def remove_hooks(module: nn.Module) -> None:
    """The inverse of `add_hooks`."""
    for sub in module.modules():
        if isinstance(sub.__dict__.get(COMPOSABLE_STATE), _NotComposable):
            del sub.__dict__[COMPOSABLE_STATE]
        for table in (sub._forward_pre_hooks, sub._load_state_dict_pre_hooks):
            for key, hook in list(table.items()):
                if getattr(hook, "hook", hook) in (refuse_alone, load_pre_hook):
                    del table[key]
