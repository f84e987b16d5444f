"""Ranks, devices and meshes: what `parallelize` finds when it is called, and how the ranks agree on one thing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import InputError, LostRankError, MismatchError, ShardwiseError

T = TypeVar("T")
BEAT_S = 2.0
"""Between two words of a rank for which the others wait: far below any timeout of a process group."""


def has_group() -> bool:
    """Whether a process group is there."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if has_group() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if has_group() else 0


def target_device(module: Any) -> torch.device:
    """Where the module runs: where its parameters are; for a meta module the accelerator, if there is one.

    Raises nothing: what does not fit is refused by `check_device`, together with the other ranks.
    """
    if not isinstance(module, nn.Module):
        return torch.device("cpu")
    if found := _devices(module):
        return next(iter(found))
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def _devices(module: nn.Module) -> dict[torch.device, str]:
    """The devices of the module's tensors, with the name of one on each."""
    found: dict[torch.device, str] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type != "meta":
            found.setdefault(tensor.device, name)
    return found


def check_device(module: nn.Module) -> None:
    """Raises InputError where the module's tensors lie on several devices."""
    found = _devices(module)
    if len(found) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise InputError(f"the module lies on several devices ({places}); move it to this rank's device first")


def ensure_group(device: torch.device) -> int:
    """The world size; starts the process group where torchrun has set one up and nobody has yet."""
    if not dist.is_available():
        return 1
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return 1
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        # Both, so that what ranks tell each other on CPUs never waits for the GPU's stream.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return dist.get_world_size()


def control_group() -> dist.ProcessGroup | None:
    """A group that carries CPU tensors, for what the ranks tell each other. A collective call."""
    if not has_group() or dist.get_world_size() == 1:
        return None
    if "gloo" in str(dist.get_backend_config()):
        return dist.group.WORLD
    made = dist.new_group(backend="gloo")
    assert isinstance(made, dist.ProcessGroup)
    return made


def make_mesh(shape: tuple[int, ...], device: torch.device) -> DeviceMesh | None:
    """A mesh over the whole world; None without a process group."""
    return init_device_mesh(device.type, shape) if has_group() else None


def mesh_shapes(mesh: Any, world: int, device: torch.device | None = None) -> tuple[tuple[int, ...], ...] | None:
    """The shape that the user asks for; None where the planner may choose. Raises InputError where it cannot be.

    `device` is the one that the module runs on; without one, `world` counts the devices of a described cluster.
    """
    if mesh is None:
        return None
    if isinstance(mesh, DeviceMesh):
        shape = tuple(mesh.shape)
        if device is not None and mesh.device_type != device.type:
            raise InputError(f"mesh is of {mesh.device_type} devices but the module runs on {device}; make one of both")
    else:
        try:
            sizes = list(mesh) if isinstance(mesh, tuple | list) else [mesh]
            if any(isinstance(n, bool) for n in sizes):
                raise TypeError("a bool is no size")
            shape = tuple(operator.index(n) for n in sizes)  # neither "8" nor 8.0
        except TypeError as error:
            raise InputError(f"mesh: expected a DeviceMesh, a shape such as (2, 2) or None, got {mesh!r}") from error
    size = prod(shape)
    if size != world or not shape or min(shape) < 1:
        there = f"the cluster has {world} devices" if device is None else f"{world} ranks are running"
        raise InputError(f"mesh {shape} has {size} devices but {there}; the product must be {world}")
    return (shape,)


def broadcast_object(item: Any) -> Any:
    """Rank 0's item on every rank."""
    if world_size() == 1:
        return item
    box = [item]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_rank_0(work: Callable[[], T]) -> T:
    """What `work` gives on rank 0, on every rank. The others wait for as long as it takes: while it works, rank 0 says
    so every few seconds, since a silent wait would end at the process group's timeout. `work` calls no collective."""
    if world_size() == 1:
        return work()
    if "gloo" not in str(dist.get_backend_config()):  # no word from a thread beside the GPU's stream
        return broadcast_object(work() if rank() == 0 else None)
    with lost_ranks("rank 0 worked for all"):
        if rank() != 0:
            while _say(torch.empty((), dtype=torch.int64)):
                pass
            return broadcast_object(None)
        done = threading.Event()
        voice = threading.Thread(target=_keep_saying, args=(done,), daemon=True)
        voice.start()
        try:
            found = work()
        finally:
            done.set()
            voice.join()
        _say(torch.tensor(0))
        return broadcast_object(found)


def _say(word: torch.Tensor) -> int:
    """Rank 0's word on every rank: 1 while it works."""
    dist.broadcast(word, src=0)
    return int(word)


def _keep_saying(done: threading.Event) -> None:
    while not done.wait(BEAT_S):
        try:
            _say(torch.tensor(1))
        except RuntimeError:  # a rank is gone: whoever works finds out at the end
            return


def gather_objects(item: Any) -> list[Any]:
    """Everybody's item, by rank."""
    if world_size() == 1:
        return [item]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, item)
    return found


def close_group() -> None:
    """Ends the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def check_equal(what: str, mark: str) -> None:
    """Raises MismatchError on every rank where the ranks' marks differ."""
    marks = gather_objects(mark)
    if len(set(marks)) > 1:
        odd = [k for k, m in enumerate(marks) if m != marks[0]]
        raise MismatchError(
            f"{what} differs between ranks: rank {', '.join(map(str, odd))} from rank 0. Build the same model from the "
            "same seed on every rank and give the same example"
        )


NOT_GIVEN = "not given"


def check_options(options: Mapping[str, str]) -> None:
    """Raises MismatchError on every rank where their options differ; it names each and what the ranks have."""
    digest = hashlib.sha256(json.dumps(dict(options), sort_keys=True).encode()).hexdigest()
    if len(set(gather_objects(digest))) == 1:
        return
    told: list[dict[str, str]] = gather_objects(dict(options))
    names = list(dict.fromkeys(name for one in told for name in one))
    differences = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for k, one in enumerate(told):
            ranks.setdefault(one.get(name, NOT_GIVEN), []).append(k)
        if len(ranks) > 1:
            differences.append(f"{name} is " + " but ".join(f"{v} on {_ranks(k)}" for v, k in ranks.items()))
    raise MismatchError(
        f"the arguments of parallelize differ between ranks: {'; '.join(differences)}. Give the same on every rank"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} others" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def together(what: str, work: Callable[[], T]) -> T:
    """Does work on every rank; where it fails on one, every rank raises, so that none waits for ever.

    A rank that failed raises its own error, the others MismatchError with the text of the first.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # told to the others, then raised
        error = caught
    texts = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for k, text in enumerate(texts):
        if text is not None:
            raise MismatchError(f"rank {k} failed while {what}: {text}")
    return result


_LOST = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "socket", "gloo", "nccl")


@contextlib.contextmanager
def lost_ranks(what: str) -> Iterator[None]:
    """Turns the backends' errors about other ranks into LostRankError."""
    try:
        yield
    except ShardwiseError:
        raise
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not isinstance(error, dist.DistError) and not any(word in text.lower() for word in _LOST):
            raise
        raise LostRankError(
            f"rank {rank()} lost contact to another rank while {what} ({text[:300]}). Its process has ended, it waits "
            "somewhere else, or the network failed; look at the first error of the other ranks. Parameters keep the "
            "values of the last step: start again from the last checkpoint"
        ) from error
