"""Random operators: kernel equals plain torch, slices equal the whole, statistics hold, captures are complete."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.utils.checkpoint import checkpoint

from shardwise.errors import CaptureError
from shardwise.pytorch import random as R
from shardwise.pytorch.random import generator, kernel
from shardwise.pytorch.random.state import positions

SEED = torch.tensor(20260101)
FLOATS = tuple(generator.UNIFORM_BITS)
RANGES = ((0, 2), (-5, 100), (3, 4), (0, 2**32), (0, 2**40), (-(2**63), 2**62), (-(2**63), 2**63 - 1))


def draws_of(pos, seed=SEED, stream=3, module=R):
    """Every operator once, from the operators (`module=R`) or from plain torch (`module=generator`)."""
    prefix = "random_" if module is R else ""
    get = lambda name: getattr(module, prefix + name)  # noqa: E731
    yield get("bits")(seed, stream, pos)
    for p in (0.0, 0.3, 1.0):
        yield get("bernoulli")(seed, stream, pos, p)
    for low, high in RANGES:
        yield get("integer")(seed, stream, pos, low, high)
    for dtype in FLOATS:
        for name in ("uniform", "normal", "exponential"):
            yield get(name)(seed, stream, pos, dtype)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Thousands of tiny parallel regions wait for each other on shared cores: ten times slower than one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def native():
    if not kernel.prepare():
        pytest.skip("no CPU kernel: no compiler, or SHARDWISE_NATIVE=0")


# ---- the kernel and plain torch


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (3, 0), (3, 5, 7), (513, 130), (70000, 2), (2, 1, 4, 1, 6)])
def test_kernel_equals_plain_torch(native, shape):
    pos = positions(shape)
    for drawn, expected in zip(draws_of(pos), draws_of(pos, module=generator), strict=True):
        assert drawn.shape == torch.Size(shape)
        assert drawn.dtype == expected.dtype
        assert torch.equal(drawn, expected)


def test_kernel_takes_any_broadcast_and_any_strides(native):
    whole = torch.arange(3 * 40 * 50).view(3, 40, 50)
    for pos in (
        [whole],
        [whole.permute(2, 0, 1)],
        [whole[:, ::3, 5:], torch.full((1, 1, 45), 10**12)],
        [torch.arange(0, 90, 3)[::2].view(-1, 1), torch.tensor([[2**62, -5, 7]])],
        [torch.tensor(2**63 - 1), torch.arange(5)],  # the sum wraps, as int64 does
    ):
        for drawn, expected in zip(draws_of(pos), draws_of(pos, module=generator), strict=True):
            assert torch.equal(drawn, expected)


def test_threads_do_not_change_the_numbers(native):
    pos, before = positions((300, 700)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = R.random_normal(SEED, 0, pos, torch.float64)
        torch.set_num_threads(2)
        assert torch.equal(one, R.random_normal(SEED, 0, pos, torch.float64))
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_plain_torch_draws(monkeypatch, tmp_path, caplog):
    expected = R.random_bits(SEED, 0, positions((40000,)))
    monkeypatch.setattr(kernel, "_function", None)
    monkeypatch.setattr(kernel, "_tried", False)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("SHARDWISE_NATIVE", "1")
    with caplog.at_level("WARNING", logger="shardwise"):
        for _ in range(2):
            assert torch.equal(R.random_bits(SEED, 0, positions((40000,))), expected)
    assert len([record for record in caplog.records if record.name == "shardwise"]) == 1


def test_ranks_build_the_kernel_once(native, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\n[ "$2" = "-MF" ] && echo built >> {tmp_path}/builds\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = os.environ | {"SHARDWISE_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    command = [sys.executable, "-c", "from shardwise.pytorch.random import prepare; assert prepare()"]
    ranks = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert (tmp_path / "builds").read_text() == "built\n"


def test_own_functions_are_accurate():
    x = torch.cat([torch.rand(20000, dtype=torch.float64), torch.logspace(-300, 300, 5001, dtype=torch.float64)])
    x = x[x > 0]
    expected = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(generator.log_positive(x), expected, rtol=3e-16, atol=0)
    expected = torch.tensor([math.sqrt(value) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(generator.square_root(x), expected, rtol=3e-16, atol=0)
    angle = torch.linspace(-math.pi / 4, math.pi / 4, 9999, dtype=torch.float64)
    torch.testing.assert_close(generator._sine(angle), angle.sin(), rtol=4e-16, atol=0)
    torch.testing.assert_close(generator._cosine(angle), angle.cos(), rtol=4e-16, atol=0)


def test_published_values():
    """squares64 against its definition in arithmetic on Python's integers."""
    mask = 2**64 - 1

    def rotate(x):
        return ((x >> 32) | (x << 32)) & mask

    key = int(generator.make_key(SEED, 5)) & mask
    assert key % 2 == 1
    for counter in (0, 1, 2**32, 123456789012345):
        x = y = counter * key & mask
        z = (y + key) & mask
        for addend in (y, z, y):
            x = rotate((x * x + addend) & mask)
        t = (x * x + z) & mask
        x = rotate(t)
        expected = t ^ (((x * x + y) & mask) >> 32)
        assert int(generator.bits(SEED, 5, [torch.tensor(counter)])) & mask == expected


