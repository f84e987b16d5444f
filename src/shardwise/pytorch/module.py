"""The drop-in module: the user's own object, whose forward runs the planned program.

`install` replaces parameters and buffers by DTensors under their own names and gives the module a subclass of its own
class. Programs are captured when first needed, one per key (see `keys.py`), through the `build` function that
`pipeline.py` injects.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ..errors import InputError, UnsupportedError
from ..ir.placement import Layout, R
from ..plan.plan import Plan
from .agreement import Council, Statement, checksum
from .call import Call, describe
from .compat import local_of
from .keys import Key, mark, module_key
from .materialise import materialise
from .optimizers import retire
from .program import LocalProgram
from .state import add_hooks, as_dtensor, copied, place_state, placements, plain_copy, tensors_of
from .world import control_group, lost_ranks, world_size

log = logging.getLogger("shardwise")
MANY_PROGRAMS = 20

Build = Callable[["Runtime", nn.Module, tuple, dict, bool, tuple[str, ...]], LocalProgram]


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
        self.no_rows: frozenset[int] = frozenset()
        """Inputs that the user says hold no rows of the batch."""
        self.build: Build | None = None
        self.programs: dict[Any, LocalProgram] = {}
        """(epoch of every rank, arguments) -> program: the same keys, in the same order, on all ranks."""
        self.layouts: dict[str, Layout] = {}
        """Layouts of parameters and buffers, fixed by the first program; whole where there is none."""
        self.expected: dict[str, tuple[Placement, ...]] = {}
        """The same as DTensor's placements."""
        self.whole: tuple[Placement, ...] = (Replicate(),) * len(shape)
        self.first: LocalProgram | None = None
        self.origin: Any = None
        """Where the rules and the plan of the first program came from (`pipeline.Origin`)."""
        self.council = Council(None if mesh is None else control_group(), original.__name__)
        self.epochs: dict[Any, int] = {}
        """State of the module on this rank -> its number, in order of appearance."""
        self.epochs_seen = 0
        self.alive: list[Any] = []
        self.marks: dict[Any, int] = {}
        """Epoch, or what the arguments contribute -> its mark; making it in every step would cost too much."""
        self.tables: dict[int, dict[str, tuple[dict[str, Any], str]]] = {}
        """Epoch -> path of a parameter or buffer -> (the table that holds it, its name there)."""
        self.inherited: dict[Any, int] = {}
        """Of a deep copy: what all ranks share of a state -> its epoch in the original."""

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

    def mark(self, name: Any, key: Key) -> int:
        """The mark of a part of a key, remembered under a name."""
        found = self.marks.get(name)
        if found is None:
            found = self.marks[name] = mark(key.shared)
        return found

    def epoch(self, module: nn.Module, key: Key, arguments: Key) -> int:
        """The number of this state of the module, and of the arguments that are known by identity alone."""
        lookup = (key.lookup, arguments.local)
        found = self.epochs.get(lookup)
        if found is None:
            found = self.inherited.pop(key.shared, None)
            if found is None:
                found = self.epochs_seen
                self.epochs_seen += 1
            self.epochs[lookup] = found
            self.alive.append((key.alive, arguments.alive))
            self.tables[found] = _tables(module)
        return found

    def adopt(self, module: nn.Module, call: Call, rows: int, program: LocalProgram) -> None:
        """Takes the program of the example as the first one."""
        self.first = program
        arguments = call.key(rows)
        epoch = self.epoch(module, module_key(module), arguments)
        self.programs[((epoch,) * world_size(), arguments.shared)] = program

    def find(self, program_key: Any, module: nn.Module, call: Call, rows: int) -> LocalProgram:
        """The program for this call, captured and planned where it is new."""
        found = self.programs.get(program_key)
        if found is None:
            assert self.build is not None
            number = len(self.programs) + 1
            shapes = ", ".join(str(list(s)) for s in call.shapes(rows)) or "no tensors"
            log.info("%s: capturing and planning program %d, for inputs %s", self.original.__name__, number, shapes)
            args, kwargs = call.global_arguments(rows)
            found = self.build(self, module, args, kwargs, call.training, call.sharded)
            self.programs[program_key] = found
            if number == MANY_PROGRAMS:
                warnings.warn(
                    f"{self.original.__name__} has been captured {MANY_PROGRAMS} times, for as many shapes, modes or "
                    "attribute values; every one costs seconds. Pad batches to few shapes, or keep changing numbers "
                    "in tensors",
                    stacklevel=5,
                )
        return found

    def tensor(self, epoch: int, path: str) -> torch.Tensor:
        """The parameter or buffer at a path. Raises InputError where it is not what parallelize put there."""
        table, name = self.tables[epoch][path]
        tensor = table[name]
        if self.mesh is None:
            return tensor
        expected = self.expected.get(path, self.whole)
        if isinstance(tensor, DTensor) and tensor.placements == expected:
            return tensor
        have = tensor.placements if isinstance(tensor, DTensor) else "a plain tensor"
        raise InputError(
            f"{path} was replaced after parallelize: it is {have} where {expected} is needed. Change values in place "
            "(load_state_dict takes whole tensors), or change the model before parallelize"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """The same programs on the same ranks, for a copy of the module with state of its own."""
        found = copy.copy(self)
        found.council = copy.copy(self.council)
        found.programs = dict(self.programs)
        found.epochs, found.alive, found.tables = {}, [], {}
        found.inherited = {lookup[0][0]: number for lookup, number in self.epochs.items()}
        return found


def _tables(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for prefix, sub in module.named_modules(remove_duplicate=False):
        for table in (sub._parameters, sub._buffers):
            for name in table:
                found[f"{prefix}.{name}" if prefix else name] = (table, name)  # type: ignore[assignment]
    return found


class ParallelModule(nn.Module):
    """Mixed into the class of a parallelized module."""

    _shardwise: Runtime

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`to`, `half`, `cuda` and others come here: another dtype is another program, another device is refused."""
        device = self._shardwise.device
        moved = fn(torch.empty(0, device=device)).device
        if moved != device:
            raise UnsupportedError(
                f"a parallelized module cannot be moved from {device} to {moved}: its plan, process groups and pieces "
                "belong to the device. Move the model first, then parallelize it"
            )
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_fsdp_managed_module":  # what FullyShardedDataParallel does to a module first
            raise UnsupportedError(
                "a parallelized module needs no FullyShardedDataParallel: its parameters are spread over the ranks "
                "where its plan says so; memory_limit= makes it spread more. Call it directly"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A parallel module of its own, on the same ranks. Nothing is communicated."""
        found = object.__new__(type(self))
        memo[id(self)] = found
        for _, _, _, tensor in tensors_of(self):
            if isinstance(tensor, DTensor) and id(tensor) not in memo:
                memo[id(tensor)] = copied(tensor)
        found.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, for `torch.save(model)`, it is the plain module with whole tensors. Every rank must save."""
        plain = plain_copy(self, self._shardwise.original)
        # The form that names the class: pickle refuses the newer one, since this object is of another class.
        return copyreg._reconstructor, (type(plain), object, None), plain.__getstate__()  # type: ignore[attr-defined]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel asks for this first; an error here is the one place where it can be told.
        raise UnsupportedError(
            "a parallelized module needs no DistributedDataParallel: it is data parallel already where that is best. "
            "Call it directly"
        )


@torch.compiler.disable  # around a parallelized module torch.compile takes it as one call that it does not look into
def run(module: ParallelModule, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call of a parallelized module."""
    runtime = module._shardwise
    runtime.council.calls += 1
    try:
        call = describe(module, args, kwargs, runtime.batch, runtime.device, runtime.no_rows)
        statement = _statement(runtime, module, call)
    except Exception:
        runtime.council.fail()  # the others are about to wait for this rank
        raise
    agreed = runtime.council.agree(statement, lambda batched: restate(call, statement, batched))
    rows = sum(agreed.rows)
    call.batched = agreed.batched
    program = runtime.find((agreed.epochs, call.key(rows).shared), module, call, rows)
    call.even_out(agreed.rows, runtime.mesh)
    seed = torch.full((), agreed.seed, dtype=torch.int64, device=runtime.device)
    state = functools.partial(runtime.tensor, statement.epoch)
    with lost_ranks(f"{runtime.original.__name__} ran forward"):
        out, changes = program.run(state, call.tensors, seed, runtime.council)
    with torch.no_grad():
        for path, value in changes.items():
            if path.startswith("input "):
                call.given[int(path.removeprefix("input "))].copy_(value)
            else:
                local_of(state(path)).copy_(value)
    return out


def _statement(runtime: Runtime, module: nn.Module, call: Call) -> Statement:
    """What this rank tells the others."""
    seed = int(torch.randint(-(1 << 62), 1 << 62, (), dtype=torch.int64))
    calls = runtime.council.calls
    key, arguments = module_key(module), call.own_key()
    epoch = runtime.epoch(module, key, arguments)
    if runtime.council.group is None:
        return Statement(calls, 0, epoch, 0, 0, call.rows, call.batched, seed)
    # Reading values back from an accelerator would make it wait, so there they are compared now and then.
    look = runtime.device.type == "cpu" or calls % 100 == 0
    return Statement(
        calls,
        runtime.mark(epoch, key),
        epoch,
        runtime.mark(arguments.shared, arguments),
        checksum(call.others()) if look else 0,
        call.rows,
        call.batched,
        seed,
    )


def restate(call: Call, statement: Statement, batched: int) -> Statement:
    """The statement where the ranks disagree about which tensors hold rows: those that do on all of them."""
    call.batched = batched
    return replace(statement, batched=batched, arguments=mark(call.own_key().shared), values=checksum(call.others()))


def install(module: nn.Module, runtime: Runtime, call: Call, rows: int, program: LocalProgram) -> nn.Module:
    """Makes the module parallel in place: DTensor parameters, the planned forward, the same class name."""
    mesh = runtime.mesh
    whole: Layout = (R,) * len(runtime.shape)
    first: dict[int, str] = {}
    for path, _, _, tensor in tensors_of(module):  # a tied parameter lies as the name that the graph has for it
        name = first.setdefault(id(tensor), path)
        if name in runtime.layouts:
            runtime.layouts[path] = runtime.layouts[name]

    def place(path: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if mesh is None else as_dtensor(tensor, mesh, runtime.layouts.get(path, whole))

    materialise(module, runtime.device, place)
    retire(place_state(module, mesh, runtime.layouts))
    add_hooks(module)
    runtime.expected = {path: placements(layout) for path, layout in runtime.layouts.items()}
    module.__class__ = _parallel_class(module)
    module.__dict__["_shardwise"] = runtime
    runtime.adopt(module, call, rows, program)
    return module


def _parallel_class(module: nn.Module) -> type[nn.Module]:
    """A subclass with the names of the user's class; a `plan` of the user's own stays what it is."""
    original = type(module)

    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)  # type: ignore[reportCallIssue]: torch types a disabled function as a method

    members: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": functools.update_wrapper(forward, original.forward),  # so that its signature stays visible
    }
    if not hasattr(module, "plan"):
        members["plan"] = property(plan_of)
    return type(original.__name__, (ParallelModule, original), members)


def plan_of(module: nn.Module) -> Plan:
    """The plan of a parallelized module's first program: `model.plan`, unless the user's class has one of its own."""
    runtime = module.__dict__.get("_shardwise")
    if runtime is None:
        raise InputError(f"{type(module).__name__} is not parallelized: call shardwise.parallelize first")
    return runtime.first.plan


def check_module(module: Any) -> None:
    """Raises InputError for what cannot be parallelized."""
    if isinstance(module, ParallelModule):
        raise InputError(f"{type(module).__name__} is parallelized already; use it as it is")
    if not isinstance(module, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(module).__name__}; wrap the function in a module")
    name = type(module).__name__
    if name in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise InputError(f"{name} is a wrapper of its own kind of parallelism; hand over the module inside, .module")
    if name == "OptimizedModule":
        raise InputError("a compiled module cannot be captured; hand over the module before torch.compile, ._orig_mod")
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(f"{name} is a TorchScript module; hand over the Python module that it was made from")
    if "forward" in module.__dict__:
        raise InputError(f"this {name} has a forward of its own instance, which would hide the planned one; remove it")
    for path, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise InputError(f"{path} is a DTensor already; parallelize takes the plain module")
        if nn.parameter.is_lazy(parameter):
            raise InputError(f"{path} has no shape yet; call the lazy module once before parallelize")
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise InputError(f"{path} has hooks, which its DTensor would not; register them after parallelize")
    for path, sub in module.named_modules():
        if path and (sub._backward_hooks or sub._backward_pre_hooks):
            raise InputError(
                f"{path} has a backward hook, which a captured program cannot call; remove it, or put it on the whole "
                "module"
            )
