"""Networks on images, sequences and volumes that are cut in space, and their runs on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from tests.dist.roads import cluster_for
from tests.equality import Run, compare, train
from tests.models.case import Batch, draw


class Blocks(nn.Module):
    """Convolution, batch norm and pooling of 1 to 3 space dims; the loss compares with a target of the same shape."""

    def __init__(self, dims: int, strides: tuple[int, ...], kernels: tuple[int, ...], pool: str, padding: int | None):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        average = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1]
        largest = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1]
        layers: list[nn.Module] = []
        width = 3
        for k, (stride, kernel) in enumerate(zip(strides, kernels)):
            pad = kernel // 2 if padding is None else padding
            layers += [conv(width, 4 + k, kernel, stride, padding=pad, bias=k % 2 == 0), norm(4 + k), nn.ReLU()]
            width = 4 + k
        if pool == "avg":
            layers.append(average(2))
        elif pool == "max":
            layers.append(largest(3, 2, 1))
        self.body = nn.Sequential(*layers)
        self.last = conv(width, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.body(x))
        return F.mse_loss(y, y.detach().roll(1, 0) * 0.5 + 0.1)


@dataclass(frozen=True)
class Net:
    """A network and the sizes of its images."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    kernels: tuple[int, ...] = (3, 3)
    pool: str = "avg"
    padding: int | None = None
    rows: int = 2

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return Blocks(len(self.sizes), self.strides, self.kernels, self.pool, self.padding).double()

    def batch(self, step: int, rows: int) -> Batch:
        x = torch.randn(self.rows, 3, *self.sizes, generator=draw(step), dtype=torch.float64)
        return (x,), {}


def itself(loss: Any) -> Tensor:
    return loss


def reference(net: Net, steps: int = 5) -> Run:
    return train(net.build(), net.batch, itself, steps)


def travel(rank: int, world: int, net: Net, mesh: tuple[int, ...], layout: str, steps: int, ref: Run) -> dict:
    """Trains on this rank with the image cut as asked; fails where it differs. Returns what the plan does."""
    args, _ = net.batch(0, 0)
    wishes = {"input 0": layout}
    module = sw.parallelize(net.build(), args, mesh=mesh, cluster=cluster_for("fast", world), constraints=wishes)
    run = train(module, net.batch, itself, steps)
    error = compare(run, ref)
    programs = str(module._shardwise.first.forward_source) if hasattr(module._shardwise.first, "forward_source") else ""
    return {"error": error, "share": module.plan.flops_share, "source": programs}
