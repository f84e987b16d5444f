"""Random numbers do not depend on the plan: bit for bit those of one rank, on 2 and 4 ranks, whatever is cut."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import CaptureError
from tests.dist.pool import run_world
from tests.dist.roads import Road, planned
from tests.dist.toys import fast
from tests.equality import whole

ROWS, TIME, WIDTH = 6, 5, 14  # no dim is divided by 4
SEED = 5


class Draws(nn.Module):
    """Every kind of draw over [rows, time, width], returned as it is; the parameter makes them a training program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        share = (x.detach().abs() / 4).clamp(0.0625, 0.875)  # exact: sigmoid rounds by the place in a vector register
        return {
            "dropout": F.dropout(x * self.weight, 0.3),
            "dropout of features": F.dropout1d(x.detach() + 1, 0.4),
            "alpha dropout": F.alpha_dropout(x.detach(), 0.2, training=True),
            "rand_like": torch.rand_like(x),
            "randn_like": torch.randn_like(x),
            "randint_like": torch.randint_like(x, 1000),
            "bernoulli": torch.bernoulli(share),
            "exponential_": torch.empty_like(x).exponential_(),
            "normal": torch.normal(share, 2.0),
            "multinomial": torch.multinomial(share[:, 0], 4),
            "multinomial, replaced": torch.multinomial(share[:, 0], 9, replacement=True),
            "randperm": torch.randperm(x.shape[0]),
            "gumbel": F.gumbel_softmax(share, hard=True, dim=-1).argmax(-1),
            "rrelu": F.rrelu(x.detach(), training=True),
        }


def example() -> Tensor:
    return torch.randn(ROWS, TIME, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def drawn(module: nn.Module) -> list[dict[str, Tensor]]:
    """Two calls under one seed, the second of which draws other numbers; then the first again, by its seed."""
    found = []
    for seed in (SEED, None, SEED, SEED + 1):
        if seed is not None:
            torch.manual_seed(seed)
        out = module(example())
        found.append({name: whole(value + 0) for name, value in out.items()})
    return found


def build(kind: str, mesh: tuple[int, ...], seed: int) -> nn.Module:
    model = Draws()
    if kind in ("random", "batch"):
        return planned(Road("", kind, mesh, seed=seed), model, (example(),), {})
    dims = {"hidden": (2, 2), "time and hidden": (1, 2), "rows and hidden": (0, 2)}[kind]
    layout = ", ".join(f"S{d}" for d in dims[: len(mesh)])
    cluster = fast(torch.distributed.get_world_size())
    return sw.parallelize(model, (example(),), mesh=mesh, cluster=cluster, constraints={"input 0": f"[{layout}]"})


def masks(rank, world, kind, mesh, seed, expected):
    torch.manual_seed(1000 + rank)  # rank 0's state counts, whatever the others have
    ours = build(kind, mesh, seed)
    found = drawn(ours)
    for step, (mine, theirs) in enumerate(zip(found, expected)):
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), f"{name} of call {step} under {kind}:{seed} on {mesh}"
    program = ours._shardwise.first
    whole_size = {n.args[1]: n.results[0].numel for n in program.graph.nodes if n.op.startswith("shardwise.random_")}
    here = [n for n in program.phases.forward.nodes if n.op.startswith("shardwise.random_")]
    return sum(n.results[0].numel < whole_size[n.args[1]] for n in here), len(here)


@pytest.fixture(scope="module")
def one_rank():
    found = drawn(sw.parallelize(Draws(), (example(),)))
    for name, first in found[0].items():
        assert torch.equal(first, found[2][name]), f"{name}: torch.manual_seed governs"
        assert not torch.equal(first, found[1][name]), f"{name}: the next call draws anew"
        assert not torch.equal(first, found[3][name]), f"{name}: another seed draws other numbers"
    names = ["dropout", "rand_like", "randn_like", "exponential_"]
    assert len({found[0][n].flatten()[0].item() for n in names}) == len(names)
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [
        ((2,), ("batch", "hidden", "random:0", "random:1")),
        pytest.param((4,), ("batch", "hidden", "random:2"), marks=pytest.mark.full),
        ((2, 2), ("batch", "time and hidden", "rows and hidden", "random:3")),
    ],
    ids=lambda v: str(v) if isinstance(v[0], int) else "",
)
def test_every_draw_is_that_of_one_rank(one_rank, mesh, kinds):
    world = 1
    for n in mesh:
        world *= n
    for kind in kinds:
        name, _, seed = kind.partition(":")
        cut, draws = run_world(world, masks, name, mesh, int(seed or 0), one_rank)[0]
        assert draws >= 13 and cut >= draws // 2, f"{kind}: only {cut} of {draws} draws are of pieces"


