"""Between the names of the graph and the operators of torch: `aten.mm.default` <-> torch.ops.aten.mm.default.

Also turns arguments into their framework-free form and back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..ir.graph import Arg, Literal
from . import pooling  # noqa: F401  registers its operators on every rank
from .compat import OpOverload, overload_name

_KINDS: dict[type, str] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def op_name(op: OpOverload) -> str:
    """`namespace.name.overload`."""
    return overload_name(op)


@lru_cache(maxsize=4096)
def find_op(name: str) -> OpOverload:
    """The inverse of `op_name`. Raises AttributeError for an operator that is not registered."""
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def dtype_of(name: str) -> torch.dtype:
    """`float32` -> torch.float32."""
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> `float32`."""
    return str(dtype).removeprefix("torch.")


def to_arg(value: Any) -> Arg:
    """A framework value without tensors as an argument of the graph. Raises TypeError for anything unknown."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(to_arg(item) for item in value)
    kind = _KINDS.get(type(value))
    if kind is not None:
        return Literal(kind, str(value).removeprefix("torch."))
    raise TypeError(f"an argument of type {type(value).__name__} cannot be kept in a graph")


def from_literal(literal: Literal, device: torch.device | None = None) -> Any:
    """The framework's own constant; a device is replaced by `device` where given."""
    if literal.kind == "device":
        return device if device is not None else torch.device(literal.text)
    return getattr(torch, literal.text)
