"""Equality of a parallelized program with the single-process one.

    reference = reference_run(case)                       # plain eager SGD in one process
    result = train(parallelized, make_batch, loss_from)   # the same loop around anything else, on every rank
    compare(result, reference)

SGD, since Adam hides errors of scale. Everything is fp64; the tolerance of 1e-9 leaves room for sums in another order
(2e-16 a step was measured) and none for a wrong formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Batch, Case

TOLERANCE = 1e-9
FLOOR = 1e-5
"""Of the norm of the gradients. A parameter that is zero in theory (the bias of a softmax's keys) holds rounding errors
of its gradient alone, some 1e-16 of the norm a step: with this floor they may be 1e-14 of it. All others are far above
the floor: an error of 1e-6 in any of them is caught (tests/unit/test_equality.py)."""
SEED = 11


@dataclass(frozen=True)
class Run:
    """What a training run leaves: plain tensors with the global value."""

    losses: list[Tensor] = field(default_factory=list)  # one a step
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # one dict a step
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def reference_run(case: Case, steps: int = 5, lr: float = 0.1, rows: int | None = None) -> Run:
    """`case` trained by eager PyTorch in this process."""
    module, make_batch, loss_from = case.build()
    return train(module, make_batch, loss_from, steps, lr, case.rows if rows is None else rows)


def train(
    module: nn.Module,
    make_batch: Callable[[int, int], Batch],
    loss_from: Callable[[Any], Tensor],
    steps: int = 5,
    lr: float = 0.1,
    rows: int = 8,
) -> Run:
    """`steps` of SGD. On ranks: call it on every rank alike, since reading a DTensor's whole value is a collective."""
    torch.manual_seed(SEED)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr)
    run = Run()
    for step in range(steps):
        args, kwargs = make_batch(step, rows)
        loss = loss_from(module(*args, **kwargs))
        loss.backward()
        run.losses.append(whole(loss))
        run.gradients.append({n: None if p.grad is None else whole(p.grad) for n, p in module.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    run.parameters.update((name, whole(p)) for name, p in module.named_parameters())
    run.buffers.update((name, whole(b)) for name, b in module.named_buffers())
    return run


def whole(tensor: Tensor) -> Tensor:
    """A copy with the global value, of a DTensor or a plain tensor."""
    tensor = tensor.detach()
    if isinstance(tensor, torch.distributed.tensor.DTensor):
        tensor = tensor.full_tensor()
    return tensor.clone()


def compare(result: Run, reference: Run, tolerance: float = TOLERANCE, floor: float = FLOOR) -> float:
    """Fails with every tensor that differs, the worst first; otherwise the worst error as a part of its scale.

    The scale of a loss, parameter or buffer is its largest element (of a parameter at least `floor` of the norm of the
    gradients); that of a gradient is the global norm of the gradients of its step. Integers and booleans must be equal.
    """
    rows = [*_losses(result, reference), *_gradients(result, reference)]
    least = floor * max((_norm(g) for g in reference.gradients), default=0.0)
    rows += _tensors("parameter", result.parameters, reference.parameters, floor=least)
    rows += _tensors("buffer", result.buffers, reference.buffers)
    wrong = sorted((row for row in rows if not row.error <= tolerance), key=_Row.badness, reverse=True)
    if wrong:
        head = f"{len(wrong)} of {len(rows)} tensors differ by more than {tolerance:g} of their scale:"
        shown = [f"  {row.name}: {row.text}" for row in wrong[:20]]
        raise AssertionError("\n".join([head, *shown, *(["  ..."] if len(wrong) > 20 else [])]))
    return max((row.error for row in rows), default=0.0)


@dataclass(frozen=True)
class _Row:
    name: str
    error: float  # as a part of the scale; inf where the two cannot be compared
    text: str

    def badness(self) -> float:
        return self.error if self.error == self.error else float("inf")


def _losses(result: Run, reference: Run) -> list[_Row]:
    if len(result.losses) != len(reference.losses):
        text = f"{len(result.losses)} steps, reference has {len(reference.losses)}"
        return [_Row("losses", float("inf"), text)]
    pairs = zip(result.losses, reference.losses)
    return [_row(f"loss of step {step}", a, b, None) for step, (a, b) in enumerate(pairs)]


def _gradients(result: Run, reference: Run) -> list[_Row]:
    rows = []
    for step, (ours, theirs) in enumerate(zip(result.gradients, reference.gradients)):
        rows += _tensors(f"step {step}: gradient of", ours, theirs, _norm(theirs))
    return rows


def _norm(gradients: dict[str, Tensor | None]) -> float:
    """The global norm of the gradients of a step."""
    return sum(g.square().sum().item() for g in gradients.values() if g is not None) ** 0.5


def _tensors(
    kind: str, ours: dict[str, Any], theirs: dict[str, Any], scale: float | None = None, floor: float = 0.0
) -> list[_Row]:
    rows = [_Row(f"{kind} {name}", float("inf"), "not in the reference") for name in ours.keys() - theirs.keys()]
    rows += [_Row(f"{kind} {name}", float("inf"), "missing") for name in theirs.keys() - ours.keys()]
    return rows + [_row(f"{kind} {name}", ours[name], theirs[name], scale, floor) for name in theirs if name in ours]


def _row(name: str, ours: Tensor | None, theirs: Tensor | None, scale: float | None, floor: float = 0.0) -> _Row:
    if ours is None or theirs is None:
        text = "none" if ours is None else "there, where the reference has none"
        return _Row(name, 0.0 if ours is theirs else float("inf"), text)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        text = f"{ours.dtype} {list(ours.shape)}, reference {theirs.dtype} {list(theirs.shape)}"
        return _Row(name, float("inf"), text)
    if theirs.numel() == 0 or torch.equal(ours, theirs):
        return _Row(name, 0.0, "equal")
    if not theirs.is_floating_point():
        return _Row(name, float("inf"), f"{int((ours != theirs).sum())} of {theirs.numel()} elements differ")
    difference = (ours - theirs).abs()
    largest = difference.max().item()
    scale = max(theirs.abs().max().item(), floor) if scale is None else scale
    error = largest / scale if scale else float("inf")
    where = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)] if difference.dim() else []
    at = tuple(where)
    text = (
        f"off by {largest:.3e} = {error:.3e} of {scale:.3e}, at {where} of {list(theirs.shape)}: "
        f"{ours[at].item():.12g}, reference {theirs[at].item():.12g}"
    )
    return _Row(name, error, text)
