"""The key of a program: everything that a trace bakes in.

A joint trace has no guards, so two calls may share a program only where all of this is equal: the structure of the
arguments, non-tensor leaves, shapes, dtypes and requires_grad of tensors, grad mode, autocast, and of every submodule
its training flag and plain attributes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from .capture import flatten_inputs

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SKIPPED = {"_parameters", "_buffers", "_modules", "_shardwise", "training"}


def program_key(module: nn.Module, args: tuple, kwargs: dict[str, Any], training: bool) -> str:
    """A text that is equal on all ranks exactly where the programs are."""
    leaves, spec, _ = flatten_inputs(args, kwargs)
    parts: list[str] = [str(spec), str(training), _autocast()]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append(f"{tuple(leaf.shape)} {leaf.dtype} {leaf.requires_grad}")
        else:
            parts.append(repr(leaf))
    parts.append(module_key(module))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def module_key(module: nn.Module) -> str:
    """Training flags, requires_grad and plain attributes of all submodules."""
    parts: list[str] = []
    for name, sub in module.named_modules():
        parts.append(f"{name}:{sub.training}")
        for key, value in sub.__dict__.items():
            if key in _SKIPPED:
                continue
            text = _plain(value)
            if text is not None:
                parts.append(f"{key}={text}")
        for key, parameter in sub._parameters.items():
            parts.append(f"{key}:{None if parameter is None else parameter.requires_grad}")
    return ";".join(parts)


def _plain(value: Any, depth: int = 3) -> str | None:
    """Text of a plain value or of a container of plain values; None for what a key cannot hold."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth and isinstance(value, list | tuple):
        return "[" + ",".join(_plain(v, depth - 1) or "?" for v in value) + "]"
    if depth and isinstance(value, dict):
        return "{" + ",".join(f"{k!r}:{_plain(v, depth - 1) or '?'}" for k, v in value.items()) + "}"
    return None


def _autocast() -> str:
    found = []
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            found.append(f"{kind}:{torch.get_autocast_dtype(kind)}")
    return ",".join(found)
