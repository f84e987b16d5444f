"""The module as a function of tensors, as it is traced: what it returns, and what it leaves behind.

- A tensor output that shares storage with an input, with the module's state or with another output becomes a copy:
  AOTAutograd gives no gradient to an output that it can make again as a view of something else.
- A buffer that forward replaces (`self.mean = 0.9 * self.mean + ...`) is written in place instead.
- What else forward changes in the module would be lost with the traced copy: plain values that differ from call to
  call are refused, tensors that it leaves in attributes are told of.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from .compat import storage_key
from .observe import Observer
from .random import RandomState


class Computed:
    """Stands for a computed tensor among the outputs."""

    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = Computed()

_PLAIN = (bool, int, float, complex, str, bytes)


class Flat(nn.Module):
    """Calls the module with the tensors among its flattened arguments; remembers the structure of what it returns."""

    def __init__(self, module: nn.Module, leaves: list[Any], tensor_leaves: tuple[int, ...], spec: pytree.TreeSpec):
        super().__init__()
        self.module = module
        self.leaves = leaves
        self.positions = tensor_leaves
        self.spec = spec
        self.out_spec: pytree.TreeSpec | None = None
        self.out_leaves: tuple[Any, ...] = ()
        self.random = RandomState()
        self.plain: dict[str, Any] | None = None
        """Plain attributes of all submodules after the call before."""

    def forward(self, seed: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        buffers = {name: dict(m._buffers) for name, m in self.module.named_modules()}
        held = _held_tensors(self.module)
        with self.random.bind(seed), Observer():
            out, self.out_spec = pytree.tree_flatten(self.module.forward(*args, **kwargs))
            self._write_back(buffers)
            self._check_attributes(held)
            for leaf in out:
                _check_leaf(leaf)
            state = [*tensors, *self.module.parameters(), *self.module.buffers()]
            found = _unshared([o for o in out if isinstance(o, torch.Tensor)], state)
        self.out_leaves = tuple(TENSOR if isinstance(o, torch.Tensor) else o for o in out)
        return tuple(found)

    def _write_back(self, before: dict[str, dict[str, torch.Tensor | None]]) -> None:
        """Buffers that forward has replaced, written into those that were there."""
        for name, module in self.module.named_modules():
            for key, old in before.get(name, {}).items():
                new = module._buffers.get(key)
                if new is old:
                    continue
                path = f"{name}.{key}" if name else key
                if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                    have, want = (None if t is None else f"{t.dtype} {list(t.shape)}" for t in (new, old))
                    raise CaptureError(f"forward replaces the buffer {path}, {want}, by {have}: it must keep its form")
                if new.requires_grad:
                    raise CaptureError(
                        f"forward replaces the buffer {path} by a value with a gradient, which the next backward would "
                        "follow into this step; detach it"
                    )
                old.copy_(new)
                module._buffers[key] = old

    def _check_attributes(self, held: dict[str, int]) -> None:
        """Raises CaptureError where a second call changes a plain attribute again."""
        plain = _plain_attributes(self.module)
        if self.plain is not None:
            for path, value in plain.items():
                before = self.plain.get(path, value)
                if value != before and value == value:
                    raise CaptureError(
                        f"forward changes {path} at every call (from {before!r} to {value!r}), which a captured "
                        "program cannot do. Keep it in a buffer and change that, or change it outside of forward"
                    )
        elif left := [path for path, key in _held_tensors(self.module).items() if held.get(path) != key]:
            warnings.warn(
                f"forward leaves tensors in {', '.join(left[:4])}, which a captured program does not do: return what "
                "is read after the call",
                stacklevel=2,
            )
        self.plain = plain


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = nn.Module().__dict__
    found = {}
    for name, sub in module.named_modules():
        for key, value in sub.__dict__.items():
            if key not in own or key == "training":
                found[f"{name}.{key}" if name else key] = value
    return found


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {path: value for path, value in _attributes(module).items() if isinstance(value, _PLAIN)}


def _held_tensors(module: nn.Module) -> dict[str, int]:
    """Attribute that is a tensor -> its identity."""
    return {path: id(value) for path, value in _attributes(module).items() if isinstance(value, torch.Tensor)}


def _check_leaf(leaf: Any) -> None:
    """Raises CaptureError for an object that holds tensors but says nothing of its structure."""
    if isinstance(leaf, torch.Tensor) or isinstance(leaf, type):
        return
    fields = getattr(leaf, "__dict__", None)
    inside = [k for k, v in fields.items() if isinstance(v, torch.Tensor)] if isinstance(fields, dict) else []
    if inside:
        name = type(leaf).__qualname__
        how = "torch.export.register_dataclass" if dataclasses.is_dataclass(leaf) else "torch.utils._pytree"
        raise CaptureError(
            f"forward returns a {name} that holds tensors ({', '.join(inside[:4])}), but torch does not know how it is "
            f"built: register the class with {how}, or return a tuple or a dict"
        )


def _unshared(outputs: list[torch.Tensor], state: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, those copied that share storage with the state or with an output before them."""
    taken = {storage_key(t) for t in state if t.layout == torch.strided}
    found = []
    for output in outputs:
        shared = output.layout == torch.strided and storage_key(output) in taken
        if output.layout == torch.strided:
            taken.add(storage_key(output))
        found.append(output.clone() if shared else output)
    return found
