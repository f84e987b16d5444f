"""The key of a program: everything that a trace bakes in.

A joint trace has no guards, so two calls may share a program only where all of this is equal: the structure of the
arguments, non-tensor leaves, shapes, dtypes and requires_grad of tensors, grad mode, autocast, the flags of torch that
change what is traced, of every submodule its class, training flag, hooks and attributes, and what its code reads beside
them (`reads.py`).

Attributes that are plain values, arrays, or containers and objects of such are compared by value, on all ranks. Others
(tensors, functions, objects far inside others) are compared by identity, on this rank alone, and tensors by their
version as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .compat import COMPOSABLE_REGISTRY, COMPOSABLE_STATE, storage_key
from .reads import class_attributes, is_machinery, outer_values
from .state import refuse_alone

_PLAIN = frozenset((bool, int, float, complex, str, bytes, range, type(None), torch.dtype, torch.device))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
_OWN = frozenset(nn.Module().__dict__) | {"_shardwise", COMPOSABLE_STATE, COMPOSABLE_REGISTRY}
"""What every module has by itself; of these the training flag and the hooks count."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 3
"""Objects inside objects that are looked into: a trainer that hangs on a module counts steps far inside."""
_NEST = 12
"""Containers inside containers."""
_MOST = 4096
"""Values of a container that are compared; and four times as many of a module."""
_LARGEST_ARRAY_BYTES = 1 << 20


@dataclass(frozen=True)
class Key:
    """One part of a program's key."""

    shared: tuple[Any, ...]
    """Equal on all ranks where their modules are."""
    local: tuple[int | str, ...]
    """Identities and versions on this rank."""
    alive: tuple[Any, ...]
    """The objects behind the identities; whoever keeps the key keeps them, so that no identity is given out again."""

    @property
    def lookup(self) -> tuple[Any, ...]:
        """What two calls must have in common on one rank."""
        return self.shared, self.local


