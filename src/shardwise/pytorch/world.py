"""Ranks, devices and meshes: what `parallelize` finds when it is called."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import InputError, MismatchError


def target_device(module: nn.Module) -> torch.device:
    """Where the module runs: where its parameters are; for a meta module the accelerator, if there is one."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device.type != "meta":
            return tensor.device
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def ensure_group(device: torch.device) -> int:
    """The world size; starts the process group where torchrun has set one up and nobody has yet."""
    if not dist.is_available():
        return 1
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 1
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_world_size()


def make_mesh(shape: tuple[int, ...], device: torch.device) -> DeviceMesh | None:
    """A mesh over the whole world; None without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return init_device_mesh(device.type, shape)


def mesh_shapes(mesh: Any, world: int) -> tuple[tuple[int, ...], ...] | None:
    """The shape that the user asks for; None where the planner may choose. Raises InputError where it cannot be."""
    if mesh is None:
        return None
    if isinstance(mesh, DeviceMesh):
        return (tuple(mesh.shape),)
    try:
        shape = (int(mesh),) if isinstance(mesh, int) else tuple(int(n) for n in mesh)
    except (TypeError, ValueError) as error:
        raise InputError(f"mesh: expected a DeviceMesh, a shape such as (2, 2) or None, got {mesh!r}") from error
    size = 1
    for n in shape:
        size *= n
    if size != world or not shape or min(shape) < 1:
        raise InputError(f"mesh {shape} has {size} devices but {world} ranks are running; the product must be {world}")
    return (shape,)


def broadcast_text(text: str | None) -> str:
    """Rank 0's text on every rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        assert text is not None
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_objects(item: Any) -> list[Any]:
    """Everybody's item, by rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [item]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, item)
    return found


def check_equal(what: str, mark: str) -> None:
    """Raises MismatchError on every rank where the ranks' marks differ."""
    marks = gather_objects(mark)
    if len(set(marks)) > 1:
        odd = [k for k, m in enumerate(marks) if m != marks[0]]
        raise MismatchError(
            f"{what} differs between ranks: rank {', '.join(map(str, odd))} from rank 0. Build the same model from the "
            "same seed on every rank and give the same example"
        )