# ---- recomputation


class Regions(nn.Module):
    """Dropout in a checkpointed region: where the mask is made again in backward, it shows in the gradient."""

    def __init__(self, use_checkpoint: bool = True) -> None:
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def region(h: Tensor) -> Tensor:
            return F.dropout(torch.exp(F.dropout(h * self.weight, 0.25)), 0.5)

        y = checkpoint(region, x, use_reentrant=False) if self.use_checkpoint else region(x)
        return y.sum(), y


def recomputed(rank, world, mesh, seed, expected):
    model = Regions()
    ours = planned(Road("", "random", mesh, seed=seed), model, (example().requires_grad_(),), {})
    backward = ours._shardwise.first.phases.backward
    again = [n.op for n in backward.nodes if n.op.startswith("shardwise.random_")]
    assert len(again) == 2, f"both masks are made again in backward, not saved: {again}"
    x = example().requires_grad_()
    torch.manual_seed(SEED)
    loss, y = ours(x)
    torch.rand(7)  # what the program draws again must not depend on torch's state in between
    loss.backward()
    kept = y.detach() + 0 != 0
    # y = mask2 * 2 * exp(mask1 * 4/3 * x): its gradient is 4/3 y where both masks keep, else zero.
    inside = x.grad != 0
    assert torch.equal(inside & ~kept, torch.zeros_like(kept)), "a gradient where forward dropped"
    torch.testing.assert_close(x.grad[inside], (y.detach() + 0)[inside] * 4 / 3, rtol=1e-12, atol=0)
    assert 0.6 < inside[kept].double().mean() < 0.9  # mask1 keeps 3 of 4
    torch.testing.assert_close(y.detach() + 0, expected[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, expected[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(whole(ours.weight.grad), expected[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mesh", [(2,), pytest.param((4,), marks=pytest.mark.full), (2, 2)], ids=str)
def test_a_checkpointed_region_draws_the_same_mask_again(mesh):
    world = 4 if len(mesh) == 2 else mesh[0]
    plain = sw.parallelize(Regions(use_checkpoint=False), (example().requires_grad_(),))
    x = example().requires_grad_()
    torch.manual_seed(SEED)
    loss, y = plain(x)
    loss.backward()
    run_world(world, recomputed, mesh, 0, (y.detach(), x.grad, plain.weight.grad))


class Twice(nn.Module):
    """Two forwards under one seed before one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * self.weight)


def interleaved(rank, world):
    """Each backward uses the mask of its own forward; eval draws nothing and does not move the seed."""
    ours = planned(Road("", "random", (world,), seed=1), Twice(), (example(),), {})
    torch.manual_seed(SEED)
    one, two = ours(example()), ours(example() * 3)
    mask_one, mask_two = (t.detach() + 0 != 0 for t in (one, two))
    assert not torch.equal(mask_one, mask_two)
    for loss, mask, scale in ((two, mask_two, 3), (one, mask_one, 1)):
        ours.weight.grad = None
        (loss + 0).sum().backward()
        expected = (example() * scale * mask * 2).sum((0, 1))
        torch.testing.assert_close(whole(ours.weight.grad), expected, rtol=1e-12, atol=1e-12)
    ours.eval()
    torch.testing.assert_close(ours(example()).detach() + 0, example(), rtol=0, atol=0)
    twin = copy.deepcopy(ours).train()
    torch.manual_seed(SEED)
    assert torch.equal(twin(example()).detach() + 0 != 0, mask_one)


def test_two_forwards_before_a_backward_keep_their_masks():
    run_world(2, interleaved)


# ---- what cannot be repeated


class Poisson(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.poisson(x.abs())).sum()


@torch.library.custom_op("toytest::hidden_noise", mutates_args=())
def hidden_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


hidden_noise.register_fake(torch.empty_like)
hidden_noise.register_autograd(lambda ctx, g: g)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return hidden_noise(self.linear(x)).sum()


def refused(rank, world):
    for kind, operator in ((Poisson, "aten.poisson"), (Hidden, "toytest.hidden_noise")):
        torch.manual_seed(3)
        with pytest.raises(CaptureError, match=rf"{operator}.*test_random\.py:\d+"):
            sw.parallelize(kind(), (example(),), cluster=fast(world))


def test_what_cannot_be_repeated_is_refused_on_every_rank():
    run_world(2, refused)
