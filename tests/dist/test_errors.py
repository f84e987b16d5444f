"""Bad input and ranks that do not agree: an error on every rank that says what, where and what to try; never a hang."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import (
    CaptureError,
    ClusterFileError,
    ConstraintError,
    InputError,
    MemoryLimitError,
    MismatchError,
    ShardwiseError,
    UnsupportedError,
)
from tests.dist.pool import run_world
from tests.dist.toys import Net, batch, close, fast, make, pair, parallel, same

ROOT = Path(__file__).parents[2]


def fails(kind, text, work):
    """`work` raises `kind` with `text` in its message."""
    with pytest.raises(kind, match=text):
        work()


class Reads(nn.Module):
    """Needs a value of a tensor to go on."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 12)

    def forward(self, x, y):
        out = self.up(x)
        if out.sum() > 0:  # the line that cannot be captured
            out = out * 2
        return out.mean()


def arguments(rank, world):
    """Every argument of parallelize and plan."""
    model, example = make(Net), batch()

    def call(example=example, module=model, **options):
        options.setdefault("cluster", fast(world))
        return lambda: sw.parallelize(module, example, **options)

    fails(InputError, "expected a torch.nn.Module, got function", call(module=lambda x: x))
    fails(InputError, "expected a torch.nn.Module, got type", call(module=Net))
    fails(InputError, "example: expected a tuple of positional arguments, got Tensor", call(example=example[0]))
    fails(InputError, r"does not fit.*forward\(.*missing a required argument: 'y'", call(example=example[:1]))
    fails(InputError, "does not fit.*unexpected keyword argument", call(example_kwargs={"z": 1}))
    fails(InputError, "example_kwargs: expected a dictionary", call(example_kwargs=[1]))
    fails(
        InputError,
        "rejects the example.*test_errors|rejects the example",
        call(example=(example[0][:, :5], example[1])),
    )
    fails(InputError, r"mesh \(3,\) has 3 devices but 2 ranks", call(mesh=(3,)))
    fails(InputError, "mesh: expected a DeviceMesh", call(mesh="two"))
    fails(InputError, "the product must be 2", call(mesh=()))
    fails(InputError, "describes 4 devices but 2 ranks", call(cluster=fast(4)))
    fails(ClusterFileError, "nowhere", call(cluster="nowhere.toml"))
    fails(InputError, "cluster: expected", call(cluster=7))
    for wrong in ("forty", "-1GiB", 0, -3, 1.5, "10 apples", True):
        fails(InputError, "memory_limit: expected bytes or a size such as '40GiB'", call(memory_limit=wrong))
    fails(MemoryLimitError, "the least that would do", call(memory_limit="1KiB"))
    fails(InputError, "the model has no 'up.wieght'; try up.weight", call(constraints={"up.wieght": "S0"}))
    fails(InputError, "not a placement: 'X0'", call(constraints={"up.weight": "X0"}))
    fails(InputError, "has 2 axes, the mesh has 1", call(constraints={"up.weight": "[S0, R]"}))
    fails(ConstraintError, "up.weight cannot be placed as S7", call(constraints={"up.weight": "S7"}))
    fails(InputError, "constraints: expected a dictionary", call(constraints=["up.weight"]))
    fails(InputError, "batch: expected 'global' or 'local', got 'mine'", call(batch="mine"))
    fails(InputError, "overlap: expected True, False or 'bitwise', got 'yes'", call(overlap="yes"))
    fails(InputError, "progress: expected a function", call(progress=3))
    fails(InputError, "has a forward of its own instance", call(module=own_forward()))
    fails(InputError, "no shape yet", call(module=nn.LazyLinear(3), example=(example[0],)))
    fails(InputError, "has hooks", call(module=hooked()))
    fails(InputError, "has a backward hook", call(module=backward_hooked()))
    fails(CaptureError, r"Reads cannot be captured.*test_errors.py:\d+ in forward", call(module=make(Reads)))
    assert not any(hasattr(p, "placements") for p in model.parameters()), "the model is as it was"
    model(*example).backward()
    ours = call()()
    close(ours(*example).detach(), make(Net)(*example).detach())


def own_forward():
    model = make(Net)
    model.forward = lambda x, y: x.sum()
    return model


def hooked():
    model = make(Net)
    model.up.weight.register_hook(lambda g: g)
    return model


def backward_hooked():
    model = make(Net)
    model.up.register_full_backward_hook(lambda m, a, b: None)
    return model


