"""Optimizers of a parallelized module: those that DTensors cannot serve are refused; a fast gradient clip.

`shardwise` changes no optimizer. A hook that torch calls before every step looks at each optimizer once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import UnsupportedError
from .compat import WeakIdKeyDictionary

REFUSED = {
    "Adafactor": "it takes the root of a norm over rows in place, which a sharded tensor has only in parts",
    "LBFGS": "it flattens all parameters into one vector, which sharded tensors of uneven pieces have not",
    "Muon": "it orthogonalises whole matrices, which no rank has",
    "Rprop": "it writes to the elements that a mask selects, for which DTensor has no rule",
    "SparseAdam": "it takes sparse gradients, and the gradients of a planned program are dense",
}
"""Class of torch.optim -> why it cannot step sharded parameters. docs/optimizers.md says the same; tested."""

NOT_FUSED = {"Adagrad": "torch._fused_adagrad_", "SGD": "torch._fused_sgd_"}
"""Class of torch.optim -> the fused operator for which DTensor has no rule."""

_retired: Any = WeakIdKeyDictionary()
_checked: Any = WeakIdKeyDictionary()
_watching = False


def retire(parameters: Iterable[torch.Tensor]) -> None:
    """Remembers parameters that `parallelize` replaced: an optimizer that still holds one is refused at its step."""
    global _watching
    for parameter in parameters:
        _retired[parameter] = True
    if not _watching:
        register_optimizer_step_pre_hook(_before_step)
        _watching = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Checks an optimizer when it steps for the first time and whenever it has got other parameters."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:
        return
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p in _retired for p in parameters):
        raise UnsupportedError(
            f"this {name} was built before parallelize and holds parameters that the module no longer has: build the "
            "optimizer after parallelize (and load its state then)"
        )
    spread = [p for p in parameters if isinstance(p, DTensor)]
    if type(optimizer).__module__.startswith("torch.optim") and spread:
        cut = any(not x.is_replicate() for p in spread for x in p.placements)
        check_optimizer(name, any(group.get("fused") for group in optimizer.param_groups), cut)
    _checked[optimizer] = count


def check_optimizer(name: str, fused: bool, cut: bool) -> None:
    """Raises UnsupportedError where a class of torch.optim cannot step DTensors; `cut`: some are in pieces."""
    if name in REFUSED and (cut or name == "SparseAdam"):
        advice = "or keep its parameters whole, with constraints={name: 'R'} to parallelize"
        raise UnsupportedError(
            f"{name} cannot train parameters that are cut into pieces: {REFUSED[name]}. Use another optimizer of "
            f"docs/optimizers.md{'' if name == 'SparseAdam' else ', ' + advice}"
        )
    if fused and name in NOT_FUSED:
        raise UnsupportedError(
            f"{name}(fused=True) cannot train a parallelized module: DTensor has no rule for {NOT_FUSED[name]}. "
            f"Use {name}(foreach=True), which takes about as long"
        )


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, which also works, in a fraction of its time: one collective for all norms.

    Returns the norm of all gradients before clipping, a plain tensor. Every rank must call it.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    spread = any(isinstance(g, DTensor) for g in gradients) and dist.get_world_size() > 1
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    some = [k for k, x in enumerate(local) if x.numel()]
    norms = torch.zeros(len(local), dtype=torch.float64, device=local[0].device)
    if some:
        norms[some] = torch.stack([n.double() for n in torch._foreach_norm([local[k] for k in some], norm_type)])
    if norm_type == float("inf"):
        total, op = norms.max(), dist.ReduceOp.MAX
    else:
        # A gradient of which n ranks hold the same piece must count once.
        shares = torch.tensor([1.0 / _copies(g, spread) for g in gradients], dtype=norms.dtype, device=norms.device)
        total, op = (norms.pow(norm_type) * shares).sum(), dist.ReduceOp.SUM
    if spread:
        dist.all_reduce(total, op)
    if norm_type != float("inf"):
        total = total.pow(1.0 / norm_type)
    total = total.to(gradients[0].dtype)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        torch._foreach_mul_(local, scale)
    return total


def _copies(gradient: torch.Tensor, spread: bool) -> int:
    """How many ranks hold this rank's piece of a gradient."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if spread else 1
    count = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements):
        count *= 1 if isinstance(placement, Shard) else size
    return count
