"""Parameters and buffers as DTensors."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..ir.placement import Layout, local_cuts
from ..ir.placement import Shard as IrShard


def placements(layout: Layout) -> tuple[Placement, ...]:
    """DTensor's placements of a stored layout (whole dims cut in chunks, or whole tensors)."""
    return tuple(Shard(p.dim) if isinstance(p, IrShard) else Replicate() for p in layout)


def local_piece(tensor: torch.Tensor, layout: Layout, mesh: tuple[int, ...], coords: tuple[int, ...]) -> torch.Tensor:
    """This device's piece of a whole tensor, as a view."""
    for dim, cuts in local_cuts(tuple(tensor.shape), layout, mesh, coords).items():
        for cut in cuts:
            tensor = tensor.narrow(dim, cut.start, cut.stop - cut.start)
    return tensor


def as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A DTensor from a whole tensor that every rank has; nothing is communicated."""
    shape = tuple(mesh.shape)
    coords = mesh.get_coordinate()
    assert coords is not None
    piece = local_piece(tensor.detach(), layout, shape, tuple(coords)).contiguous().clone()
    return DTensor.from_local(
        piece, mesh, placements(layout), run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; its gradient comes back in the same placement. Plain tensors pass."""
    if isinstance(tensor, DTensor):
        return tensor.to_local(grad_placements=tensor.placements)
    return tensor


def store(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Writes a new local value into a parameter or buffer."""
    target = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    target.copy_(value)


def place_state(module: nn.Module, mesh: DeviceMesh | None, layouts: dict[str, Layout]) -> None:
    """Replaces every parameter and buffer by a DTensor in its layout (Replicate where none is given)."""
    if mesh is None:
        return
    whole: Layout = ()
    from ..ir.placement import R

    whole = (R,) * mesh.ndim
    made: dict[int, torch.Tensor] = {}
    first = {id(p): name for name, p in [*module.named_parameters(), *module.named_buffers()]}
    for sub in module.modules():
        for table in (sub._parameters, sub._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    layout = layouts.get(first.get(id(tensor), ""), whole)
                    placed: torch.Tensor = as_dtensor(tensor, mesh, layout)
                    if isinstance(tensor, nn.Parameter):
                        placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = placed
                table[name] = cast(nn.Parameter, made[id(tensor)])
