"""Every entry of the table of decompositions equals the operator it replaces, in fp64, and so does torch's own."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.ir.graph import Literal, Ref
from shardwise.ir.runner import Call, TensorMeta
from shardwise.ir.verify import verify
from shardwise.pytorch.decompose import decompose
from shardwise.pytorch.decompositions import TABLE
from tests.graphs import RUNNER, run_graph

TOLERANCE = 1e-12
"""fp64; sums in another order."""


def f(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float64")


def i(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "int64")


A, B, C, D, E, G, H = (Ref(str(k)) for k in range(7))
F64 = Literal("dtype", "float64")


def _batch_norm_calls() -> list[Call]:
    found = []
    for shape in ((6, 5), (1, 3), (4, 3, 5), (2, 5, 4, 3)):
        c = f(shape[1])
        x = f(*shape)
        op = "aten._native_batch_norm_legit_functional.default"
        if shape != (1, 3):
            found.append(Call(op, (x, c, c, c, c), (A, B, C, D, E, True, 0.1, 1e-5)))
            found.append(Call(op, (x, c, c), (A, None, None, B, C, True, 0.3, 1e-3)))
        found.append(Call("aten._native_batch_norm_legit.no_stats", (x, c, c), (A, B, C, True, 0.1, 1e-5)))
        op = "aten._native_batch_norm_legit_no_training.default"
        found.append(Call(op, (x, c, c, c, c), (A, B, C, D, E, 0.1, 1e-5)))
        found.append(Call(op, (x, c, c), (A, None, None, B, C, 0.1, 1e-5)))
        op = "aten.native_batch_norm_backward.default"
        for mask in ((True, True, True), (True, False, False), (False, True, True)):
            seven = (x, x, c, c, c, c, c)
            found.append(Call(op, seven, (A, B, C, D, E, G, H, True, 1e-5, mask)))
            found.append(Call(op, (x, x, c, c, c), (A, B, C, D, E, None, None, False, 1e-5, mask)))
        found.append(Call(op, (x, x, c, c), (A, B, None, None, None, C, D, True, 1e-5, (True, False, False))))
    return found


def _norm_calls() -> list[Call]:
    found = []
    for shape, normed in (((6, 5), (5,)), ((2, 3, 4, 5), (4, 5)), ((5,), (5,))):
        x, w = f(*shape), f(*normed)
        stat = f(*shape[: len(shape) - len(normed)], *[1] * len(normed))
        found.append(Call("aten.native_layer_norm.default", (x, w, w), (A, normed, B, C, 1e-5)))
        found.append(Call("aten.native_layer_norm.default", (x,), (A, normed, None, None, 1e-5)))
        op = "aten.native_layer_norm_backward.default"
        for mask in ((True, True, True), (True, False, False), (False, True, False)):
            found.append(Call(op, (x, x, stat, stat, w, w), (A, B, normed, C, D, E, G, mask)))
        found.append(Call(op, (x, x, stat, stat), (A, B, normed, C, D, None, None, (True, False, False))))
    for shape, groups in (((2, 6, 5), 3), ((3, 4, 2, 5), 2), ((2, 4), 4)):
        n, c = shape[:2]
        hw = int(np.prod(shape[2:]))
        x, w, stat = f(*shape), f(c), f(n, groups)
        found.append(Call("aten.native_group_norm.default", (x, w, w), (A, B, C, n, c, hw, groups, 1e-5)))
        found.append(Call("aten.native_group_norm.default", (x,), (A, None, None, n, c, hw, groups, 1e-5)))
        op = "aten.native_group_norm_backward.default"
        for mask in ((True, True, True), (True, False, False)):
            found.append(Call(op, (x, x, stat, stat, w), (A, B, C, D, E, n, c, hw, groups, mask)))
    return found


def _loss_calls() -> list[Call]:
    found = []
    for x, target, name in ((f(6, 5), i(6), ""), (f(5), i(), ""), (f(2, 5, 3, 4), i(2, 3, 4), "2d")):
        for reduction in (0, 1, 2):
            for ignore in (-100, 2):
                scalar = f() if reduction or not target.shape else target
                grad = TensorMeta(scalar.shape, "float64")
                forward, backward = f"aten.nll_loss{name}_forward.default", f"aten.nll_loss{name}_backward.default"
                found.append(Call(forward, (x, target), (A, B, None, reduction, ignore)))
                found.append(Call(forward, (x, target, f(5)), (A, B, C, reduction, ignore)))
                found.append(Call(backward, (grad, x, target, f()), (A, B, C, None, reduction, ignore, D)))
                found.append(Call(backward, (grad, x, target, f(5), f()), (A, B, C, D, reduction, ignore, E)))
    return found


def _softmax_calls() -> list[Call]:
    found = []
    for shape, dim in (((4, 5), 1), ((4, 5, 3), 1), ((5,), 0), ((2, 3), -1)):
        x = f(*shape)
        for name in ("_softmax", "_log_softmax"):
            found.append(Call(f"aten.{name}.default", (x,), (A, dim, False)))
            found.append(Call(f"aten.{name}_backward_data.default", (x, x), (A, B, dim, F64)))
        for keepdim in (False, True):
            found.append(Call("aten.logsumexp.default", (x,), (A, (dim,), keepdim)))
    return found


def _mean_calls() -> list[Call]:
    x = f(4, 3, 5)
    found = [Call("aten.mean.default", (x,), (A,)), Call("aten.mean.dim", (x,), (A, None, True))]
    found += [Call("aten.mean.default", (i(4),), (A,), (("dtype", F64),))]
    for dims in ((1,), (0, -1), (-2,)):
        for keepdim in (False, True):
            found.append(Call("aten.mean.dim", (x,), (A, dims, keepdim)))
            for name in ("var", "std", "var_mean", "std_mean"):
                for correction in (None, 0, 2.5):
                    kwargs = (("correction", correction), ("keepdim", keepdim))
                    found.append(Call(f"aten.{name}.correction", (x,), (A, dims), kwargs))
    return found


def _convolution_calls() -> list[Call]:
    found = []
    for dims in (1, 2, 3):
        grad, x, weight = f(2, 6, *(4,) * dims), f(2, 4, *(8,) * dims), f(6, 2, *(3,) * dims)
        settings = ((2,) * dims, (1,) * dims, (1,) * dims, False, (0,) * dims, 2)
        for mask in ((True, True, True), (False, True, True), (True, False, True)):
            found.append(
                Call("aten.convolution_backward.default", (grad, x, weight), (A, B, C, (6,), *settings, mask))
            )
    return found


def _pooling_calls() -> list[Call]:
    found = []
    for op, x, pools in (
        ("max_pool2d", f(2, 3, 7, 8), [((3, 3), (2, 2), (1, 1), (1, 1), False), ((2, 3), (), (0, 1), (2, 1), True)]),
        (
            "max_pool3d",
            f(2, 3, 5, 6, 7),
            [((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), False), ((3,), (2,), (1,), (1,), True)],
        ),
    ):
        for pool in pools:
            forward = Call(f"aten.{op}_with_indices.default", (x,), (A, *pool))
            found.append(forward)
            grad = RUNNER.meta(forward)[0]
            found.append(Call(f"aten.{op}_with_indices_backward.default", (grad, x, i(*grad.shape)), (A, B, *pool, C)))
    found.append(Call("aten.max_pool2d_with_indices.default", (f(2, 7, 8),), (A, (2, 2))))
    return found


def _embedding_calls() -> list[Call]:
    op = "aten.embedding_dense_backward.default"
    backward = [Call(op, (f(2, 6, 3), i(2, 6)), (A, B, 5, padding, False)) for padding in (0, 3)]
    return [*backward, Call("aten.embedding.default", (f(5, 3), i(2, 6)), (A, B, 2))]


OURS = [
    *_batch_norm_calls(), *_norm_calls(), *_loss_calls(), *_softmax_calls(), *_mean_calls(), *_embedding_calls(),
    *_convolution_calls(), *_pooling_calls(),
]  # fmt: skip
TORCHS = [
    Call("aten.mse_loss.default", (f(4, 3), f(4, 3)), (A, B)),
    Call("aten.mse_loss_backward.default", (f(), f(4, 3), f(4, 3)), (A, B, C, 1)),
    Call("aten.binary_cross_entropy_with_logits.default", (f(4, 3), f(4, 3)), (A, B)),
    Call("aten.smooth_l1_loss_backward.default", (f(), f(4, 3), f(4, 3)), (A, B, C, 1, 1.0)),
    Call("aten.linalg_vector_norm.default", (f(4, 3),), (A, 2.0, (1,))),
]


def _inputs(call: Call, seed: int) -> list[np.ndarray]:
    """Labels in [0, 5), some of them the ignored 2; positive floats where a variance or a count is wanted; the
    positions of the largest elements where backward wants those."""
    rng = np.random.default_rng(seed)
    if "pool" in call.op and "backward" in call.op:
        grad, x = (rng.standard_normal(m.shape) for m in call.operands[:2])
        forward = Call(call.op.replace("_backward", ""), call.operands[1:2], (A, *call.args[2:-1]))
        return [grad, x, RUNNER.run(forward, [x])[1]]
    return [
        rng.integers(0, 5, m.shape) if m.dtype == "int64" else rng.uniform(0.3, 2.0, m.shape) * rng.choice([-1, 1])
        for m in call.operands
    ]


def _positive(call: Call, inputs: list[np.ndarray]) -> list[np.ndarray]:
    first = call.operands[0].shape
    return [np.abs(a) if m.shape != first and m.dtype == "float64" else a for m, a in zip(call.operands, inputs)]


def _is_masked(call: Call) -> bool:
    """Whether an output mask leaves out a result, whatever the operator then returns in its place."""
    return isinstance(call.args[-1], tuple) and False in call.args[-1]


@pytest.mark.parametrize("call", [*OURS, *TORCHS], ids=lambda c: f"{c.op}{[m.shape for m in c.operands]}{c.args[1:]}")
def test_equals_the_operator(call: Call) -> None:
    graph = decompose(call)
    assert graph is not None
    verify(graph)
    assert all(node.op != call.op for node in graph.nodes) or "embedding" in call.op or "convolution" in call.op
    for seed in range(3):
        inputs = _inputs(call, seed) if "pool" in call.op else _positive(call, _inputs(call, seed))
        for got, want in zip(run_graph(graph, inputs), RUNNER.run(call, inputs), strict=True):
            assert got is not None or want is None or _is_masked(call)
            if want is not None and got is not None:
                assert got.shape == want.shape and got.dtype == want.dtype
                scale = np.abs(want[np.isfinite(want)]).max(initial=1.0)
                np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * scale)


def test_every_entry_is_tested() -> None:
    assert {call.op for call in OURS} == set(TABLE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes_of_results(dtype: str) -> None:
    x = TensorMeta((8, 6), dtype)
    for call in (Call("aten._log_softmax.default", (x,), (A, 1, False)), Call("aten.mean.dim", (x,), (A, (1,)))):
        graph = decompose(call)
        assert graph is not None
        metas = [TensorMeta(graph.values[o.name].shape, graph.values[o.name].dtype) for o in graph.outputs if o.name]
        assert tuple(metas) == RUNNER.meta(call)


def test_counts_stay_numbers() -> None:
    """The count of a mean is an argument, not a size that would shrink with a piece."""
    graph = decompose(Call("aten.mean.dim", (f(4, 3, 5),), (A, (0, 2))))
    assert graph is not None
    assert [n.args[1] for n in graph.nodes if "div" in n.op] == [20]


def test_unknown_and_random_operators_have_none() -> None:
    assert decompose(Call("aten.mm.default", (f(4, 3), f(3, 5)), (A, B))) is None
    assert decompose(Call("aten.bernoulli.default", (f(4),), (A,))) is None
