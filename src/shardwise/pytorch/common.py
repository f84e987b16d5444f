"""Small modules whose operators are common: the rules of their programs are the book that ships with the package.

Sizes are chosen so that those that differ in a real model differ here: the keys of rules know which sizes are equal
and which are at most four, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ir.graph import Graph
from .capture import capture

ROWS = (1, 2, 8)
"""Rows of a batch: one, few (a size that keys keep) and many."""
WORDS, TOKENS, WIDTH, HEADS = 61, 12, 60, 6


class Block(nn.Module):
    """A transformer block, pre-norm, with a fused projection, and fused attention or plain."""

    def __init__(self, fused: bool, bias: bool = True, kv_heads: int = HEADS):
        super().__init__()
        self.fused, self.kv_heads = fused, kv_heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=bias), nn.LayerNorm(WIDTH, bias=bias)
        self.head = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * kv_heads * self.head, bias)
        self.out, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, 4 * WIDTH, bias), nn.Linear(4 * WIDTH, WIDTH, bias)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        sizes = [WIDTH, self.kv_heads * self.head, self.kv_heads * self.head]
        parts = self.qkv(self.norm1(x)).split(sizes, 2)
        q, k, v = (p.view(b, t, -1, self.head).transpose(1, 2) for p in parts)
        if self.kv_heads < HEADS:
            k, v = (p.repeat_interleave(HEADS // self.kv_heads, 1) for p in (k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = ((q @ k.transpose(-2, -1)) / self.head**0.5).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Embeddings, two blocks, a head and its cross-entropy."""

    def __init__(self, tied: bool, **block: bool | int):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(**block), Block(**block))  # type: ignore[arg-type]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.words(tokens) + self.places(places)))
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class Images(nn.Module):
    """Convolutions, every norm, pools, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU(), nn.AvgPool2d(2),
            nn.Conv2d(24, 24, 1, groups=24), nn.BatchNorm2d(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y, label_smoothing=0.1)


class Elementwise(nn.Module):
    """Activations, reductions and regression losses, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 40), nn.Linear(40, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        kinds: list[Callable[[Tensor], Tensor]] = [
            F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.leaky_relu, F.elu, F.hardtanh,
            lambda a: F.gelu(a, approximate="tanh"), lambda a: a.exp(), lambda a: a.abs().sqrt(), lambda a: a.sin(),
            lambda a: a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6), lambda a: a.clamp(-1, 1),
            lambda a: a / a.norm(dim=-1, keepdim=True), lambda a: a.log_softmax(-1), lambda a: a - a.mean(0),
            lambda a: a.cumsum(-1), lambda a: a.var(-1, keepdim=True) * a, lambda a: torch.where(a > 0, a, -a),
            lambda a: a.amax(-1, keepdim=True) + a, lambda a: torch.cat([a, -a], -1)[..., ::2].contiguous(),
        ]  # fmt: skip
        for kind in kinds:
            h = h + kind(h)
        out = self.second(h)
        return F.mse_loss(out, y) + F.l1_loss(out, y) + F.smooth_l1_loss(out, y) + (out - y).square().mean()


class Recurrent(nn.Module):
    """An LSTM over a few steps, and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 20, batch_first=True)
        self.gru = nn.GRU(20, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.gru(self.lstm(x)[0])[0][:, -1]), y)


def _programs(rows: int) -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    tokens = torch.zeros(rows, TOKENS, dtype=torch.int64)
    yield Language(False, fused=True), (tokens, tokens)
    yield Language(True, fused=False, bias=False), (tokens, tokens)
    yield Language(False, fused=True, kv_heads=2), (tokens, tokens)
    yield Language(False, fused=True).bfloat16(), (tokens, tokens)
    yield Elementwise(), (torch.zeros(rows, WIDTH), torch.zeros(rows, 5))
    yield Elementwise(), (torch.zeros(rows, TOKENS, WIDTH), torch.zeros(rows, TOKENS, 5))
    yield Images(), (torch.zeros(rows, 3, 20, 20), torch.zeros(rows, dtype=torch.int64))
    yield Recurrent(), (torch.zeros(rows, 7, WIDTH), torch.zeros(rows, 5))


def common_programs() -> list[Callable[[], Graph]]:
    """One function per program, trained or evaluated, that captures it."""

    def captured(rows: int, k: int, training: bool) -> Graph:
        module, args = list(_programs(rows))[k]
        return capture(module.train(training), args, training=training).graph

    kinds = len(list(_programs(1)))
    return [partial(captured, rows, k, train) for rows in ROWS for k in range(kinds) for train in (True, False)]


def common_graphs() -> Iterator[Graph]:
    """The programs as graphs."""
    for program in common_programs():
        yield program()
