"""The parallelized module is the user's own: names, modes, hooks, copies, and every way of calling and training it."""

from __future__ import annotations

import copy
import io
import inspect

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._dynamo_utils import _annotate_modules_for_dynamo
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.errors import InputError, UnsupportedError
from tests.dist.pool import run_world
from tests.dist.toys import Net, Normed, Tied, batch, close, make, pair, parallel, same
from tests.equality import whole


def names(rank, world):
    plain = make(Tied)
    keep = plain.up
    ours = parallel(copy.deepcopy(plain), world, batch(tokens=True), every=True)
    assert isinstance(ours, Tied) and type(ours).__name__ == "Tied" and type(ours).__module__ == Tied.__module__
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert inspect.signature(ours.forward) == inspect.signature(plain.forward)
    assert ours.head.weight is ours.embed.weight and not ours.scale.requires_grad
    assert all(isinstance(t, DTensor) for t in [*ours.parameters(), *ours.buffers()])
    assert all(isinstance(p, nn.Parameter) for p in ours.parameters())
    assert type(ours.up) is nn.Linear and keep.in_features == ours.up.in_features
    assert str(ours.plan).startswith("Plan")
    split = [n for n, p in ours.named_parameters() if any(x.is_shard() for x in p.placements)]
    assert "embed.weight" in split and "up.weight" in split, split
    assert ours.plan.flops_share <= (0.6 if world == 2 else 0.35), ours.plan.flops_share