def different_models(rank, world):
    kinds = [Net, Reads]
    fails(MismatchError, "class of the module differs", lambda: parallel(make(kinds[rank]), world, batch()))
    fails(
        MismatchError, r"up.weight differs between rank 0 and rank 1", lambda: parallel(make(seed=rank), world, batch())
    )
    model = make(Net)
    model.tau = 1.0 + rank
    fails(MismatchError, "the captured model differs between ranks", lambda: parallel(model, world, batch()))
    fails(MismatchError, "the captured model differs", lambda: parallel(make(Net), world, batch(rows=6 + rank)))
    wrong = batch() if rank else batch()[:1]
    fails(InputError if rank == 0 else MismatchError, "fit|rank 0 failed while", lambda: parallel(make(), world, wrong))
    fails(
        InputError if rank else MismatchError,
        "mesh|differ",
        lambda: parallel(make(), world, batch(), mesh=(world + rank,)),
    )


def different_calls(rank, world):
    """Each on all ranks, and the module works on afterwards."""
    plain, ours = pair(world, Net, every=True)

    def good():
        close(ours(*batch()).detach(), plain(*batch()).detach())

    good()
    fails(MismatchError, "rank 1 differs from rank 0: in the arguments.*same batch", lambda: ours(*batch(rows=6 + rank)))
    good()
    fails(MismatchError, "rank 1 differs from rank 0: in the values of the tensors", lambda: ours(*batch(step=rank)))
    good()
    x, y = batch()
    fails(MismatchError, "in the values", lambda: ours(x.flip(0) if rank else x, y))
    fails(MismatchError, "in the arguments", lambda: ours(x, y, logits=bool(rank)))
    ours.tau = 1.0 + rank
    fails(MismatchError, "rank 1 differs from rank 0: in the state of the module", lambda: ours(*batch()))
    ours.tau = 1.0
    good()
    ours.norm.train(rank == 0)
    fails(MismatchError, "in the state of the module", lambda: ours(*batch()))
    ours.norm.train()
    with torch.set_grad_enabled(rank == 0):
        fails(MismatchError, "in the arguments", lambda: ours(*batch()))
    good()
    # a rank that raises before it comes to the others
    bad = object() if rank == 0 else batch()[1]
    fails(Exception, "rank 0 raised an error|", lambda: ours(batch()[0], bad))
    fails(
        InputError if rank == 0 else MismatchError,
        "meta|rank 0 raised an error in this call",
        lambda: ours(*(t.to("meta") if rank == 0 else t for t in batch())),
    )
    good()
    # one that cannot capture a new program
    fails((MismatchError, InputError, CaptureError), "", lambda: ours(batch()[0][:, :3], batch()[1]))
    good()


def local_rows(rank, world):
    """Uneven rows in batch mode "local": 5 and 1, 6 and 0, then one row less."""
    plain = make(Net)
    shares = {2: [(3, 3), (5, 1), (6, 0), (1, 4), (3, 3)], 4: [(2, 2, 2, 0), (1, 1, 1, 3), (0, 0, 5, 1)]}[world]
    ours = None
    for step, share in enumerate(shares):
        x, y = batch(step, rows=sum(share))
        low = sum(share[:rank])
        mine = (x[low : low + share[rank]], y[low : low + share[rank]])
        if ours is None:
            ours = parallel(copy.deepcopy(plain), world, mine, batch="local")
            assert ours.plan.flops_share <= (0.6 if world == 2 else 0.35)
        theirs = plain(x, y)
        found = ours(*mine)
        close(found.detach(), theirs.detach(), str(share))
        theirs.backward()
        found.backward()
    same(ours, plain)


def local_gradients(rank, world):
    """Gradients of the rows that a rank brings, with respect to the mean over the rows of all."""
    plain = make(Net)
    x, y = batch(rows=2 * world)
    rows = slice(2 * rank, 2 * rank + 2)
    mine = x[rows].clone().requires_grad_()
    ours = parallel(copy.deepcopy(plain), world, (mine, y[rows]), batch="local")
    assert ours.plan.flops_share <= (0.6 if world == 2 else 0.35)
    for step in range(2):
        whole_x = (x + step).requires_grad_()
        mine = (x[rows] + step).requires_grad_()
        for module, inputs in ((plain, (whole_x, y)), (ours, (mine, y[rows]))):
            loss, out = module(*inputs, logits=True)
            (loss + 0.1 * out.square().mean()).backward()
        assert out.shape == (2 * world, 7), "outputs have the rows of all"
        close(mine.grad, whole_x.grad[rows], f"step {step}")
    same(ours, plain)
    # The gradient of something computed before the module, from this rank's rows alone.
    before = nn.Linear(12, 12).double()
    with torch.no_grad():
        before.weight.copy_(torch.eye(12) * 2)
        before.bias.zero_()
    ours(before(x[rows]), y[rows]).backward()
    leaf = (x * 2).requires_grad_()
    plain(leaf, y).backward()
    close(before.bias.grad, leaf.grad[rows].sum(0), "a layer in front")
    few = (x[: 1 if rank == 0 else 3].clone().requires_grad_(), y[: 1 if rank == 0 else 3])
    if world == 2:
        fails(UnsupportedError, "inputs that require gradients", lambda: ours(*few))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 12)

    def forward(self, x, y, scale):
        return (self.up(x) * scale).square().mean() + y.double().mean()


