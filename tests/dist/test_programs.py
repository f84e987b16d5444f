"""When a call needs a program of its own, and what that costs."""

from __future__ import annotations

import copy
import logging
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.models.gpt import GPT, GPTConfig
from shardwise.pytorch.keys import module_key
from tests.dist.pool import run_world
from tests.dist.toys import Net, batch, close, make, pair, parallel, same


class Sequence(nn.Module):
    """Rows of any length: flattening them makes cuts whose unit is the length."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, x, y):
        h = torch.tanh(self.mix(self.embed(x)))
        return F.cross_entropy(self.head(h).view(-1, 11), y.view(-1))


def tokens(step, length, rows=4):
    source = torch.Generator().manual_seed(step)
    return tuple(torch.randint(11, (rows, length), generator=source) for _ in range(2))


def programs(module):
    return list(module._shardwise.programs.values())


def thirty_lengths(rank, world):
    plain = make(Sequence)
    ours = parallel(copy.deepcopy(plain), world, tokens(0, 3), every=True)
    fixed = [p.placements for p in ours.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(2, 32):
            for module in (plain, ours):
                module(*tokens(length, length)).backward()
    same(ours, plain)
    text = [str(w.message) for w in caught if "captured 20 times" in str(w.message)]
    assert len(text) == 1, text
    assert len(programs(ours)) == 30
    assert [p.placements for p in ours.parameters()] == fixed
    solved = [p.plan.status for p in programs(ours)]
    assert solved.count("reused") >= 28, solved
    assert all(p.plan.flops_share <= 0.6 for p in programs(ours)), [p.plan.flops_share for p in programs(ours)]


def short_batch(rank, world):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("shardwise")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        plain, ours = pair(world, Net, every=True)
        for rows in (6, 5, 1, 6, 5):
            for module in (plain, ours):
                module(*batch(rows, rows=rows)).backward()
        same(ours, plain)
    finally:
        log.removeHandler(handler)
    lines = [r for r in records if "capturing and planning program" in r]
    assert len(lines) == 2 and "program 2, for inputs [5, 12], [5]" in lines[0], records


def attributes(rank, world):
    plain, ours = pair(world, Net)
    for tau in (2.0, 3.0, 2.0, 2, True, 1.0):
        for module in (plain, ours):
            module.tau = tau
        close(ours(*batch()).detach(), plain(*batch()).detach(), str(tau))
    assert len(programs(ours)) == 5  # 1.0 was there already; 2.0, 3.0, 2, True
    for module in (plain, ours):
        module.norm.eps = 0.5
    close(ours(*batch()).detach(), plain(*batch()).detach(), "eps")
    for module in (plain, ours):
        module.tau = torch.tensor(0.5).double()
    close(ours(*batch()).detach(), plain(*batch()).detach(), "a tensor")
    for module in (plain, ours):
        module.tau.fill_(4.0)
    close(ours(*batch()).detach(), plain(*batch()).detach(), "the tensor changed in place")
    before = len(programs(ours))
    ours(*batch())
    assert len(programs(ours)) == before


class Config:
    def __init__(self):
        self.scale, self.nested = 1.0, {"power": [1, 2]}


class Configured(Net):
    """Reads a config object and functions, as models of other people do."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.act = torch.tanh

    def forward(self, x, y, *, how=None, table=None):
        out = self.act(self.down(self.up(x))) * self.config.scale
        if how is not None:
            out = out ** how["power"]
        if table is not None:
            out = out * table[0]
        return F.cross_entropy(out ** self.config.nested["power"][0], y)


def objects(rank, world):
    plain, ours = pair(world, Configured)

    def both(**kwargs):
        close(ours(*batch(), **kwargs).detach(), plain(*batch(), **kwargs).detach(), str(kwargs))

    both()
    for module in (plain, ours):
        module.config.scale = 0.5
    both()
    for module in (plain, ours):
        module.config.nested["power"][0] = 3
    both()
    for module in (plain, ours):
        module.act = torch.sigmoid
    both()
    both(how={"power": 2})
    both(how={"power": 3})
    both(table=(2.0, "a"))
    both(table=(torch.tensor(2.0).double(), "a"))
    both(table=(torch.tensor(3.0).double(), "a"))
    assert len(programs(ours)) == 8


def torch_flags(rank, world):
    plain = make(Net, dtype=torch.float32)
    ours = parallel(copy.deepcopy(plain), world, batch(dtype=torch.float32))
    inputs = batch(dtype=torch.float32)
    for module in (plain, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(*inputs)
        loss.backward()
    close(whole_grad(ours), whole_grad(plain), "autocast", 0.02)
    assert len(programs(ours)) == 2
    torch.use_deterministic_algorithms(True)
    try:
        ours(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(programs(ours)) == 3
    ours(inputs[0].t().contiguous().t(), inputs[1])  # strides alone need no program
    assert len(programs(ours)) == 3
    with torch.no_grad():
        ours.eval()(*inputs)
        ours.train()


def whole_grad(module):
    grad = module.up.weight.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def inference_first(rank, world):
    """The example is captured for training where gradients are on, whatever mode the module is in."""
    plain = make(Net)
    ours = parallel(copy.deepcopy(plain).eval(), world, batch())
    assert ours._shardwise.first.backward is not None
    with torch.no_grad():
        close(ours(*batch()), plain(*batch()))
    for module in (plain, ours):
        module.train()
        module(*batch()).backward()
    same(ours, plain)
    with torch.no_grad():
        served = parallel(copy.deepcopy(plain).eval(), world, batch())
        assert served._shardwise.first.backward is None
        close(served(*batch()), plain(*batch()))
    served(*batch(1)).backward()


CHECKS = [thirty_lengths, short_batch, attributes, objects, torch_flags, inference_first]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_two_ranks(check):
    run_world(2, check)


def test_a_full_key_costs_little_more_than_reading_every_attribute():
    """It is made in every step. Beside a plain loop over the same, in turns, since machines differ and are busy."""
    model = GPT(GPTConfig(n_layer=10, n_embd=24, n_head=2))
    assert len(list(model.modules())) >= 113

    def read():
        for sub in model.modules():
            for table in (sub.__dict__, sub._parameters, sub._buffers):
                repr([(key, type(value).__qualname__) for key, value in table.items()])

    times: dict[str, list[float]] = {"key": [], "read": []}
    for _ in range(30):
        for name, run in (("key", lambda: module_key(model)), ("read", read)):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    ratio = min(times["key"]) / min(times["read"])
    assert ratio < 1, f"{ratio:.2f}"
