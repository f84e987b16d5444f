"""What a program cannot see, or must not be given: state outside of the module, draws that are not torch's, arguments
that share memory or hide tensors, parameters that change too early."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import os
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CaptureError, InputError, MismatchError
from shardwise.pytorch.agreement import checksum
from tests.dist.pool import run_world
from tests.dist.toys import close, fast, parallel
from tests.equality import whole

FACTOR = 1.0


def scaled_by_global(x):
    return x * FACTOR


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1.0


class Reader(nn.Module):
    """Reads one number from each place where user code keeps one."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.array = np.ones(3)
        self.slotted = Slotted()
        self.nested = {"a": [{"b": {"c": (1.0, {"d": 1.0})}}]}
        self.queue = collections.deque([1.0])

    def forward(self, x):
        out = scaled_by_global(self.up(x)) * self.factor * float(self.array[0]) * self.slotted.value
        return (out * self.nested["a"][0]["b"]["c"][1]["d"] * sum(self.queue)).square().mean()


LOGGER = logging.getLogger("tests.hidden")
STATISTICS: dict = {}


class Logs(nn.Module):
    """Holds a logger, which leads to all loggers, and uses a global one."""

    def __init__(self):
        super().__init__()
        self.up, self.logger = nn.Linear(6, 6), logging.getLogger("tests.hidden.module")

    def forward(self, x):
        LOGGER.debug("forward")
        STATISTICS["rank"] = os.environ.get("RANK")
        return self.up(x).square().mean()


def statistics(rank, world):
    """A global variable that differs between ranks, and does not matter."""
    STATISTICS["seen"] = rank
    torch.manual_seed(3)
    x = torch.ones(4, 6).double()
    ours = parallel(Logs().double(), world, (x,))
    first = float(ours(x).detach())
    STATISTICS["seen"] = 7 * rank
    assert float(ours(x).detach()) == first


def test_a_logger_makes_no_new_program():
    model, x = sw.parallelize(Logs(), (torch.ones(4, 6),)), torch.ones(4, 6)
    for k in range(3):
        logging.getLogger(f"tests.hidden.later{k}").setLevel(k)
        LOGGER.setLevel(10 + k)
        model.logger.setLevel(10 + k)
        model(x)
    assert len(model._shardwise.programs) == 1


def _set_global(model):
    global FACTOR
    FACTOR = 2.0


def _set_class(model):
    type(model).factor = 2.0


CHANGES = {
    "global": _set_global,
    "class": _set_class,
    "array": lambda m: m.array.fill(2.0),
    "slots": lambda m: setattr(m.slotted, "value", 2.0),
    "nested": lambda m: m.nested["a"][0]["b"]["c"][1].update(d=2.0),
    "queue": lambda m: m.queue.append(1.0),
}


def changes(rank, world):
    """After each change the loss is that of eager, four times as large."""
    global FACTOR
    x = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)
    torch.manual_seed(1)
    plain = Reader().double()
    ours = parallel(copy.deepcopy(plain), world, (x,), every=True)
    before = float(plain(x).detach())
    try:
        for k, (name, change) in enumerate(CHANGES.items(), 1):
            change(plain)
            if name not in ("global", "class"):
                change(ours)
            close(ours(x).detach(), plain(x).detach(), name)
            assert float(plain(x).detach()) == pytest.approx(before * 4**k), name
    finally:
        FACTOR, Reader.factor = 1.0, 1.0


def test_an_enclosing_variable_that_changes_makes_a_new_program():
    factor = 1.0

    class Encloses(Layer):
        def forward(self, x):
            return super().forward(x) * factor

    model, x = sw.parallelize(Encloses(), (torch.ones(4, 6),)), torch.ones(4, 6)
    before = float(model(x).detach())
    factor = 2.0
    assert float(model(x).detach()) == pytest.approx(2 * before)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


def early_steps(rank, world):
    """A parameter that backward needs and that changes before it: an error as in eager, and one rank's reaches all."""
    x = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)
    ours = sw.parallelize(
        Layer().double(), (x,), cluster=fast(world), constraints={"up.weight": "S1", "down.weight": "S1"}
    )
    loss = ours(x)
    loss.backward(retain_graph=True)
    torch.optim.SGD(ours.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="was changed in place between forward and backward"):
        loss.backward()
    loss = ours(x)
    if rank == 0:
        with torch.no_grad():
            whole_before = ours.down.weight.to_local().clone()
            ours.down.weight.add_(0)
            assert torch.equal(whole_before, ours.down.weight.to_local())
    with pytest.raises(RuntimeError if rank == 0 else MismatchError):
        loss.backward()
    loss = ours(x)
    loss.backward()


class Anchored(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x, anchors):
        return (self.up(x) @ anchors.t()).logsumexp(-1).mean()


