"""What one entry of the catalogue is, and the registry that the other files fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

VOCAB = 61  # prime: no mesh divides it
WIDTH = 32
BLOCK = 12  # tokens a row: not a multiple of 8, and not the number of rows or heads

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Built(NamedTuple):
    module: nn.Module  # fp64, training mode, the same on every call
    make_batch: Callable[[int, int], Batch]  # (step, rows) -> (args, kwargs), the same on every call
    loss_from: Callable[[Any], Tensor]  # what the module returned -> scalar


@dataclass(frozen=True)
class Case:
    name: str
    construct: Callable[[], Built]
    rows: int = 8
    batch_dim: int = 0  # the dim of the tensor inputs that counts rows
    random: bool = False  # draws random numbers in forward
    notes: str = ""

    def build(self) -> Built:
        """A fresh module from a fixed seed; the caller's random state stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(20240)
            built = self.construct()
            return built._replace(module=built.module.double().train())

    def local_rows(self, batch: Batch, rows: int, rank: int, world: int) -> Batch:
        """This rank's rows, cut as torch.chunk cuts; inputs that do not count rows stay whole."""
        per_rank = -(-rows // world)
        start = min(rank * per_rank, rows)
        length = min(per_rank, rows - start)

        def cut(leaf: Any) -> Any:
            counts_rows = isinstance(leaf, Tensor) and leaf.dim() > self.batch_dim
            if counts_rows and leaf.shape[self.batch_dim] == rows:
                return leaf.narrow(self.batch_dim, start, length)
            return leaf

        return pytree.tree_map(cut, batch)


CASES: dict[str, Case] = {}


def case(**fields: Any) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Registers a function that builds a model under the function's own name."""

    def register(construct: Callable[[], Built]) -> Callable[[], Built]:
        name = construct.__name__
        assert name not in CASES, name
        CASES[name] = Case(name=name, construct=construct, **fields)
        return construct

    return register


def draw(step: int) -> torch.Generator:
    """The source of the numbers of one batch: depends on the step alone."""
    return torch.Generator().manual_seed(7_000 + step)


def tokens_and_targets(step: int, rows: int) -> Batch:
    window = torch.randint(VOCAB, (rows, BLOCK + 1), generator=draw(step))
    return (window[:, :-1].clone(), window[:, 1:].clone()), {}  # contiguous() of one row would share memory


def normal(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw(step), dtype=torch.float64)


def itself(outputs: Tensor) -> Tensor:
    """loss_from of a model that returns its loss."""
    return outputs
