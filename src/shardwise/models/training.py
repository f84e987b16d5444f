"""The training loop of the demo: what a user would write for one device, and nothing more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .gpt import GPT, demo_config
from .text import batches, stdlib_corpus


@dataclass(frozen=True)
class Recipe:
    """How the demo trains.

    Losses of a run are compared with those of another that adds in a different order, in fp32, so the recipe must not
    blow up rounding errors: the warm-up keeps AdamW's first steps, which depend on the signs of tiny gradients, small,
    and `eps` keeps gradients that are zero but for rounding (a key's bias under softmax) from being scaled up to ones.
    """

    steps: int = 100
    rows: int = 8
    block: int = 128
    learning_rate: float = 6e-4
    warmup: int = 20
    eps: float = 1e-6
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One step as it was: seconds of forward and backward, and of all with the optimizer."""

    number: int
    loss: float
    seconds: float
    whole_s: float


def demo_model(recipe: Recipe) -> GPT:
    """The same on every rank and in every run."""
    torch.manual_seed(recipe.seed)
    return GPT(demo_config())


def demo_batches(recipe: Recipe, steps: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of the standard library's source."""
    return batches(stdlib_corpus(), recipe.rows, recipe.block, steps or recipe.steps, recipe.seed)


def demo_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with torch's own betas and weight decay; fused, since its many small operators cost more than its work."""
    return torch.optim.AdamW(module.parameters(), lr=recipe.learning_rate, eps=recipe.eps, fused=True)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> Iterator[Step]:
    """Trains, step by step."""
    for number, (tokens, targets) in enumerate(demo_batches(recipe)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (number + 1) / recipe.warmup)
        start = time.perf_counter()
        loss = module(tokens, targets)
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        yield Step(number, value, middle - start, time.perf_counter() - start)
