"""One call of a parallelized module: its arguments, what its program depends on, and this rank's part of the batch."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..errors import InputError, UnsupportedError
from .agreement import checksum, expected_rows, rebalance
from .keys import Key, arguments_key
from .outputs import GlobalOutput
from .world import gather_objects, together


@dataclass
class Call:
    """The flattened arguments. In batch mode "local" the tensors of `batched` hold this rank's rows."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    positions: tuple[int, ...]
    """Of the tensors among the leaves."""
    tensors: list[torch.Tensor]
    """Contiguous, since a program is captured for contiguous inputs."""
    training: bool
    rows: int = 0
    batched: int = 0
    """Bit k: tensor k holds rows of the batch."""
    no_rows: frozenset[int] = frozenset()
    """Tensors of which the user says that they hold none, although they are as long."""

    @property
    def given(self) -> list[torch.Tensor]:
        """The tensors that the user gave."""
        return [self.leaves[k] for k in self.positions]

    def others(self) -> list[torch.Tensor]:
        """The tensors that must be the same on every rank."""
        return [t for k, t in enumerate(self.tensors) if not self.batched >> k & 1]

    def own_key(self) -> Key:
        """What must be equal on all ranks: the rows that each brings are left out."""
        return self.key(-1)

    def key(self, rows: int) -> Key:
        """The key at a global batch of `rows`."""
        return arguments_key(self.leaves, self.spec, self.training, self.shapes(rows))

    def shapes(self, rows: int) -> list[tuple[int, ...]]:
        """The global shapes of the tensors."""
        return [(rows, *t.shape[1:]) if self.batched >> k & 1 else tuple(t.shape) for k, t in enumerate(self.tensors)]

    def global_arguments(self, rows: int) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the size that all ranks together give, to capture with."""
        leaves = list(self.leaves)
        for place, tensor, shape in zip(self.positions, self.tensors, self.shapes(rows)):
            if shape != tuple(tensor.shape):
                meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
                leaves[place] = meta.requires_grad_(tensor.requires_grad)
            else:
                leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def sharded(self) -> tuple[str, ...]:
        """Paths of the inputs that arrive in rows."""
        return tuple(str(k) for k in range(len(self.tensors)) if self.batched >> k & 1)

    def even_out(self, rows: tuple[int, ...], mesh: Any) -> None:
        """Moves rows between ranks where they do not lie as the mesh cuts the batch."""
        if mesh is None or not self.batched:
            return
        ranks = mesh.mesh.flatten().tolist()
        have = [rows[r] for r in ranks]
        want = expected_rows(sum(rows), tuple(mesh.shape))
        if have == want:
            return
        for k in range(len(self.tensors)):
            if not self.batched >> k & 1:
                continue
            if self.tensors[k].requires_grad:
                raise UnsupportedError(
                    f"batch='local': the ranks bring {list(rows)} rows, but {want} are needed for inputs that require "
                    "gradients; bring as many as torch.chunk would give each rank"
                )
            self.tensors[k] = rebalance(self.tensors[k], have, want, ranks)


def describe(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    batch: str,
    device: torch.device | None = None,
    no_rows: frozenset[int] = frozenset(),
) -> Call:
    """The call as a `Call`. In batch mode "local" every tensor whose first dim is as long as that of the first holds
    rows, but for those of `no_rows`. Raises InputError for tensors on another device, sparse ones, and objects that
    hide tensors, UnsupportedError for DTensors."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    positions = tuple(k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    for k in positions:
        if isinstance(leaves[k], GlobalOutput):
            leaves[k] = leaves[k].view_as(leaves[k])
    tensors = [leaves[k] for k in positions]
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            raise UnsupportedError("an argument is a DTensor; give plain tensors, for instance x.full_tensor()")
        if tensor.layout != torch.strided:
            raise InputError(f"an argument has layout {tensor.layout}; give dense tensors, for instance x.to_dense()")
        if device is not None and tensor.device != device and tensor.ndim > 0:
            raise InputError(f"an argument lies on {tensor.device}, the module on {device}; move it with .to({device})")
    for leaf in leaves:
        _refuse_hidden_tensors(leaf)
    training = torch.is_grad_enabled() and (
        any(p.requires_grad for p in module.parameters()) or any(t.requires_grad for t in tensors)
    )
    call = Call(leaves, spec, positions, [_plain(t) for t in tensors], training, no_rows=no_rows)
    if batch == "local":
        shaped = [k for k, t in enumerate(tensors) if t.ndim > 0 and k not in no_rows]
        if shaped:
            call.rows = tensors[shaped[0]].shape[0]
            call.batched = sum(1 << k for k in shaped if tensors[k].shape[0] == call.rows)
    return call


def _refuse_hidden_tensors(leaf: Any) -> None:
    """Raises InputError for an object whose tensors nobody would see: they would be baked into the program."""
    if isinstance(leaf, torch.Tensor | nn.Module) or type(leaf).__module__ == "builtins":
        return
    fields = getattr(leaf, "__dict__", None)
    for value in fields.values() if isinstance(fields, dict) else ():
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(value)):
            kind = type(leaf).__name__
            raise InputError(
                f"an argument is a {kind} that holds tensors, but torch does not know how it is built: register the "
                "class (torch.export.register_dataclass, or torch.utils._pytree.register_pytree_node), or pass the "
                "tensors themselves, or a dict of them"
            )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it lies in a program: contiguous, and no conjugate or negative that is not yet taken."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def check_example(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises InputError where the example is no call of the module's forward."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a forward without a signature takes what it takes
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the example does not fit {type(module).__name__}.forward{signature}: {error}. Give positional arguments "
            "as a tuple, example=(x, y), and named ones as example_kwargs={'z': z}"
        ) from None


def describe_example(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], batch: str, no_rows: frozenset[int] = frozenset()
) -> tuple[Call, int]:
    """(the call, global rows) of the example of `parallelize`, agreed on by all ranks. Warns of tensors that are taken
    as rows but look like something that all ranks share."""
    call = together("reading the example", lambda: describe(module, args, kwargs, batch, no_rows=no_rows))
    batched = [k for k in range(len(call.tensors)) if call.batched >> k & 1]
    told = gather_objects((call.rows, call.batched, {k: checksum([call.tensors[k]]) for k in batched}))
    for _, theirs, _ in told:
        call.batched &= theirs
    alike = [k for k in batched if call.batched >> k & 1 and len({marks.get(k) for *_, marks in told}) == 1]
    varied = [k for k in alike if len(told) > 1 and len(alike) < len(batched) and _varies(call.tensors[k])]
    if varied:
        warnings.warn(
            f"batch='local': input {varied[0]} is the same on every rank, but its first dim is {call.rows}, as many as "
            "the rows that each brings, so it is taken as rows. If it holds none, say "
            f"constraints={{'input {varied[0]}': 'R'}}",
            stacklevel=3,
        )
    return call, sum(rows for rows, *_ in told)


def _varies(tensor: torch.Tensor) -> bool:
    """Whether it has different elements: a mask of ones is the same on every rank, and rows all the same."""
    return tensor.device.type != "meta" and bool((tensor != tensor.reshape(-1)[:1].reshape([1] * tensor.ndim)).any())


def taken_as_rows(call: Call) -> str:
    """For messages: which tensors are taken as rows, and how to say that one holds none."""
    names = ", ".join(f"input {k}" for k in call.sharded)
    if not names:
        return ""
    return (
        f". With batch='local', {names} are taken as {call.rows} rows that this rank brings of a larger batch; "
        "constraints={'input K': 'R'} says that input K holds no rows"
    )
