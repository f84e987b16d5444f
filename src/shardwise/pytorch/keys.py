"""The key of a program: everything that a trace bakes in.

A joint trace has no guards, so two calls may share a program only where all of this is equal: the structure of the
arguments, non-tensor leaves, shapes, dtypes and requires_grad of tensors, grad mode, autocast, the flags of torch that
change what is traced, and of every submodule its class, training flag, hooks and attributes.

Attributes that are plain values are compared by value, on all ranks. Others (tensors, functions, objects of unknown
classes) are compared by identity, on this rank alone, and tensors by their version as well.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .compat import COMPOSABLE_REGISTRY, COMPOSABLE_STATE
from .state import refuse_alone

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
_OWN = frozenset(nn.Module().__dict__) | {"_shardwise", COMPOSABLE_STATE, COMPOSABLE_REGISTRY}
"""What every module has by itself; of these the training flag and the hooks count."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 3


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

    def identity(self, value: Any, text: str) -> str:
        self.alive.append(value)
        self.local.append(id(value))
        return text

    def text(self, value: Any, depth: int = _DEPTH) -> str:
        """The part of a value that is equal on all ranks."""
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, torch.Tensor):
            self.local.append(-1 if value.is_inference() else value._version)
            return self.identity(value, f"{tuple(value.shape)} {value.dtype} {value.requires_grad}")
        if isinstance(value, list | tuple) and depth:
            return f"{kind.__name__}[{','.join([self.text(v, depth - 1) for v in value])}]"
        if isinstance(value, dict) and depth:
            inside = [f"{self.text(k, 1)}:{self.text(v, depth - 1)}" for k, v in value.items()]
            return f"{kind.__name__}{{{','.join(inside)}}}"
        if isinstance(value, set | frozenset) and depth:
            return f"{kind.__name__}{{{','.join(sorted(self.text(v, depth - 1) for v in value))}}}"
        if isinstance(value, nn.Module | ModuleType) or isinstance(value, _FUNCTIONS):
            return self.identity(value, getattr(value, "__qualname__", kind.__qualname__))
        return self.object(value, depth)

    def object(self, value: Any, depth: int) -> str:
        """An object of the user's own class, such as a config: its attributes, once per walk."""
        name = type(value).__qualname__
        before = self.seen.get(id(value))
        if before is not None:
            return f"#{before}"
        self.seen[id(value)] = len(self.seen)
        fields = getattr(value, "__dict__", None)
        if not depth or not isinstance(fields, dict) or not fields:
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


def module_key(module: nn.Module) -> Key:
    """Classes, training flags, hooks, attributes, and requires_grad and dtypes of the parameters of all submodules."""
    walk = _Walk()
    parts: list[Any] = [_flags()]
    text = walk.text
    stack: list[tuple[str, nn.Module]] = [("", module)]
    done: set[int] = set()
    ties: dict[int, int] = {}
    while stack:
        name, sub = stack.pop()
        if id(sub) in done:
            parts.append((name, "again"))
            continue
        done.add(id(sub))
        fields = sub.__dict__
        walk.identity(sub, "")
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
    parts: list[Any] = [spec, training]
    shape = iter(shapes)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((tuple(next(shape)), leaf.dtype, leaf.requires_grad))
        elif type(leaf).__module__ == "numpy":
            parts.append(f"{getattr(leaf, 'shape', '')} {getattr(leaf, 'dtype', '')} {_digest(leaf)}")
        else:
            parts.append(walk.text(leaf))
    return Key(tuple(parts), tuple(walk.local), tuple(walk.alive))


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