# ---- elementwise over positions


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("index", ["low", "high", "interleaved", "picked", "one", "empty"])
@pytest.mark.parametrize("path", ["operator", "plain"])
def test_a_cut_of_the_positions_cuts_the_result(dim, index, path):
    shape = (6, 5, 9)
    size = shape[dim]
    pick = {
        "low": torch.arange(size // 2),
        "high": torch.arange(size // 2, size),
        "interleaved": torch.arange(1, size, 2),
        "picked": torch.tensor([size - 1, 0, 2]),
        "one": torch.tensor([3]),
        "empty": torch.tensor([], dtype=torch.int64),
    }[index]
    module = R if path == "operator" else generator
    pos = positions(shape)
    cut = [vector.index_select(dim, pick) if d == dim else vector for d, vector in enumerate(pos)]
    for whole, part in zip(draws_of(pos, module=module), draws_of(cut, module=module), strict=True):
        assert torch.equal(part, whole.index_select(dim, pick))


def test_operators_are_sound_for_torch():
    pos = positions((3, 4))
    for op in R.OPERATORS:
        assert not R.is_random(op)
    torch.library.opcheck(R.random_bits, (SEED, 0, pos))
    torch.library.opcheck(R.random_uniform, (SEED, 0, pos, torch.bfloat16))
    torch.library.opcheck(R.random_bernoulli, (SEED, 0, pos, 0.25))
    torch.library.opcheck(R.random_normal, (SEED, 0, pos, torch.float64))
    torch.library.opcheck(R.random_exponential, (SEED, 0, pos, torch.float16))
    torch.library.opcheck(R.random_integer, (SEED, 0, pos, -3, 9))
    meta = [vector.to("meta") for vector in pos]
    assert R.random_normal(SEED.to("meta"), 0, meta, torch.float32).shape == (3, 4)


def test_wrong_arguments_are_named():
    pos = positions((3,))
    with pytest.raises(ValueError, match="probability"):
        R.random_bernoulli(SEED, 0, pos, 1.5)
    with pytest.raises(ValueError, match="low < high"):
        R.random_integer(SEED, 0, pos, 3, 3)
    with pytest.raises(ValueError, match="float32"):
        R.random_normal(SEED, 0, pos, torch.complex64)
    with pytest.raises(ValueError, match="0-dim"):
        R.random_bits(SEED.view(1), 0, pos)
    with pytest.raises(ValueError, match="pos"):
        R.random_bits(SEED, 0, [])


# ---- statistics. Fixed seeds: a bound is five standard errors or more, so that a sound generator keeps it.

N = 200_000


def flat(n=N):
    return positions((n,))


def kolmogorov_smirnov(values, cdf):
    """sqrt(n) times the largest distance; above 1.95 with probability 1e-3 for a sound sample."""
    ordered = values.double().sort().values
    n = ordered.numel()
    expected = cdf(ordered)
    rank = torch.arange(n, dtype=torch.float64)
    distance = torch.maximum((expected - rank / n).abs().max(), ((rank + 1) / n - expected).abs().max())
    return float(distance) * math.sqrt(n)


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [0, 1, -7, 2**62])
def test_distributions(dtype, seed):
    seed = torch.tensor(seed)
    for draw, cdf, mean, variance in (
        (R.random_uniform, lambda x: x, 0.5, 1 / 12),
        (R.random_normal, normal_cdf, 0.0, 1.0),
        (R.random_exponential, lambda x: 1 - torch.exp(-x), 1.0, 1.0),
    ):
        values = draw(seed, 11, flat(), dtype).double()
        assert kolmogorov_smirnov(values, cdf) < 1.95
        assert abs(float(values.mean()) - mean) < 5 * math.sqrt(variance / N)
        assert abs(float(values.var()) - variance) < 5 * 3 * variance / math.sqrt(N)


def test_the_ends_of_the_distributions():
    for dtype in FLOATS:
        uniform = R.random_uniform(SEED, 0, flat(), dtype)
        assert uniform.min() >= 0
        assert uniform.max() < 1
        step = 2.0 ** generator.UNIFORM_BITS[dtype]
        assert torch.equal(uniform.double() * step, (uniform.double() * step).round())
        exponential = R.random_exponential(SEED, 0, flat(), dtype)
        assert exponential.min() > 0
        assert exponential.isfinite().all()
        assert R.random_normal(SEED, 0, flat(), dtype).isfinite().all()
    normal = R.random_normal(SEED, 0, flat(1_000_000), torch.float64)
    beyond = (normal.abs() > 3).double().mean()
    assert abs(float(beyond) - 0.0026998) < 5 * math.sqrt(0.0027 / 1e6)
    assert 4.3 < float(normal.abs().max()) < 6.77


def test_every_bit_is_fair_and_neighbours_are_independent():
    bits = R.random_bits(SEED, 0, flat())
    table = torch.stack([(bits >> bit) & 1 for bit in range(64)]).double() * 2 - 1  # [64, N]
    limit = 5.5 / math.sqrt(N)
    assert table.mean(1).abs().max() < limit
    assert (table @ table.T / N - torch.eye(64)).abs().max() < limit
    for step in (1, 2, 64, 1000, 1024):  # neighbours in a row, and one above the other
        assert ((table[:, :-step] * table[:, step:]).mean(1)).abs().max() < limit
    counts = torch.bincount((bits & 0xFF), minlength=256).double()
    chi_square = float(((counts - N / 256) ** 2 / (N / 256)).sum())
    assert 255 - 5 * math.sqrt(510) < chi_square < 255 + 5 * math.sqrt(510)


def test_seeds_and_streams_are_independent():
    """Neighbouring seeds and streams, and pairs (seed, stream) with one sum: no correlation, no repetition."""
    pairs = [(seed, stream) for seed in (0, 1, 2, 3, -1, 2**40) for stream in (0, 1, 2, 3, 500)]
    drawn = torch.stack([R.random_normal(torch.tensor(s), t, flat(40_000), torch.float64) for s, t in pairs])
    correlation = torch.corrcoef(drawn) - torch.eye(len(pairs))
    assert correlation.abs().max() < 5.5 / math.sqrt(40_000)
    shifted = torch.corrcoef(torch.cat([drawn[:, :-1], drawn[:, 1:]]))[: len(pairs), len(pairs) :]
    assert shifted.abs().max() < 5.5 / math.sqrt(40_000)
    bits = torch.cat([R.random_bits(torch.tensor(s), t, flat(40_000)) for s, t in pairs])
    assert bits.unique().numel() == bits.numel()


def test_one_position_over_seeds_streams_and_strides():
    """Seeds that count up, streams that count up, and positions far apart are sound sequences too."""
    place = torch.tensor(5)
    samples = {
        "seeds": generator.squares64(place, generator.make_key(torch.arange(N), 3)),
        "streams": torch.stack([generator.bits(SEED, stream, [place]) for stream in range(3000)]),
    }
    for power in (10, 20, 32, 40):
        samples[f"stride 2^{power}"] = generator.bits(SEED, 0, [torch.arange(100_000) << power])
    for name, bits in samples.items():
        limit = 5.5 / math.sqrt(bits.numel())
        table = torch.stack([(bits >> bit) & 1 for bit in range(64)]).double() * 2 - 1
        assert table.mean(1).abs().max() < limit, name
        assert (table[:, :-1] * table[:, 1:]).mean(1).abs().max() < limit, name
        unit = generator.shift_right(bits, 11).double() * 2.0**-53
        assert kolmogorov_smirnov(unit, lambda x: x) < 1.95, name


def test_bernoulli_and_integers():
    assert not R.random_bernoulli(SEED, 0, flat(), 0.0).any()
    assert R.random_bernoulli(SEED, 0, flat(), 1.0).all()
    for p in (1e-4, 0.1, 0.5, 0.9):
        share = float(R.random_bernoulli(SEED, 0, flat(), p).double().mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / N)
    for low, high in ((0, 7), (-3, 10)):
        drawn = R.random_integer(SEED, 0, flat(), low, high)
        counts = torch.bincount(drawn - low, minlength=high - low).double()
        assert counts.numel() == high - low
        mean = N / (high - low)
        assert (counts - mean).abs().max() < 5 * math.sqrt(mean)
    for low, high in RANGES:
        drawn = R.random_integer(SEED, 0, flat(), low, high)
        assert drawn.min() >= low
        assert drawn.max() < high
        unit = (drawn.double() - low) / (high - low)
        if high - low > 2**20:
            assert kolmogorov_smirnov(unit, lambda x: x) < 1.95


# ---- captures


class Seeded(nn.Module):
    """How a capture hands the seed in: one more argument, bound around the forward."""

    def __init__(self, model):
        super().__init__()
        self.model = model if isinstance(model, nn.Module) else Call(model)
        self.state = R.RandomState()

    def forward(self, seed, *args):
        with self.state.bind(seed):
            return self.model(*args)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def capture(model, *args):
    """The joint graph, and a function (seed, *args) -> first output, last gradient."""
    module = Seeded(model)
    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(
            stack, module, (torch.tensor(0), *args), decompositions=R.random_decompositions(module.state)
        )
        graph = joint.graph_module
    parameters = [p.detach() for p in module.parameters()]

    def run(seed, *args):
        tangents = [torch.ones(node.meta["val"].shape) for node in tangent_nodes(graph)]
        flat_args = [*parameters, seed, *(a.detach() for a in args)]
        leaves = torch.utils._pytree.tree_leaves(graph(flat_args, tangents))
        return leaves[0], leaves[-1]

    return graph, run


def tangent_nodes(graph):
    return [node for node in graph.graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")]


def own(graph):
    return [node for node in graph.graph.nodes if node.target in R.OPERATORS]


X = torch.randn(4, 6, 8, requires_grad=True)
IMAGE = torch.randn(2, 4, 8, 16, requires_grad=True)
HEADS = torch.randn(2, 4, 8, 16, requires_grad=True)


def vae(x):
    mean, spread = x.chunk(2, -1)
    return mean + torch.randn_like(spread) * torch.exp(0.5 * spread)


def attention(**options):
    return Call(lambda q: F.scaled_dot_product_attention(q, q, q, **options))


CASES = {
    "dropout": (nn.Dropout(0.3), (X,), 1),
    "dropout in place": (lambda x: F.dropout(x * 1, 0.3, True, True), (X,), 1),
    "dropout2d": (nn.Dropout2d(0.3), (IMAGE,), 1),
    "alpha dropout": (nn.AlphaDropout(0.3), (X,), 1),
    "feature alpha dropout": (nn.FeatureAlphaDropout(0.3), (IMAGE,), 1),
    "dropout in eval": (nn.Dropout(0.3).eval(), (X,), 0),
    "gumbel softmax": (lambda x: F.gumbel_softmax(x, hard=True), (X,), 1),
    "rand": (lambda x: x * torch.rand(4, 6, 8) + torch.rand(()), (X,), 2),
    "randn_like": (lambda x: x + torch.randn_like(x) + torch.rand_like(x), (X,), 2),
    "vae": (vae, (X,), 1),
    "multi-head attention": (nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), (X, X, X), 1),
    "attention": (attention(dropout_p=0.1), (HEADS,), 1),
    "causal attention": (attention(dropout_p=0.1, is_causal=True), (HEADS,), 1),
    "attention without dropout": (attention(), (HEADS,), 0),
    "encoder layer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (X,), 4),
    "rrelu": (lambda x: F.rrelu(x, training=True), (X,), 1),
    "lstm": (nn.LSTM(8, 8, 2, dropout=0.2), (X[:2],), 1),
    "gru": (nn.GRU(8, 4, 3, dropout=0.2, bidirectional=True), (X[:2],), 2),
    "rnn": (nn.RNN(8, 8, 2, dropout=0.2, batch_first=True), (X[:, :2],), 1),
    "normal": (lambda x: x * torch.normal(x.detach(), 1.0) + torch.normal(0.0, x.detach().abs()), (X,), 2),
    "normal by size": (lambda x: x * torch.normal(1.0, 2.0, (4, 6, 8)), (X,), 1),
    "randint": (lambda x: x * torch.randint(3, 9, (8,)) + torch.randint_like(x, 5), (X,), 2),
    "randperm": (lambda x: x[torch.randperm(4)], (X,), 1),
    "multinomial": (lambda x: x.sum() + torch.multinomial(x.detach()[0].abs(), 3).sum(), (X,), 1),
    "multinomial, replaced": (lambda x: x.sum() + torch.multinomial(x.detach()[0].abs(), 30, True).sum(), (X,), 1),
    "bernoulli": (lambda x: x * torch.bernoulli(x.detach().sigmoid()), (X,), 1),
    "bernoulli_": (lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()), (X,), 1),
    "uniform_": (lambda x: x * torch.empty_like(x).uniform_(-1, 2), (X,), 1),
    "normal_": (lambda x: x * torch.empty_like(x).normal_(1, 2), (X,), 1),
    "exponential_": (lambda x: x * torch.empty_like(x).exponential_(2.0), (X,), 1),
    "other fills": (
        lambda x: (
            x * torch.empty_like(x).geometric_(0.3) * torch.empty_like(x).cauchy_() + x.new_empty(3).log_normal_()[0]
        ),
        (X,),
        3,
    ),
    "random_": (
        lambda x: x * torch.empty_like(x).random_(1, 5) + x.new_empty(4, 1, 1, dtype=torch.int64).random_(),
        (X,),
        2,
    ),
    "checkpoint": (lambda x: checkpoint(lambda y: F.dropout(y, 0.1).sin(), x, use_reentrant=False), (X,), 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_captures_hold_no_random_operator_of_torch(name):
    model, args, count = CASES[name]
    graph, _ = capture(model, *args)
    left = [str(node.target) for node in graph.graph.nodes if R.draws(node.target, node.args, node.kwargs)]
    assert left == []
    nodes = own(graph)
    assert [node.args[1] for node in nodes] == list(range(count))  # the streams, in program order
    assert all(node.args[0].op == "placeholder" for node in nodes)  # the seed: an input, not a constant
    assert not graph.graph.find_nodes(op="get_attr")


def test_a_captured_program_draws_by_its_seed():
    x = torch.ones(40, 50)
    _, run = capture(lambda x: F.dropout(F.dropout(x, 0.5), 0.2), x.clone().requires_grad_())
    seed = torch.tensor(77)
    out, gradient = run(seed, x)
    pos = positions((40, 50))
    expected = R.random_bernoulli(seed, 0, pos, 0.5) * 2.0 * R.random_bernoulli(seed, 1, pos, 0.8) * 1.25
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(out, run(seed, x)[0])
    assert not torch.equal(out, run(torch.tensor(78), x)[0])


def eager(function, seed=5):
    """`function` with the decompositions applied as it runs."""
    state = R.RandomState()
    table = R.random_decompositions(state)

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return table.get(op, op)(*args, **(kwargs or {}))

    with Mode(), state.bind(torch.tensor(seed)):
        return function()


def test_dropout_statistics():
    x = torch.full((400, 500), 3.0)
    for p in (0.1, 0.5, 0.9):
        dropped, mask = eager(lambda p=p: torch.native_dropout(x, p, True))
        assert torch.equal(dropped != 0, mask)
        kept = float(mask.double().mean())
        assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel())
        torch.testing.assert_close(dropped[mask], torch.full((int(mask.sum()),), 3 / (1 - p)))
        rows, columns = mask.double().mean(1), mask.double().mean(0)
        assert rows.var() < 1.5 * p * (1 - p) / 500
        assert columns.var() < 1.5 * p * (1 - p) / 400
    assert not eager(lambda: torch.native_dropout(x, 1.0, True))[0].any()
    assert torch.equal(eager(lambda: torch.native_dropout(x, 0.0, True))[0], x)


def test_decomposed_distributions_equal_those_of_torch():
    """Two samples, ours and torch's, differ by no more than two of torch's would (two-sample KS below 1.95)."""
    n = 50_000
    empty = torch.empty(n)
    torch.manual_seed(3)
    for fill in (
        lambda: empty.clone().uniform_(-2, 3),
        lambda: empty.clone().normal_(1, 2),
        lambda: empty.clone().exponential_(3.0),
        lambda: empty.clone().geometric_(0.2),
        lambda: empty.clone().cauchy_(1, 2),
        lambda: empty.clone().log_normal_(0.5, 0.7),
        lambda: empty.clone().random_(3, 40),
        lambda: torch.randint(0, 1000, (n,)).float(),
        lambda: torch.normal(torch.full((n,), 2.0), 3.0),
        lambda: F.rrelu(torch.full((n,), -1.0), training=True),
        lambda: torch.multinomial(torch.tensor([0.0, 1, 2, 3, 4]), n, True).float(),
        lambda: torch.multinomial(torch.tensor([[0.0, 1, 2, 3]]).expand(n, 4), 2).float().flatten(),
        lambda: torch.multinomial(torch.tensor([[0.0, 1, 2, 3]]).expand(n, 4), 1).float().flatten(),
    ):
        ours, torchs = eager(fill), fill()
        assert ours.dtype == torchs.dtype
        assert ours.shape == torchs.shape
        points = torch.cat([ours, torchs]).sort().values
        apart = torch.searchsorted(ours.sort().values, points, right=True) - torch.searchsorted(
            torchs.sort().values, points, right=True
        )
        assert float(apart.abs().max()) / math.sqrt(2 * ours.numel()) < 1.95


def test_randperm_is_a_permutation():
    order = eager(lambda: torch.randperm(1000))
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert not torch.equal(order, eager(lambda: torch.randperm(1000), seed=6))


@pytest.mark.filterwarnings("ignore")
def test_stacked_layers_drop_as_torch_does():
    """With dropout 1 between the layers the second layer sees zeros, in torch's eager LSTM and in ours."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    for layer in (
        nn.LSTM(8, 8, 2, dropout=1.0, bidirectional=True),
        nn.LSTM(8, 8, 3, dropout=1.0, proj_size=4, batch_first=True),
        nn.GRU(8, 8, 3, dropout=1.0),
        nn.RNN(8, 8, 2, dropout=1.0, bias=False),
    ):
        for expected, ours in zip(
            torch.utils._pytree.tree_leaves(layer(x)),
            torch.utils._pytree.tree_leaves(eager(lambda layer=layer: layer(x))),
            strict=True,
        ):
            torch.testing.assert_close(ours, expected)
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2, 2, 1, 1])
        torch.testing.assert_close(
            eager(lambda layer=layer, packed=packed: layer(packed))[0].data, layer(packed)[0].data
        )


def test_a_generator_of_its_own_is_refused():
    own_generator = torch.Generator().manual_seed(1)
    for function in (
        lambda x: x * torch.rand(4, 6, 8, generator=own_generator),
        lambda x: x * torch.empty_like(x).bernoulli_(0.5, generator=own_generator),
        lambda x: x[torch.randperm(4, generator=own_generator)],
    ):
        with pytest.raises(CaptureError, match="generator"):
            eager(lambda function=function: function(X.detach()))


def test_a_missing_seed_and_a_complex_result_are_refused():
    with pytest.raises(CaptureError, match="before a seed was bound"):
        R.random_decompositions(R.RandomState())[torch.ops.aten.rand.default]([2])
    with pytest.raises(CaptureError, match="complex64"):
        eager(lambda: torch.randn(3, dtype=torch.complex64))


def test_random_operators_are_recognised():
    aten = torch.ops.aten
    for op in (aten.poisson.default, aten.binomial.default, aten.random.default, aten.rand.default, aten.bernoulli.p):
        assert R.is_random(op)
        assert R.draws(op)
    assert not R.is_random(aten.add.Tensor)
    assert not R.is_random(len)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert R.is_random(flash)
    assert not R.draws(flash, (X, X, X))
    assert R.draws(flash, (X, X, X, 0.1))
    assert R.draws(flash, (X, X, X), {"dropout_p": 0.1})
