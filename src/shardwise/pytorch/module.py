"""The drop-in module: the user's own object, whose forward runs the planned program.

`install` replaces parameters and buffers by DTensors under their own names and gives the module a subclass of its own
class. Programs are captured when first needed, one per key (see `keys.py`), through the `build` function that
`pipeline.py` injects.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import InputError, MismatchError
from ..ir.placement import Layout
from ..plan.plan import Plan
from .capture import flatten_inputs
from .keys import program_key
from .program import LocalProgram
from .state import place_state, store

log = logging.getLogger("shardwise")
MANY_PROGRAMS = 20

Build = Callable[["Runtime", nn.Module, tuple, dict, bool], LocalProgram]


class Runtime:
    """What a parallelized module carries beside its own attributes."""

    def __init__(
        self,
        original: type[nn.Module],
        mesh: DeviceMesh | None,
        shape: tuple[int, ...],
        device: torch.device,
        batch: str,
    ):
        self.original = original
        self.mesh = mesh
        self.shape = shape
        self.device = device
        self.batch = batch
        self.build: Build | None = None
        self.programs: dict[Any, LocalProgram] = {}
        self.layouts: dict[str, Layout] = {}
        """Placements of parameters and buffers, fixed by the first program."""
        self.first: LocalProgram | None = None
        self.origin: Any = None
        """Where the rules and the plan of the first program came from (`pipeline.Origin`)."""

    @property
    def coords(self) -> tuple[int, ...]:
        """This rank's place on the mesh."""
        if self.mesh is None:
            return (0,) * len(self.shape)
        found = self.mesh.get_coordinate()
        assert found is not None, "this rank is not in the mesh"
        return tuple(found)

    @property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """The process group of every axis."""
        if self.mesh is None:
            return (None,) * len(self.shape)
        return tuple(self.mesh.get_group(axis) for axis in range(len(self.shape)))

    def adopt(self, module: nn.Module, args: tuple, kwargs: dict, program: LocalProgram) -> None:
        """Takes the program of the example as the first one."""
        self.first = program
        self.programs[program_key(module, args, kwargs, program.program.training)] = program

    def program(self, module: nn.Module, args: tuple, kwargs: dict, training: bool, key: Any) -> LocalProgram:
        """The program for this call, captured and planned where it is new."""
        found = self.programs.get(key)
        if found is None:
            assert self.build is not None
            if self.first is not None:
                log.info("capturing program %d of %s", len(self.programs) + 1, self.original.__name__)
            found = self.programs[key] = self.build(self, module, args, kwargs, training)
            if self.first is None:
                self.first = found
            if len(self.programs) == MANY_PROGRAMS:
                warnings.warn(
                    f"{self.original.__name__} has been captured {MANY_PROGRAMS} times, for as many shapes, modes or "
                    "attribute values; every one costs seconds. Pad batches to few shapes, or keep changing numbers "
                    "in tensors",
                    stacklevel=4,
                )
        return found


class ParallelModule(nn.Module):
    """Mixed into the class of a parallelized module."""

    _shardwise: Runtime

    @property
    def plan(self) -> Plan:
        """The plan of the first program."""
        first = self._shardwise.first
        assert first is not None
        return first.plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the planned program."""
        return run(self, args, kwargs)


def run(module: ParallelModule, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call of a parallelized module."""
    runtime = module._shardwise
    leaves, _, positions = flatten_inputs(args, kwargs)
    tensors = [leaves[k] for k in positions]
    training = torch.is_grad_enabled() and (
        any(p.requires_grad for p in module.parameters()) or any(t.requires_grad for t in tensors)
    )
    key = program_key(module, args, kwargs, training)
    seed = agree(runtime, key)
    program = runtime.program(module, args, kwargs, training, key)

    def state(path: str) -> torch.Tensor:
        return find(module, path)

    out, changes = program.run(state, tensors, seed)
    with torch.no_grad():
        for path, value in changes.items():
            if path.startswith("input "):
                tensors[int(path.removeprefix("input "))].copy_(value)
            else:
                store(find(module, path), value)
    return out


def find(module: nn.Module, path: str) -> torch.Tensor:
    """A parameter or buffer by its path."""
    owner, _, name = path.rpartition(".")
    found = getattr(module.get_submodule(owner), name)
    assert isinstance(found, torch.Tensor)
    return found


def agree(runtime: Runtime, key: Any) -> torch.Tensor:
    """Checks that all ranks are about to run the same program; returns the seed of this step, rank 0's for all."""
    seed = int(torch.randint(-(1 << 62), 1 << 62, (), dtype=torch.int64))
    if runtime.mesh is None or dist.get_world_size() == 1:
        return torch.tensor(seed, device=runtime.device)
    mark = int(key[:15], 16)
    rank = dist.get_rank()
    own = seed if rank == 0 else -(1 << 62)
    message = torch.tensor([mark, -mark, own], dtype=torch.int64, device=runtime.device)
    dist.all_reduce(message, dist.ReduceOp.MAX)
    high, low, seed = message.tolist()
    if high != -low:
        raise MismatchError(
            f"the ranks call {runtime.original.__name__} differently (shapes, dtypes, modes, attributes or other "
            f"arguments); rank {rank} has {key!r}. Give every rank the same model and, with batch='global', the same "
            "batch"
        )
    return torch.tensor(seed, device=runtime.device)


def install(module: nn.Module, runtime: Runtime) -> nn.Module:
    """Makes the module parallel in place: DTensor parameters, the planned forward, the same class name."""
    place_state(module, runtime.mesh, runtime.layouts)
    original = type(module)
    module.__class__ = type(original.__name__, (ParallelModule, original), {"__module__": original.__module__})
    module.__dict__["_shardwise"] = runtime
    return module


def check_module(module: Any) -> None:
    """Raises InputError for what cannot be parallelized."""
    if isinstance(module, ParallelModule):
        raise InputError(f"{type(module).__name__} is parallelized already")
    if not isinstance(module, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(module).__name__}; wrap the function in a module")
    if any(isinstance(p, DTensor) for p in module.parameters()):
        raise InputError("the module has DTensor parameters already; parallelize takes the plain module")