def trains(rank, world):
    """SGD with momentum, accumulation, a scheduler and clipping, on tied, frozen and unused parameters."""
    plain, ours = pair(world, Tied, every=True, tokens=True)
    loops = []
    for module, clip in ((plain, nn.utils.clip_grad_norm_), (ours, nn.utils.clip_grad_norm_)):
        optimizer = torch.optim.SGD(
            [{"params": [module.up.weight, module.up.bias], "lr": 0.2}, {"params": [module.embed.weight]}],
            lr=0.1,
            momentum=0.9,
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        losses = []
        for step in range(3):
            for part in range(2):
                loss = module(*batch(2 * step + part, tokens=True)) / 2
                loss.backward()
                losses.append(loss.detach())
            norm = clip(module.parameters(), 0.05)
            losses.append(whole(norm))
            optimizer.step()
            scheduler.step()
            if step < 2:
                optimizer.zero_grad(set_to_none=step == 0)
        loops.append(losses)
    for a, b in zip(*loops):
        close(b, a, "loss or norm")
    same(ours, plain)
    assert ours.unused.grad is None and ours.scale.grad is None


def own_clip(rank, world):
    for norm_type in (2.0, 1.0, float("inf")):
        plain, ours = pair(world, Net)
        for module in (plain, ours):
            module(*batch()).backward()
        theirs = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
        mine = sw.clip_grad_norm_(ours.parameters(), 0.01, norm_type)
        close(mine, theirs, f"norm {norm_type}")
        same(ours, plain)


def graphs(rank, world):
    """Two forwards before one backward, retain_graph, part of the outputs, create_graph."""
    plain, ours = pair(world, Net)
    for module in (plain, ours):
        one, two = module(*batch(0)), module(*batch(1))
        (one * two).backward(retain_graph=True)
        (one + two).backward()
        loss, logits = module(*batch(2), logits=True)
        logits.square().mean().backward()
        del loss
    same(ours, plain)
    loss, logits = ours(*batch(2), logits=True)
    theirs = plain(*batch(2), logits=True)
    close(logits, theirs[1])
    assert logits.tolist() and "tensor" in repr(logits) and logits.detach().numpy().shape == logits.shape
    assert torch.nn.functional.mse_loss(logits, torch.zeros(logits.shape).double()) > 0
    assert (logits.argmax(-1) == batch(2)[1]).shape == (6,)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(loss, list(ours.parameters()), create_graph=True, allow_unused=True)


def input_gradients(rank, world):
    plain, ours = pair(world, Net)
    x, y = batch()
    grads = []
    for module in (plain, ours):
        leaf = x.clone().requires_grad_()
        (module(leaf * 2, y) * 3).backward()
        grads.append(leaf.grad)
    close(grads[1], grads[0])
    same(ours, plain)


class Big(nn.Module):
    """Outputs of more than 64 KiB, which lie in pieces until they are used."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 1500)

    def forward(self, x, y):
        out = torch.tanh(self.up(x))
        return out.square().mean(), out


def large_outputs(rank, world):
    plain = make(Big)
    ours = parallel(copy.deepcopy(plain), world, batch(), every=True)
    kinds = dict((p, x) for k, p, x in ours.plan.outputs if k == "output")
    assert any(str(x[0]).startswith("S") for x in kinds.values()), kinds
    for module in (plain, ours):
        loss, out = module(*batch())
        loss.backward()
        assert out.shape == (6, 1500) and out.requires_grad
    same(ours, plain)
    for module in (plain, ours):
        loss, out = module(*batch(1))
        (loss + out.sin().sum() + (out * out).mean()).backward()
    same(ours, plain)
    with torch.no_grad():
        theirs, mine = plain(*batch(2))[1], ours(*batch(2))[1]
    assert not mine.requires_grad and mine.detach().numpy().shape == (6, 1500)
    close(mine + 0, theirs)
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    buffer.seek(0)
    close(torch.load(buffer), theirs)


def modes(rank, world):
    plain, ours = pair(world, Normed, every=True)
    for step, mode in enumerate(["train", "eval", "no_grad", "train", "frozen", "inference", "train"]):
        found = []
        for module in (plain, ours):
            module.train(mode != "eval")
            module.norm.train(mode not in ("frozen", "eval"))
            if mode == "no_grad":
                with torch.no_grad():
                    found.append(module(*batch(step)))
            elif mode == "inference":
                with torch.inference_mode():
                    found.append(module(*batch(step)).clone())
            else:
                loss = module(*batch(step))
                loss.backward()
                found.append(loss.detach())
        close(found[1], found[0], mode)
        assert found[1].requires_grad == found[0].requires_grad
        same(ours, plain)
    before = len(ours._shardwise.programs)
    ours.train()(*batch(9))
    assert len(ours._shardwise.programs) == before


def frozen_later(rank, world):
    plain, ours = pair(world, Net)
    for module in (plain, ours):
        module(*batch()).backward()
        module.zero_grad()
        module.up.requires_grad_(False)
        module(*batch(1)).backward()
        assert module.up.weight.grad is None
    same(ours, plain)
    for module in (plain, ours):
        module.requires_grad_(False)
        assert not module(*batch(2)).requires_grad
        module.requires_grad_(True)
        module(*batch(3)).backward()
    same(ours, plain)


def hooks(rank, world):
    """Those of the module itself run around the program; those of a submodule are part of it."""
    plain = make(Net)
    plain.down.register_forward_hook(double_it)
    ours = parallel(copy.deepcopy(plain), world, batch())
    seen = []
    for module in (plain, ours):
        module.register_forward_pre_hook(lambda m, args: (args[0] + 1, args[1]))
        module.register_forward_hook(lambda m, args, out: out * 2)
        module.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].item()))
        handle = module.up.register_forward_hook(double_it)
        module(*batch()).backward()
        handle.remove()
        module(*batch(1)).backward()
    assert seen == [1, 1, 1, 1]
    same(ours, plain)
    ours.down.weight.register_hook(lambda g: g * 0)
    ours.zero_grad()
    ours(*batch()).backward()
    assert whole(ours.down.weight.grad).abs().sum() == 0 and whole(ours.down.bias.grad).abs().sum() > 0


def double_it(module, args, out):
    return out * 2


def copies(rank, world):
    plain, ours = pair(world, Net, every=True)
    twin = copy.deepcopy(ours)
    programs = len(ours._shardwise.programs)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    ours(*batch()).backward()
    optimizer.step()
    same(twin, plain)
    plain(*batch()).backward()
    twin(*batch()).backward()
    same(twin, plain)
    assert len(twin._shardwise.programs) == programs, "the copy shares what is captured"
    again = copy.deepcopy(twin)  # with gradients, which may lie inside a buffer
    same(again, plain)
    assert again.up.weight.grad is not twin.up.weight.grad and list(again.state_dict()) == list(plain.state_dict())
    twin.zero_grad(set_to_none=False)
    same(again, plain)
    assert isinstance(twin, Net) and twin.up.weight.to_local().data_ptr() != ours.up.weight.to_local().data_ptr()


def saved(rank, world):
    plain, ours = pair(world, Tied, every=True, tokens=True)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded) is Tied and not isinstance(loaded.up.weight, DTensor)
    assert loaded.head.weight is loaded.embed.weight and not loaded.up._forward_pre_hooks
    same(loaded, plain, 0.0)
    close(loaded(*batch(tokens=True)), plain(*batch(tokens=True)))
    again = parallel(loaded, world, batch(tokens=True))
    close(again(*batch(tokens=True)).detach(), plain(*batch(tokens=True)).detach())


def dtypes(rank, world):
    for convert, tolerance in ((lambda m: m.float(), 1e-5), (lambda m: m.to(torch.bfloat16), 0.05)):
        plain, ours = pair(world, Net, every=True)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        convert(plain)
        assert convert(ours) is ours
        dtype = plain.up.weight.dtype
        losses = [m(*batch(dtype=dtype)) for m in (plain, ours)]
        close(losses[1].detach(), losses[0].detach(), str(dtype), tolerance)
        losses[1].backward()
        optimizer.step()
        assert ours.up.weight.dtype == dtype and ours.up.weight.grad.dtype == dtype
    with pytest.raises(UnsupportedError, match="cannot be moved"):
        ours.to("meta")
    with pytest.raises(UnsupportedError, match="cannot be moved"):
        ours.to_empty(device="meta")


def refusals(rank, world):
    plain, ours = pair(world, Net)
    with pytest.raises(UnsupportedError, match="cannot be called alone"):
        ours.up(batch()[0])
    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        DistributedDataParallel(ours)
    with pytest.raises(InputError, match="already"):
        parallel(ours, world, batch())
    with pytest.raises(InputError, match="\\.module"):
        parallel(DistributedDataParallel(plain), world, batch())
    with pytest.raises(UnsupportedError, match="DTensor"):
        ours(ours.up.weight.detach(), batch()[1])
    old = ours.up.weight
    ours.up.weight = nn.Parameter(torch.zeros(15, 12).double())
    with pytest.raises(InputError, match=r"up\.weight was replaced"):
        ours(*batch())
    ours.up.weight = old
    close(ours(*batch()).detach(), plain(*batch()).detach())


def wrappers(rank, world):
    """Every other parallelism refuses, or is refused, before it changes anything; the module works on."""
    plain, ours = pair(world, Net, every=True)
    before = {n: (p.placements, p.to_local().data_ptr()) for n, p in ours.named_parameters()}
    for wrap in (
        fully_shard,
        replicate,
        lambda m: fully_shard(m.up),
        lambda m: _annotate_modules_for_dynamo(m, set(), True),  # FullyShardedDataParallel, which wants an accelerator
        DistributedDataParallel,
    ):
        with pytest.raises(UnsupportedError, match=r"parallelized module"):
            wrap(ours)
    after = {n: (p.placements, p.to_local().data_ptr()) for n, p in ours.named_parameters()}
    assert after == before and type(ours) is not Net and isinstance(ours, Net)
    for module in (plain, ours, copy.deepcopy(ours)):
        module(*batch()).backward()
    same(ours, plain)
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(InputError, match="DTensor already"):
        parallel(fully_shard(make(Net), mesh=mesh), world, batch())


CHECKS = [
    names, trains, own_clip, graphs, input_gradients, large_outputs, modes, frozen_later, hooks, copies, saved, dtypes,
    refusals, wrappers,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_two_ranks(check):
    run_world(2, check)


@pytest.mark.parametrize("check", [names, trains, modes, large_outputs, copies, saved], ids=lambda f: f.__name__)
def test_four_ranks(check):
    run_world(4, check)
