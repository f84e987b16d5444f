"""Small models that plan in a moment, and clusters that make the planner split them. For tests of the run itself."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.cluster import Device, Level
from tests.equality import whole

ROWS, WIDTH, HIDDEN, CLASSES = 6, 12, 15, 7  # uneven at 2 and at 4 ranks


class Net(nn.Module):
    """Two layers, tied to nothing; returns the loss, and the logits where asked."""

    def __init__(self, tau: float = 1.0):
        super().__init__()
        self.tau = tau
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, y: Tensor, logits: bool = False):
        out = self.down(torch.tanh(self.norm(self.up(x)))) * self.tau
        loss = F.cross_entropy(out, y)
        return (loss, out) if logits else loss


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, a buffer, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor, y: Tensor):
        return F.cross_entropy(self.head(torch.tanh(self.up(self.embed(x) * self.scale + self.shift))), y)


class Normed(nn.Module):
    """BatchNorm, whose buffers change in training mode."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, y: Tensor):
        return F.cross_entropy(self.down(torch.relu(self.norm(self.up(x)))), y)


def make(kind: type[nn.Module] = Net, seed: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same model on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind().to(dtype)


def batch(step: int = 0, rows: int = ROWS, tokens: bool = False, dtype: torch.dtype = torch.float64):
    """The same batch on every call."""
    source = torch.Generator().manual_seed(100 + step)
    x = (
        torch.randint(CLASSES, (rows,), generator=source)
        if tokens
        else torch.randn(rows, WIDTH, generator=source, dtype=dtype)
    )
    return x, torch.randint(CLASSES, (rows,), generator=source)


def fast(world: int) -> sw.Cluster:
    """A cluster whose links cost nothing: every plan that splits the work is worth it."""
    device = Device("toy", {"float64": 1e9, "float32": 1e9, "bfloat16": 1e9, "float16": 1e9}, 1 << 34, 1e9, 1e-9)
    return sw.Cluster("fast", device, (Level("link", world, 1e-10, 1e15),), "test")


def sharded(module: nn.Module) -> dict[str, str]:
    """Wishes that cut every parameter along its first dim."""
    return {name: "S0" for name, p in module.named_parameters() if p.ndim and p.shape[0] > 1}


def parallel(module: nn.Module, world: int, example: tuple, every: bool = False, **options):
    """The module parallelized for the fast cluster; `every` cuts every parameter that is trained."""
    if every:
        options["constraints"] = {n: "S0" for n, p in module.named_parameters() if p.requires_grad and n != "unused"}
    options.setdefault("cluster", fast(world) if world > 1 else None)
    return sw.parallelize(module, example, **options)


def pair(world: int, kind: type[nn.Module] = Net, every: bool = False, tokens: bool = False, **options):
    """(plain model, parallelized model) of equal values."""
    plain = make(kind)
    return plain, parallel(copy.deepcopy(plain), world, batch(tokens=tokens), every, **options)


def same(ours: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    """Parameters, gradients and buffers are those of the plain model."""
    for name, theirs in [*plain.named_parameters(), *plain.named_buffers()]:
        mine = dict([*ours.named_parameters(), *ours.named_buffers()])[name]
        close(whole(mine), theirs.detach(), name, tolerance)
        if isinstance(theirs, nn.Parameter) and theirs.grad is not None:
            assert mine.grad is not None, f"{name} has no gradient"
            close(whole(mine.grad), theirs.grad, f"gradient of {name}", tolerance)


def close(ours: Tensor, theirs: Tensor, what: str = "", tolerance: float = 1e-12) -> None:
    """Equal up to the order of sums."""
    error = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
    scale = max(1e-30, theirs.double().abs().max().item()) if theirs.numel() else 1.0
    assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
    assert error <= tolerance * max(1.0, scale), f"{what}: off by {error:.3e} of {scale:.3e}"