def local_others(rank, world):
    """What is no batch must be the same on all ranks, also where it is as long as one rank's rows."""
    plain = make(Masked)
    scale = torch.linspace(0, 1, 12).double()
    x, y = batch(rows=14)
    mine = (x[:12], y[:12]) if rank == 0 else (x[12:], y[12:])
    ours = parallel(copy.deepcopy(plain), world, (*mine, scale), batch="local")
    close(ours(*mine, scale).detach(), plain(x, y, scale).detach())
    fails(MismatchError, "in the values", lambda: ours(*mine, scale + rank))


def caches(rank, world, folder):
    """Damaged and unwritable caches cost a warning and time, never the run."""
    os.environ["SHARDWISE_CACHE"] = folder
    plain = make(Net)
    ours = parallel(copy.deepcopy(plain), world, batch())
    close(ours(*batch()).detach(), plain(*batch()).detach())
    dist.barrier()
    if rank == 0:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                path.write_bytes(b"\x00broken" + path.read_bytes()[7:100])
    dist.barrier()
    ours = parallel(copy.deepcopy(plain), world, batch())
    close(ours(*batch()).detach(), plain(*batch()).detach())
    os.environ["SHARDWISE_CACHE"] = "/proc/nowhere"
    ours = parallel(copy.deepcopy(plain), world, batch(rows=7))
    close(ours(*batch(rows=7)).detach(), plain(*batch(rows=7)).detach())


CHECKS = [arguments, different_models, different_calls, local_rows, local_gradients, local_others]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_two_ranks(check):
    run_world(2, check)


def test_four_ranks():
    run_world(4, local_rows)
    run_world(4, local_gradients)


def test_broken_caches(tmp_path):
    before = os.environ.get("SHARDWISE_CACHE")
    try:
        run_world(2, caches, str(tmp_path))
    finally:
        run_world(2, restore, before)


def restore(rank, world, before):
    os.environ.pop("SHARDWISE_CACHE", None)
    if before is not None:
        os.environ["SHARDWISE_CACHE"] = before


DIES = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import shardwise as sw
from tests.dist.toys import Net, batch, make, parallel
torch.set_num_threads(1)
rank, folder, when = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
dist.init_process_group("gloo", timeout=timedelta(seconds=10))
ours = parallel(make(Net), 2, batch(), every=True)
optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
for step in range(6):
    loss = ours(*batch(step))
    if step == 3:
        start = time.monotonic()
        if rank == 1 and when == "stops":
            break
        if rank == 1:
            if when == "hangs":
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        if step == 2:
            dcp.save(ours.state_dict(), checkpoint_id=folder)
            torch.save(sw.full_state_dict(ours), f"{folder}.{rank}.pt")
    except sw.errors.LostRankError as error:
        print("LOST", round(time.monotonic() - start, 1), error, flush=True)
        os._exit(7)
"""


@pytest.mark.parametrize("when", ["dies", "hangs", "stops"])
def test_a_rank_that_ends_mid_step(tmp_path, when):
    """The other ends with an error within the group's timeout, and the checkpoint is whole."""
    folder = tmp_path / "checkpoint"
    with __import__("socket").socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        command = [sys.executable, "-c", DIES, str(folder), when]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        text, _ = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == 7 and "LOST" in text, text
    assert "last checkpoint" in text and "rank 0 lost contact to another rank while" in text
    assert float(text.split("LOST ")[1].split()[0]) < (5 if when == "dies" else 25)
    import torch.distributed.checkpoint as dcp

    model = make(Net, seed=4)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(folder))
    expected = torch.load(f"{folder}.0.pt")
    assert all(torch.equal(state[k], expected[k]) for k in state)


def test_one_process_without_a_group():
    """The same program on plain parameters."""
    plain, ours = pair(1, Net)
    assert not dist.is_initialized()
    optimizers = [torch.optim.Adam(m.parameters(), fused=True) for m in (plain, ours)]
    for step in range(3):
        for module, optimizer in zip((plain, ours), optimizers):
            module(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    same(ours, plain)
    assert type(ours.up.weight) is nn.Parameter
    twin = copy.deepcopy(ours)
    close(twin(*batch()).detach(), plain(*batch()).detach())
    ours.load_state_dict(make(Net, seed=8).state_dict())
    with pytest.raises(ShardwiseError, match="cannot be called alone"):
        ours.up(batch()[0])


def world_of_one(rank, world):
    plain, ours = pair(1, Net)
    assert hasattr(ours.up.weight, "placements")
    for module in (plain, ours):
        optimizer = torch.optim.AdamW(module.parameters())
        for step in range(3):
            module(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    same(ours, plain)
    close(sw.clip_grad_norm_(ours, 1.0), torch.tensor(0.0))


def test_a_group_of_one():
    run_world(1, world_of_one)