class _Walk:
    """Turns values into text, and collects the identities of those that have none."""

    def __init__(self) -> None:
        self.alive: list[Any] = []
        self.local: list[int | str] = []
        self.seen: dict[int, int] = {}
        self.left = 4 * _MOST

    def identity(self, value: Any, text: str) -> str:
        self.alive.append(value)
        self.local.append(id(value))
        return text

    def text(self, value: Any, depth: int = _DEPTH, nest: int = _NEST) -> str:
        """The part of a value that is equal on all ranks. `depth` counts objects, `nest` containers."""
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, torch.Tensor):
            self.local.append(-1 if value.is_inference() else value._version)
            return self.identity(value, f"{tuple(value.shape)} {value.dtype} {value.requires_grad}")
        self.left -= 1
        if isinstance(value, Mapping | Sequence | Set) and nest and depth and self.left > 0:
            return self.container(value, depth, nest - 1)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            return self.array(value)
        if isinstance(value, nn.Module | ModuleType) or isinstance(value, _FUNCTIONS):
            return self.identity(value, getattr(value, "__qualname__", kind.__qualname__))
        return self.object(value, depth)

    def container(self, value: Any, depth: int, nest: int) -> str:
        """What is inside, in order where there is one."""
        name = type(value).__name__
        if len(value) > _MOST:
            return self.identity(value, f"{name} of {len(value)}")
        if isinstance(value, Mapping):
            inside = [f"{self.text(k, 1, nest)}:{self.text(v, depth, nest)}" for k, v in value.items()]
        else:
            inside = [self.text(v, depth, nest) for v in value]
        return f"{name}[{','.join(sorted(inside) if isinstance(value, Set) else inside)}]"

    def array(self, value: Any, most_bytes: int = _LARGEST_ARRAY_BYTES) -> str:
        """An array or scalar of numpy."""
        text = f"{getattr(value, 'shape', '')} {getattr(value, 'dtype', '')}"
        if value.nbytes > most_bytes or getattr(value.dtype, "hasobject", False):
            return self.identity(value, text)
        return f"{text} {_digest(value)}"

    def object(self, value: Any, depth: int) -> str:
        """An object of the user's own class, such as a config: its attributes, once per walk."""
        name = type(value).__qualname__
        before = self.seen.get(id(value))
        if before is not None:
            return f"#{before}"
        self.seen[id(value)] = len(self.seen)
        fields = _fields(value) if depth and self.left > 0 and not is_machinery(type(value)) else {}
        if not fields:
            return self.identity(value, name)
        self.alive.append(value)
        parts: list[str] = []
        for key, field in fields.items():
            text = self.text(field, depth - 1)
            if key.startswith("_"):  # often of this process alone, such as a cached hash of strings
                self.local.append(text)
            else:
                parts.append(f"{key}={text}")
        return f"{name}({','.join(parts)})"


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    found = dict(getattr(value, "__dict__", None) or {})
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def module_key(module: nn.Module) -> Key:
    """Classes, training flags, hooks, attributes, and requires_grad and dtypes of the parameters of all submodules."""
    walk = _Walk()
    parts: list[Any] = [_flags()]
    text = walk.text
    stack: list[tuple[str, nn.Module]] = [("", module)]
    done: set[int] = set()
    kinds: set[type] = set()
    ties: dict[int, int] = {}
    while stack:
        name, sub = stack.pop()
        if id(sub) in done:
            parts.append((name, "again"))
            continue
        done.add(id(sub))
        fields = sub.__dict__
        walk.identity(sub, "")
        if type(sub) not in kinds:
            kinds.add(type(sub))
            # Of this rank alone: where a rank's own number or statistics matter, the captured graphs differ.
            outside = (*class_attributes(type(sub)), *outer_values(type(sub)))
            walk.local += [f"{key}={text(value)}" for key, value in outside]
        parts += (name, type(sub).__qualname__, fields["training"])
        for key, value in fields.items():
            if key not in _OWN:
                kind = type(value)
                # The value itself where it can stand for itself: text would cost more than all the rest.
                parts += (key, kind, value) if kind in _PLAIN else (key, text(value))
        for key, tensor in fields["_parameters"].items():
            if tensor is None:
                parts.append(key)
                continue
            # The number tells which names are tied to one parameter.
            parts.append((key, tensor.requires_grad, tensor.dtype, ties.setdefault(id(tensor), len(ties))))
        for key, tensor in fields["_buffers"].items():
            parts.append(key if tensor is None else (key, tensor.dtype))
        if sub is not module:  # the module's own hooks run around the program, not in it
            for key in _HOOKS:
                if fields[key]:
                    parts += [text(hook) for hook in fields[key].values() if hook is not refuse_alone]
        stack += [(f"{name}.{key}", child) for key, child in fields["_modules"].items() if child is not None]
    return Key(tuple(parts), tuple(walk.local), tuple(walk.alive))


def arguments_key(leaves: list[Any], spec: Any, training: bool, shapes: list[tuple[int, ...]]) -> Key:
    """What a call contributes. `shapes` are the global ones of the tensors."""
    walk = _Walk()
    parts: list[Any] = [spec, training, *overlaps([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])]
    shape = iter(shapes)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(next(shape)), leaf.dtype, leaf.requires_grad))
        elif type(leaf).__module__ == "numpy":
            parts.append(walk.array(leaf, most_bytes=1 << 62))
        else:
            parts.append(walk.text(leaf))
    return Key(tuple(parts), tuple(walk.local), tuple(walk.alive))


def overlaps(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs of tensors that share memory."""
    places: dict[int, list[tuple[int, int, int]]] = {}
    for k, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and tensor.numel():
            first = int(tensor.storage_offset())
            last = first + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride()))
            places.setdefault(storage_key(tensor), []).append((first, last, k))
    return [
        (one[2], two[2])
        for here in places.values()
        for n, one in enumerate(here)
        for two in here[n + 1 :]
        if one[0] <= two[1] and two[0] <= one[1]
    ]


def _digest(array: Any) -> str:
    """numpy prints only the ends of a long array."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def mark(key: Any) -> int:
    """62 bits that are equal on two ranks where the keys are."""
    return int(hashlib.sha256(repr(key).encode()).hexdigest()[:15], 16)


def _flags() -> tuple[Any, ...]:
    """What of torch's global state a trace depends on."""
    cuda = torch.backends.cuda
    flags: tuple[Any, ...] = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            flags += (kind, torch.get_autocast_dtype(kind))
    return flags
