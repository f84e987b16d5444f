"""Parameters of a model on the meta device: made submodule by submodule, so that no rank ever holds the whole model.

Every submodule is made whole, initialised by what its author gave it (`reset_parameters`, `_reset_parameters`, then
the model's `_init_weights(submodule)`, where they exist), cut into this rank's pieces and freed. All ranks draw from
rank 0's generator, so the values are those of one process that does the same:

    for sub in model.to_empty(device=device).modules(): sub.reset_parameters()

What nothing initialises is filled with NaN, with a warning, until `load_state_dict` or a checkpoint gives it a value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from .world import broadcast_object

Place = Callable[[str, torch.Tensor], torch.Tensor]
"""(path, whole tensor) -> what the rank keeps of it."""


def share_generator(device: torch.device) -> None:
    """Every rank's generator gets the state of rank 0's."""
    torch.set_rng_state(broadcast_object(torch.get_rng_state()))
    if device.type == "cuda":
        torch.cuda.set_rng_state(broadcast_object(torch.cuda.get_rng_state(device)), device)


def materialise(module: nn.Module, device: torch.device, place: Place) -> None:
    """Replaces the meta tensors of a module, in place, by what `place` makes of their initial values."""
    if not any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        return
    share_generator(device)
    left: list[str] = []
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    """Identity of a meta tensor -> it, and what stands in its place; ties keep theirs."""
    for prefix, sub in module.named_modules():
        own = {**sub._parameters, **sub._buffers}
        if not any(t is not None and t.is_meta for t in own.values()):
            continue
        shell = _shell(sub, device)
        known = _initialise(module, shell)
        for table, values in ((sub._parameters, shell._parameters), (sub._buffers, shell._buffers)):
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                whole = values[name]
                assert whole is not None
                if not known:
                    _leave(sub, path, name, whole, left)
                _put(table, name, tensor, place(path, whole.detach()), made)
        del shell
    if left:
        warnings.warn(
            f"nothing initialises {', '.join(left[:8])}{' and others' if len(left) > 8 else ''}: the values are NaN "
            "until you load a state dict or a checkpoint; or give the submodule a reset_parameters()",
            stacklevel=3,
        )


def _put(
    table: Any, name: str, old: torch.Tensor, piece: torch.Tensor, made: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Stores a piece; where the tensor is tied to one made before, the later value counts, as in one process."""
    if id(old) not in made:
        made[id(old)] = (old, nn.Parameter(piece, old.requires_grad) if isinstance(old, nn.Parameter) else piece)
    else:
        with torch.no_grad():
            made[id(old)][1].copy_(piece)
    table[name] = made[id(old)][1]


def _shell(sub: nn.Module, device: torch.device) -> nn.Module:
    """A copy of one submodule, its children shared, with tensors of its own that are real and empty."""
    shell = object.__new__(type(sub))
    shell.__dict__.update(sub.__dict__)
    with torch.no_grad():
        shell.__dict__["_parameters"] = {
            k: None if p is None else nn.Parameter(_empty(p, device), requires_grad=p.requires_grad)
            for k, p in sub._parameters.items()
        }
        shell.__dict__["_buffers"] = {k: None if b is None else _empty(b, device) for k, b in sub._buffers.items()}
    return shell


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _initialise(root: nn.Module, shell: nn.Module) -> bool:
    """Calls what initialises the shell; whether there was anything."""
    known = False
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(shell, name, None)
        if callable(method):
            method()
            known = True
            break
    whole_model = getattr(root, "_init_weights", None)
    if callable(whole_model):
        before = {k: t._version for k, t in _tensors(shell).items()}
        whole_model(shell)
        known = known or any(t._version != before[k] for k, t in _tensors(shell).items())
    return known


def _tensors(shell: nn.Module) -> dict[str, torch.Tensor]:
    return {k: t for k, t in [*shell._parameters.items(), *shell._buffers.items()] if t is not None}


def _leave(sub: nn.Module, path: str, name: str, whole: torch.Tensor, left: list[str]) -> None:
    """What nothing initialises."""
    if name in sub._non_persistent_buffers_set:
        raise InputError(
            f"buffer {path} is on the meta device, no method of {type(sub).__name__} initialises it and no state dict "
            "carries it (persistent=False): create it on a real device, or give the class a reset_parameters()"
        )
    left.append(path)
    with torch.no_grad():
        whole.fill_(float("nan") if whole.is_floating_point() or whole.is_complex() else 0)