def shared_inputs(rank, world):
    """A tensor that is as long as every rank's rows by chance: a warning, and a way to say that it holds none."""
    torch.manual_seed(2)
    plain = Anchored().double()
    rows, anchors = torch.randn(4 * world, 6).double(), torch.randn(4, 6).double()
    mine = rows[4 * rank : 4 * rank + 4]
    with pytest.warns(UserWarning, match="input 1 is the same on every rank"):
        sw.parallelize(copy.deepcopy(plain), (mine, anchors), cluster=fast(world), batch="local")
    ours = sw.parallelize(
        copy.deepcopy(plain), (mine, anchors), cluster=fast(world), batch="local", constraints={"input 1": "R"}
    )
    theirs = plain(rows, anchors)
    loss = ours(mine, anchors)
    close(loss.detach(), theirs.detach())
    loss.backward()
    theirs.backward()
    for name, parameter in plain.named_parameters():
        close(whole(dict(ours.named_parameters())[name].grad), parameter.grad, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sw.parallelize(Masked().double(), (mine, torch.ones(4, 6).double()), cluster=fast(world), batch="local")
    with pytest.raises(InputError, match="input 0, input 1 are taken as 4 rows"):
        sw.parallelize(Weighted().double(), (mine, torch.ones(4).double()), cluster=fast(world), batch="local")


class Masked(Layer):
    def forward(self, x, mask):
        return super().forward(x * mask)


class Weighted(Layer):
    def forward(self, x, weight):
        return nn.functional.cross_entropy(self.up(x)[:, :4], torch.arange(len(x)) % 4, weight=weight)


@pytest.mark.parametrize("check", [changes, early_steps, shared_inputs, statistics], ids=lambda f: f.__name__)
def test_two_ranks(check):
    run_world(2, check)


class Drops(nn.Module):
    """Drops its layer with a probability, by Python's or numpy's generator."""

    def __init__(self, probability: float, draw):
        super().__init__()
        self.layer, self.probability, self.draw = nn.Linear(6, 6), probability, draw

    def forward(self, x):
        return (self.layer(x) if self.draw() >= self.probability else x).square().mean()


def from_python():
    return random.random()


def from_numpy():
    return np.random.rand()


@pytest.mark.parametrize("draw", [from_python, from_numpy], ids=lambda f: f.__name__)
def test_draws_of_other_generators_are_refused_where_they_matter(draw):
    x = torch.ones(4, 6)
    with pytest.raises(CaptureError, match="Draw with torch"):
        for _ in range(8):  # a fair coin falls on one side five times in a row once in sixteen
            sw.plan(Drops(0.5, draw), (x,), mesh=(2,), cluster=fast(2))
    assert sw.plan(Drops(0.0, draw), (x,), mesh=(2,), cluster=fast(2)).nodes


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x, y):
        y.mul_(2)
        return (self.up(x) * y).square().mean()


def test_an_argument_that_is_written_may_not_share_memory_with_another():
    base = torch.ones(8, 6)
    model = sw.parallelize(Writes(), (base[:4], base[4:]))
    model(base[:4], base[4:])
    assert float(base[0, 0].detach()) == 1.0 and float(base[4, 0].detach()) == 2.0
    for pair in ((base, base), (base[:4], base[2:6])):
        with pytest.raises(CaptureError, match=r"shares memory with another \(tensors 0 and 1"):
            model(*pair)
    reads = sw.parallelize(Masked(), (torch.ones(4, 6), torch.ones(4, 6)))
    reads(base[:4], base[:4])


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class Takes(Layer):
    def forward(self, pair):
        return super().forward(pair.x + pair.y)


def test_arguments_that_hide_tensors_or_are_sparse_are_refused():
    with pytest.raises(InputError, match="a Pair that holds tensors.*register_dataclass"):
        sw.parallelize(Takes(), (Pair(torch.ones(4, 6), torch.ones(4, 6)),))
    with pytest.raises(InputError, match="torch.sparse_coo; give dense tensors"):
        sw.parallelize(Layer(), (torch.eye(6).to_sparse(),))
    embedding = nn.Embedding(5, 6, sparse=True)
    with pytest.raises(CaptureError, match="layout torch.sparse_coo, and planned programs are dense"):
        sw.parallelize(embedding, (torch.arange(4),))


def test_a_value_that_decides_is_refused_with_a_way_out():
    class Asks(Layer):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > 0 else x.mean()

    with pytest.raises(CaptureError, match=r"torch\.where"):
        sw.parallelize(Asks(), (torch.ones(4, 6),))


def test_a_hook_inside_is_named_where_it_runs_at_capture_only():
    model, seen = Layer(), []
    model.up.register_forward_hook(lambda module, args, out: seen.append(out))
    with pytest.warns(UserWarning, match="up has the hook.*runs when the model is captured"):
        sw.parallelize(model, (torch.ones(4, 6),))


def test_torch_compile_takes_a_parallelized_module_as_it_is():
    model, x = sw.parallelize(Layer(), (torch.ones(4, 6),)), torch.ones(4, 6)
    assert float(torch.compile(model)(x).detach()) == float(model(x).detach())


@pytest.mark.parametrize("shape", [(4000, 6), (3, 4, 4096), (1 << 15, 2), (7,)], ids=str)
def test_a_checksum_sees_every_column_and_every_place(shape):
    tensor = torch.randn(shape)
    found = {checksum([tensor])}
    for column in range(shape[-1] if len(shape) < 3 else 4):
        other = tensor.clone()
        other[..., column] += 100
        found.add(checksum([other]))
    one = tensor.clone()
    one.reshape(-1)[-1] += 1
    swapped = tensor.flip(0)
    found |= {checksum([one]), checksum([swapped])}
    columns = shape[-1] if len(shape) < 3 else 4
    assert len(found) == columns + 3
    assert checksum([tensor.clone()]) == checksum([tensor])
