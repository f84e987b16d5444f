"""Networks on images, sequences and volumes that are cut in space, and their runs on ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.ir.placement import R, Shard
from shardwise.pipeline import Request, distribute
from shardwise.plan.evaluate import Assignment, evaluate
from shardwise.plan.planner import Outcome, optimise
from shardwise.plan.problem import Problem, Vertex
from shardwise.plan.random_plan import choose_each, random_planner
from shardwise.pytorch.call import describe_example
from shardwise.pytorch.capture import capture
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


def space_planner(dims: tuple[int, ...], rank: int) -> Callable[[Problem], Outcome]:
    """Chooses strategies that cut tensors of this rank along dims[axis], wherever they can be cut so; ties go to the
    one that does least of the work."""

    def choose(problem: Problem) -> Outcome:
        def worth(vertex: Vertex, s: int) -> tuple[float, ...]:
            names = (*vertex.needs, *vertex.gives)
            layouts = (*vertex.need_layouts[s], *vertex.give_layouts[s])
            cut = other = 0
            for name, layout in zip(names, layouts):
                if name is None or layout is None:
                    continue
                images = len(problem.value(name).shape) == rank
                for axis, placement in enumerate(layout):
                    cut += images and placement == Shard(dims[axis])
                    other += placement != R and not (images and placement == Shard(dims[axis]))
            return -cut, other, vertex.shares[s] if vertex.shares else 1.0

        chosen = choose_each(problem, lambda v: min(range(len(v.seconds)), key=lambda s: worth(v, s)))
        assignment = Assignment(chosen, frozenset())
        evaluation = evaluate(problem, assignment)
        assert evaluation.seconds < float("inf")
        return Outcome(assignment, evaluation, 0.0, "space", len(chosen), 0)

    return choose


@dataclass(frozen=True)
class Arrival:
    """What became of a network on one rank."""

    error: float
    share: float
    """Part of the floating-point work that the busiest rank does."""
    operators: dict[str, int]
    """How often an operator of lowering occurs in the program of this rank."""


def travel(
    rank: int, world: int, net: Net, mesh: tuple[int, ...], dims: tuple[int, ...] | None, steps: int, ref: Run
) -> Arrival:
    """Trains on this rank with images cut along dims[axis] (None: as the planner likes, (): at random), and compares."""
    args, _ = net.batch(0, 0)
    module = net.build()
    call, rows = describe_example(module, args, {}, "global")
    device = torch.device("cpu")
    program = capture(module, *call.global_arguments(rows), device=device)
    choose = optimise if dims is None else space_planner(dims, len(net.sizes) + 2) if dims else random_planner(5)
    wishes = (("input 0", tuple(Shard(d) for d in dims)),) if dims else ()
    request = Request(cluster_for("fast", world), (mesh,), constraints=wishes, choose=choose, use_disk=True)
    ready = distribute(module, call, rows, program, request, None, device, "global")
    run = train(ready, net.batch, itself, steps)
    error = compare(run, ref)
    phases = ready._shardwise.first.phases
    nodes = [n for g in (phases.forward, phases.backward) if g is not None for n in g.nodes]
    counts = Counter(n.op for n in nodes if n.op.startswith(("comm.", "shard.")))
    return Arrival(error, ready.plan.flops_share, dict(counts))
