"""State: dicts, checkpoints between worlds, models on the meta device."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.errors import InputError
from tests.dist.pool import run_world
from tests.dist.toys import WIDTH, Net, Normed, Tied, batch, close, make, pair, parallel, same
from tests.equality import whole


def state_dicts(rank, world):
    plain, ours = pair(world, Tied, every=True, tokens=True)
    other = make(Tied, seed=5)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(isinstance(v, DTensor) for v in ours.state_dict().values())
    # plain whole tensors
    assert str(ours.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    same(ours, other, 0.0)
    # its own kind
    ours.load_state_dict(parallel(make(Tied), world, batch(tokens=True)).state_dict())
    same(ours, plain, 0.0)
    # other shapes, missing and unexpected names are reported by torch
    wrong = other.state_dict()
    wrong["up.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for up.weight.*\[3, 3\].*\[12, 12\]"):
        ours.load_state_dict(wrong)
    part = {"up.weight": other.up.weight.detach(), "new": torch.zeros(1)}
    found = ours.load_state_dict(part, strict=False)
    assert found.unexpected_keys == ["new"] and "head.weight" in found.missing_keys
    close(whole(ours.up.weight), other.up.weight.detach(), "up.weight", 0.0)
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(part)
    # a submodule alone
    ours.up.load_state_dict(plain.up.state_dict())
    ours.load_state_dict(plain.state_dict(), assign=True)
    same(ours, plain, 0.0)
    assert isinstance(ours.up.weight, nn.Parameter)
    close(ours(*batch(tokens=True)).detach(), plain(*batch(tokens=True)).detach())
    # whole again
    full = sw.full_state_dict(ours)
    assert not any(isinstance(v, DTensor) for v in full.values())
    assert full["head.weight"].data_ptr() == full["embed.weight"].data_ptr()
    make(Tied, seed=9).load_state_dict(full)
    helper = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        close(helper["up.weight"], plain.up.weight.detach(), "helper", 0.0)
    set_model_state_dict(ours, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    same(ours, other, 0.0)
    # where tied parameters still are one
    assert ours.head.weight is not None and whole(ours.head.weight).equal(whole(ours.embed.weight))


def train(module, steps, optimizer, first=0, tokens=True):
    losses = []
    for step in range(first, first + steps):
        loss = module(*batch(step, tokens=tokens))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adam(module):
    return torch.optim.AdamW([p for n, p in module.named_parameters() if p.requires_grad and n != "unused"], lr=0.05)


def save(rank, world, path, shape):
    ours = parallel(make(Tied), world, batch(tokens=True), every=len(shape) == 1, mesh=shape)
    optimizer = adam(ours)
    train(ours, 3, optimizer)
    model, state = get_state_dict(ours, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=path)
    return train(ours, 2, optimizer, first=3)


def load(rank, world, path, shape):
    if shape is None:
        ours = make(Tied, seed=8)
    else:
        ours = parallel(make(Tied, seed=8), world, batch(tokens=True), every=len(shape) == 1, mesh=shape)
    optimizer = adam(ours)
    model, state = get_state_dict(ours, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=path)
    set_state_dict(ours, optimizer, model_state_dict=model, optim_state_dict=state)
    return train(ours, 2, optimizer, first=3)


def save_plain(rank, world, path):
    plain = make(Tied)
    optimizer = adam(plain)
    train(plain, 3, optimizer)
    model, state = get_state_dict(plain, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=path)
    return train(plain, 2, optimizer, first=3)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_between_worlds(tmp_path):
    """Saved on 4, on (2,2), on 1; loaded on each other: the next losses are those of the run that was saved."""
    expected = run_world(1, save_plain, str(tmp_path / "1"))[0]
    saved = {"4": (4, (4,)), "2x2": (4, (2, 2)), "2": (2, (2,))}
    for name, (world, shape) in saved.items():
        for losses in run_world(world, save, str(tmp_path / name), shape):
            assert losses == pytest.approx(expected, rel=1e-9), name
    plain, two, four, square = (1, None), (2, (2,)), (4, (4,)), (4, (2, 2))
    ways = {"4": (plain, two, square), "2x2": (plain, four), "2": (square,), "1": (two, four)}
    for name, targets in ways.items():
        for world, shape in targets:
            for losses in run_world(world, load, str(tmp_path / name), shape):
                assert losses == pytest.approx(expected, rel=1e-9), (name, world, shape)


class Deep(nn.Module):
    """Forty layers with nothing but their own reset_parameters."""

    def __init__(self, layers=40, width=128):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x).square().mean()


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x, y):
        return (self.up(x) * self.scale + self.shift).square().mean()


def meta(rank, world):
    """Values as one process makes them; never more than the local pieces and one layer at a time."""
    with torch.device("meta"):
        empty, small = Deep().double(), Normed().double()
    x = torch.randn(4, 128).double()
    torch.manual_seed(17 if rank == 0 else 18 + rank)  # rank 0's state counts
    constraints = {f"layers.{k}.weight": "S0" for k in range(40)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        ours = parallel(empty, world, (x,), constraints=constraints, mesh=(world,))
    assert ours is empty
    full = 40 * 128 * 129 * 8
    peak = running_peak(prof)
    assert peak < 0.75 * full, (peak, full)
    plain = Deep().double().to_empty(device="cpu")
    torch.manual_seed(17)
    for sub in plain.modules():
        if hasattr(sub, "reset_parameters"):
            sub.reset_parameters()
    same(ours, plain, 0.0)
    close(ours(x).detach(), plain(x).detach())
    loaded = parallel(small, world, batch(), every=True)
    reference = make(Normed)
    loaded.load_state_dict(reference.state_dict())
    close(loaded(*batch()).detach(), reference(*batch()).detach())


def running_peak(prof):
    """The largest running sum of allocations."""
    total = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def meta_without_values(rank, world):
    with torch.device("meta"):
        model = Custom().double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = parallel(model, world, batch())
    text = [str(w.message) for w in caught if "nothing initialises" in str(w.message)]
    assert len(text) == 1 and "scale" in text[0] and "shift" in text[0] and "up." not in text[0], text
    assert math.isnan(ours(*batch()).item())
    reference = make(Custom)
    ours.load_state_dict(reference.state_dict())
    close(ours(*batch()).detach(), reference(*batch()).detach())
    with torch.device("meta"):
        model = Custom().double()
        model.register_buffer("shift", torch.zeros(WIDTH).double(), persistent=False)
    with pytest.raises(InputError, match="shift is on the meta device"):
        parallel(model, world, batch())


def tied_meta(rank, world):
    with torch.device("meta"):
        model = Tied().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = parallel(model, world, batch(tokens=True), every=True)
    assert ours.head.weight is ours.embed.weight
    reference = make(Tied)
    ours.load_state_dict(reference.state_dict())
    close(ours(*batch(tokens=True)).detach(), reference(*batch(tokens=True)).detach())


def gradients_kept(rank, world):
    """Gradients gathered before parallelize go with their parameters."""
    plain, ours = make(Net), make(Net)
    for module in (plain, ours):
        module(*batch()).backward()
    ours = parallel(ours, world, batch(), every=True)
    same(ours, plain)
    plain(*batch(1)).backward()
    ours(*batch(1)).backward()
    same(ours, plain)


CHECKS = [state_dicts, meta, meta_without_values, tied_meta, gradients_kept]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_two_ranks(check):
    run_world(2, check)


@pytest.mark.parametrize("check", [state_dicts, meta], ids=lambda f: f.__name__)
def test_four_ranks(check):
    run_world(4, check)
