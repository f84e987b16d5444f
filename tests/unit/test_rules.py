"""Discovered rules: what public systems got wrong or missed, each with the right answer in factor notation."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest

import shardwise.pytorch.random
import shardwise.rules
from shardwise.ir.graph import Literal, Ref
from shardwise.ir.runner import Call, OperatorError, TensorMeta, call_of
from shardwise.pytorch.capture import capture
from shardwise.rules.book import RuleBook
from shardwise.rules.proxy import format_call, proxy_of
from shardwise.rules.rule import Rule, format_rule
from shardwise.rules.verify import verify_rule
from tests.graphs import RUNNER
from tests.models import CASES

A, B, C, D, E, G = (Ref(str(k)) for k in range(6))
F32 = Literal("dtype", "float32")


def f(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float32")


def i(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "int64")


def z(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "complex64")


def bool_(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "bool")


def bf(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "bfloat16")


_ONE = ((1, 1), (1, 1), (1, 1), False, (0, 0))
_POOL = ((2, 2), (2, 2), (0, 0))
_LAYER_NORM = (f(8, 16, 32), f(8, 16, 32), f(8, 16, 1), f(8, 16, 1), f(32), f(32))

EXPECTED: list[tuple[str, tuple, tuple, str]] = [
    # Flat or zero on most inputs, and so additive on them.
    ("threshold_backward.default", (f(5), f(5)), (A, B, 3.6), "([i],[i]) -> ([i])"),
    ("threshold_backward.default", (f(), f()), (A, B, 0), "([],[]) -> ([]) linear{0}"),
    ("hardtanh_backward.default", (f(), f()), (A, B, 0, 6), "([],[]) -> ([]) linear{0}"),
    ("hardshrink_backward.default", (f(8, 32), f(8, 32)), (A, B, 0.0), "([i,j],[i,j]) -> ([i,j]) linear{0}"),
    ("huber_loss_backward.default", (f(), f(8), f(8)), (A, B, C, 2, 8.7), "([],[i],[i]) -> ([i]) linear{0}"),
    ("masked_scatter.default", (f(2, 2), bool_(2, 2), f(3)), (A, B, C), "([_,_],[_,_],[_]) -> ([_,_]) linear{0,2}"),
    ("xlogy.Tensor", (f(8), f()), (A, B), "([i],[]) -> ([i]) linear{0}"),
    ("addcdiv.default", (f(8), f(8), f(8)), (A, B, C), "([i],[i],[i]) -> ([i]) linear{0,1}"),
    (
        "nll_loss_backward.default",
        (f(), f(3), i(), f(3), f()),
        (A, B, C, D, 1, -100, E),
        "([],[i],[],[i],[]) -> ([i]) index{i:2,mask} linear{0|3|0,1|1,3}",
    ),
    # Reductions that random inputs mistake for one another.
    ("any.dim", (bool_(8, 32),), (A, 1), "([i,j]) -> ([i]) reduce{j:max}"),
    ("all.dims", (f(3, 2, 1, 2),), (A, (1, 3)), "([i,j,_,k]) -> ([i,_]) reduce{j:min} reduce{k:min}"),
    ("all.dim", (f(2, 2),), (A, 1), "([i,j]) -> ([i]) reduce{j:min}"),
    ("any.dims", (i(3, 2, 1, 2),), (A, (1, 3)), "([i,j,_,k]) -> ([i,_]) reduce{j:max} reduce{k:max}"),
    ("all.dim", (i(3, 2),), (A, 1), "([i,j]) -> ([i]) reduce{j:min}"),
    ("all.default", (bool_(8, 32),), (A,), "([i,j]) -> ([]) reduce{i:min} reduce{j:min}"),
    ("max.default", (i(8, 32),), (A,), "([i,j]) -> ([]) reduce{i:max} reduce{j:max}"),
    ("min.default", (i(8, 32),), (A,), "([i,j]) -> ([]) reduce{i:min} reduce{j:min}"),
    ("prod.default", (f(8, 32),), (A,), "([i,j]) -> ([]) reduce{i:prod} reduce{j:prod}"),
    ("amax.default", (f(8, 32),), (A, (1,), True), "([i,j]) -> ([i,_]) reduce{j:max}"),
    ("amin.default", (f(8, 32),), (A, (1,)), "([i,j]) -> ([i]) reduce{j:min}"),
    ("mean.dim", (f(8, 32),), (A, (1,)), "([i,j]) -> ([i]) reduce{j:avg} even{j} linear{0}"),
    # Positions and scans do not split along their dim.
    ("max.dim", (f(8, 32),), (A, 1), "([i,_]) -> ([i],[i])"),
    ("argmax.default", (i(8, 32),), (A, 1), "([i,_]) -> ([i])"),
    ("argmax.default", (f(32),), (A,), "([_]) -> ([])"),
    ("cumsum.default", (i(8, 32),), (A, 1), "([i,_]) -> ([i,_])"),
    ("cumsum.default", (f(8, 32),), (A, 1), "([i,_]) -> ([i,_]) linear{0}"),
    ("sort.default", (f(8, 32),), (A, 1), "([i,_]) -> ([i,_],[i,_])"),
    ("topk.default", (f(8, 32),), (A, 2, 1), "([i,_]) -> ([i,_],[i,_])"),
    ("_softmax.default", (bf(8, 32),), (A, 1, False), "([i,_]) -> ([i,_])"),
    ("tril.default", (f(8, 16),), (A,), "([_,_]) -> ([_,_]) linear{0}"),
    ("searchsorted.Tensor", (f(16), f(8)), (A, B), "([_],[i]) -> ([i])"),
    # Losses: a mean of unequal counts is none.
    (
        "nll_loss_forward.default",
        (f(8, 32), i(8)),
        (A, B, None, 1, -100),
        "([i,_],[i]) -> ([],[]) reduce{i:avg/sum} even{i}",
    ),
    ("nll_loss_forward.default", (f(8, 32), i(8)), (A, B, None, 2, -100), "([i,_],[i]) -> ([],[]) reduce{i:sum}"),
    # Contractions and what is added to them once.
    ("mm.default", (f(8, 32), f(32, 5)), (A, B), "([i,j],[j,k]) -> ([i,k]) reduce{j:sum} linear{0|1}"),
    ("mm.default", (f(64, 64), f(64, 64)), (A, B), "([j,i],[i,k]) -> ([j,k]) reduce{i:sum} linear{0|1}"),
    ("mm.default", (z(8, 32), z(32, 5)), (A, B), "([i,j],[j,k]) -> ([i,k]) reduce{j:sum} linear{0|1}"),
    ("bmm.default", (f(8, 16, 32), f(8, 32, 7)), (A, B), "([i,j,k],[i,k,l]) -> ([i,j,l]) reduce{k:sum} linear{0|1}"),
    (
        "addmm.default",
        (f(128), f(64, 32), f(32, 128)),
        (A, B, C),
        "([i],[j,k],[k,i]) -> ([j,i]) once{k:0} reduce{k:sum} linear{0,1|0,2}",
    ),
    (
        "convolution.default",
        (f(8, 16, 20, 20), f(32, 16, 3, 3), f(32)),
        (A, B, C, *_ONE, 1),
        "([i,j,l,m],[k,j,_,_],[k]) -> ([i,k,l,m]) once{j:2} reduce{j:sum} halo{l:1,1} halo{m:1,1} linear{0,2|1,2}",
    ),
    (
        "convolution_backward.default",
        (f(8, 32, 20, 20), f(8, 16, 20, 20), f(32, 16, 3, 3)),
        (A, B, C, (32,), *_ONE, 1, (True, True, True)),
        "([i,j,_,_],[i,k,_,_],[j,k,_,_]) -> ([i,k,_,_],[j,k,_,_],[j]) "
        "reduce{i:sum} reduce{j:sum} local{j:3.0} linear{0}",
    ),
    # In place, broadcast, masks.
    ("mul_.Tensor", (f(8, 32), f(32)), (A, B), "([i,j],[j]) -> ([i,j]) linear{0|1}"),
    ("add_.Tensor", (f(8, 32), f(8, 32)), (A, B), "([i,j],[i,j]) -> ([i,j]) linear{0,1}"),
    ("add.Tensor", (f(8, 1, 32), f(16, 32)), (A, B), "([i,_,j],[k,j]) -> ([i,k,j]) linear{0,1}"),
    ("where.self", (bool_(8, 16), f(8, 16), f(16)), (A, B, C), "([i,j],[i,j],[j]) -> ([i,j]) linear{1,2}"),
    # Indices: the range they point into.
    (
        "embedding.default",
        (f(250, 32), i(8, 16)),
        (A, B),
        "([l,i],[j,k]) -> ([j,k,i]) reduce{l:sum} index{l:1,mask} linear{0}",
    ),
    (
        "embedding_dense_backward.default",
        (f(8, 16, 32), i(8, 16)),
        (A, B, 250, -1, False),
        "([i,j,k],[i,j]) -> ([l,k]) reduce{i:sum} reduce{j:sum} index{l:1,pad} local{l:2} linear{0}",
    ),
    (
        "gather.default",
        (f(16, 32), i(16, 9)),
        (A, 1, B),
        "([i,k],[i,j]) -> ([i,j]) reduce{k:sum} index{k:1,mask} linear{0}",
    ),
    ("index.Tensor", (f(16, 32), i(8)), (A, (B,)), "([k,i],[j]) -> ([j,i]) reduce{k:sum} index{k:1,mask} linear{0}"),
    (
        "index.Tensor",
        (f(16, 32), i(8)),
        (A, (None, B)),
        "([i,k],[j]) -> ([i,j]) reduce{k:sum} index{k:1,mask} linear{0}",
    ),
    (
        "index_select.default",
        (f(16, 32), i(8)),
        (A, 0, B),
        "([k,i],[j]) -> ([j,i]) reduce{k:sum} index{k:1,mask} linear{0}",
    ),
    (
        "take_along_dim.default",
        (f(8, 16), i(8, 3)),
        (A, B, 1),
        "([i,k],[i,j]) -> ([i,j]) reduce{k:sum} index{k:1,mask} linear{0}",
    ),
    (
        "scatter.src",
        (f(16, 32), i(16, 9), f(16, 9)),
        (A, 1, B, C),
        "([i,j],[i,_],[i,_]) -> ([i,j]) index{j:1,pad} linear{0,2}",
    ),
    (
        "scatter_add.default",
        (f(16, 32), i(16, 9), f(16, 9)),
        (A, 1, B, C),
        "([i,k],[i,j],[i,j]) -> ([i,k]) once{j:0} reduce{j:sum} index{k:1,pad} linear{0,2}",
    ),
    (
        "scatter_reduce.two",
        (f(16, 32), i(16, 9), f(16, 9)),
        (A, 1, B, C, "amax"),
        "([i,k],[i,j],[i,j]) -> ([i,k]) reduce{j:max} index{k:1,pad}",
    ),
    (
        "index_add.default",
        (f(16, 32), i(8), f(8, 32)),
        (A, 0, B, C),
        "([k,i],[j],[j,i]) -> ([k,i]) once{j:0} reduce{j:sum} index{k:1,pad} linear{0,2}",
    ),
    (
        "index_put.default",
        (f(16, 32), i(8), f(8, 32)),
        (A, (B,), C),
        "([j,i],[_],[_,i]) -> ([j,i]) index{j:1,pad} linear{0,2}",
    ),
    (
        "index_put.default",
        (f(16, 32), i(8), f(8, 32)),
        (A, (B,), C, True),
        "([k,i],[j],[j,i]) -> ([k,i]) once{j:0} reduce{j:sum} index{k:1,pad} linear{0,2}",
    ),
    # Pools and resizing: the indices of a pool are positions in the whole plane.
    (
        "max_pool2d_with_indices.default",
        (f(8, 16, 20, 20),),
        (A, (2, 2), (2, 2)),
        "([i,j,_,_]) -> ([i,j,_,_],[i,j,_,_])",
    ),
    (
        "max_pool2d_with_indices_backward.default",
        (f(8, 16, 10, 10), f(8, 16, 20, 20), i(8, 16, 10, 10)),
        (A, B, *_POOL, (1, 1), False, C),
        "([i,j,_,_],[i,j,_,_],[i,j,_,_]) -> ([i,j,_,_]) linear{0|0,1}",
    ),
    (
        "avg_pool2d.default",
        (f(8, 16, 20, 20),),
        (A, (2, 2), (2, 2)),
        "([i,j,2k,2l]) -> ([i,j,k,l]) halo{k:0,0} halo{l:0,0} linear{0}",
    ),
    ("upsample_nearest2d.default", (f(8, 16, 20, 20),), (A, (40, 40)), "([i,j,_,_]) -> ([i,j,_,_]) linear{0}"),
    # Integers: sizes become local, counts and positions stay global.
    ("full.default", (), ((8, 32), 1.0), "() -> ([i,j]) local{i:0.0} local{j:0.1}"),
    ("new_zeros.default", (f(8, 32),), (A, (8, 32)), "([i,j]) -> ([k,l]) local{k:1.0} local{l:1.1}"),
    ("new_empty_strided.default", (f(8, 16),), (A, (8, 16), (16, 1)), "([i,j]) -> ([k,l]) local{k:1.0} local{l:1.1}"),
    ("empty_like.default", (f(8, 16),), (A,), "([i,j]) -> ([i,j])"),
    ("div.Tensor", (f(8, 32),), (A, 32), "([i,j]) -> ([i,j]) linear{0}"),
    ("slice_backward.default", (f(8, 16),), (A, (8, 32), 1, 0, 16, 1), "([i,_]) -> ([i,_]) local{i:1.0} linear{0}"),
    ("select_backward.default", (f(8),), (A, (8, 32), 1, 3), "([i]) -> ([i,_]) local{i:1.0} linear{0}"),
    # Concatenation: blocks, also of unequal sizes (a fused projection with fewer heads of keys and values).
    ("cat.default", (f(8, 32),) * 3, ((A, B, C), 1), "([i,j],[i,j],[i,j]) -> ([i,3.j]) linear{0,1,2}"),
    (
        "cat.default",
        (f(8, 6),) * 5,
        ((A, B, C, D, E), 1),
        "([i,j],[i,j],[i,j],[i,j],[i,j]) -> ([i,5.j]) linear{0,1,2,3,4}",
    ),
    (
        "cat.default",
        (f(8, 128), f(8, 32), f(8, 32)),
        ((A, B, C), 1),
        "([i,4.j],[i,j],[i,j]) -> ([i,6.j]) linear{0,1,2}",
    ),
    ("stack.default", (f(8, 32), f(8, 32)), ((A, B), 1), "([i,j],[i,j]) -> ([i,_,j]) linear{0,1}"),
    ("repeat.default", (f(8, 16),), (A, (1, 3)), "([i,j]) -> ([i,k.16|3.j]) local{k:1.1} linear{0}"),
    # Several results, of several shapes.
    (
        "native_layer_norm_backward.default",
        _LAYER_NORM,
        (A, B, (32,), C, D, E, G, (True, True, True)),
        "([i,j,_],[i,j,_],[i,j,_],[i,j,_],[_],[_]) -> ([i,j,_],[_],[_]) reduce{i:sum} reduce{j:sum} linear{0}",
    ),
    ("linalg_inv_ex.default", (f(8, 5, 5),), (A,), "([i,_,_]) -> ([i,_,_],[i])"),
    ("view_as_real.default", (z(8, 32),), (A,), "([i,j]) -> ([i,j,_]) linear{0}"),
    ("_cdist_forward.default", (f(8, 3), f(9, 3)), (A, B, 2.0, None), "([i,_],[j,_]) -> ([i,j])"),
    # Shapes that depend on values have no rule.
    ("_unique2.default", (i(32),), (A,), ""),
    ("nonzero.default", (f(8, 16),), (A,), ""),
    # Views, derived from strides.
    (
        "view.default",
        (f(8, 16, 32),),
        (A, (128, 32)),
        "([j,i,k]) -> ([j.16|8.i,k]) local{i:1.0} local{j:1.0} local{k:1.1} linear{0}",
    ),
    (
        "_unsafe_view.default",
        (f(8, 16, 32),),
        (A, (128, 32)),
        "([j,i,k]) -> ([j.16|8.i,k]) local{i:1.0} local{j:1.0} local{k:1.1} linear{0}",
    ),
    (
        "view.default",
        (f(8, 24),),
        (A, (8, 3, 8)),
        "([i,j.8|3.k]) -> ([i,j,k]) local{i:1.0} local{j:1.1} local{k:1.2} linear{0}",
    ),
    ("view.default", (f(6, 35),), (A, (14, 15)), "([_,_]) -> ([_,_]) linear{0}"),
    ("slice.Tensor", (f(8, 96),), (A, 1, 32, 64), "([i,3.j]) -> ([i,j]) local{j:2,3} linear{0}"),
    ("slice.Tensor", (f(8, 96),), (A, 1, 31, 64), "([i,_]) -> ([i,_]) linear{0}"),
    ("split.Tensor", (f(8, 96),), (A, 32, 1), "([i,3.j]) -> ([i,j],[i,j],[i,j]) local{j:1} linear{0}"),
    (
        "split_with_sizes.default",
        (f(8, 96),),
        (A, (64, 16, 16), 1),
        "([i,6.j]) -> ([i,4.j],[i,j],[i,j]) local{j:1.0,1.1,1.2} linear{0}",
    ),
    (
        "expand.default",
        (f(8, 1, 32),),
        (A, (8, 16, 32)),
        "([i,_,j]) -> ([i,k,j]) local{i:1.0} local{j:1.2} local{k:1.1} linear{0}",
    ),
    ("unfold.default", (f(8, 32),), (A, 1, 4, 2), ""),
    ("diagonal.default", (f(8, 32, 32),), (A, 0, 1, 2), ""),
    ("select.int", (f(3, 16, 32),), (A, 0, 1), "([_,i,j]) -> ([i,j]) linear{0}"),
    ("unbind.int", (f(3, 16),), (A, 0), "([_,i]) -> ([i],[i],[i]) linear{0}"),
    ("t.default", (f(16, 32),), (A,), "([j,i]) -> ([i,j]) linear{0}"),
]

CALLS = [Call(f"aten.{name}", operands, args) for name, operands, args, _ in EXPECTED]
RANDOM = [
    Call("shardwise.random_bits.default", (i(), i(8, 1), i(1, 32)), (A, 3, (B, C))),
    Call("shardwise.random_bernoulli.default", (i(), i(8, 1), i(1, 32)), (A, 3, (B, C), 0.5)),
    Call("shardwise.random_integer.default", (i(), i(8, 1), i(1, 32)), (A, 3, (B, C), 0, 10)),
    *(
        Call(f"shardwise.random_{name}.default", (i(), i(8, 1), i(1, 32)), (A, 3, (B, C), F32))
        for name in ("uniform", "normal", "exponential")
    ),
]
ATTENTION = Call(
    "aten._scaled_dot_product_flash_attention_for_cpu.default", (f(8, 6, 16, 32),) * 3, (A, B, C, 0.0, True)
)


@lru_cache
def _book() -> RuleBook:
    """Rules found now, whatever the cache and the shipped book say; all of them in one go."""
    book = RuleBook(RUNNER, use_disk=False, use_shipped=False)
    book.find([*CALLS, *RANDOM, ATTENTION])
    return book


def _rule(call: Call) -> Rule:
    return _book().find([call])[0]


def _ranks(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    results = RUNNER.meta(call)
    return tuple(len(m.shape) for m in call.operands), tuple(0 if m is None else len(m.shape) for m in results)


@pytest.mark.parametrize("call, want", list(zip(CALLS, (e[3] for e in EXPECTED))), ids=lambda x: getattr(x, "op", ""))
def test_rules(call: Call, want: str) -> None:
    rule = _rule(call)
    if not want:
        assert not rule.factors
        return
    assert format_rule(rule, _ranks(call)) == want
    proxy = proxy_of(call, RUNNER)
    assert proxy is not None
    for seed in range(3):
        assert not verify_rule(proxy, _rule(proxy), RUNNER, seed)


@pytest.mark.parametrize("call", RANDOM, ids=lambda call: call.op)
def test_random_operators_are_elementwise_over_positions(call: Call) -> None:
    assert format_rule(_rule(call), _ranks(call)) == "([],[i,_],[_,j]) -> ([i,j])"


def test_an_empty_piece_is_executed_only_where_that_works() -> None:
    flags = {c.op.split(".")[1]: [x.empty for x in _rule(c).factors] for c in CALLS}
    assert flags["mm"] == [True, True, True]
    assert flags["amax"] == [True, False], "amax of nothing raises"
    assert flags["mean"] == [True, False]
    assert flags["embedding"][-1] is False, "a table without rows raises"


def test_attention_dies_without_heads_and_keeps_the_rest() -> None:
    """Most cuts of one operand alone crash the process; a cut with no heads does too. All else is found."""
    rule = _rule(ATTENTION)
    assert format_rule(rule, _ranks(ATTENTION)) == "([i,j,_,_],[i,j,_,_],[i,j,_,_]) -> ([i,j,_,_],[i,j,_])"
    assert [x.empty for x in rule.factors] == [True, False]


def test_the_backward_of_attention() -> None:
    x = f(8, 6, 16, 32)
    operands = (x, x, x, x, x, f(8, 6, 16))
    op = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    rule = _rule(Call(op, operands, (A, B, C, D, E, G, 0.0, True)))
    whole, line = "[i,j,_,_]", "[i,j,_]"
    left, right = ",".join([whole] * 5 + [line]), ",".join([whole] * 3)
    assert format_rule(rule, _ranks(Call(op, operands, (A, B, C, D, E, G, 0.0, True)))) == (
        f"({left}) -> ({right}) linear{{0}}"
    )


def test_negative_indices_wrap_where_the_operator_counts_from_the_end() -> None:
    wraps = {c.op.split(".")[1]: x.index.wraps for c in CALLS for x in _rule(c).factors if x.index is not None}
    assert wraps["index"] and wraps["index_put"]
    assert not wraps["embedding"] and not wraps["gather"]


def test_keys_of_calls_that_differ_in_size_alone_are_one() -> None:
    one, two = (Call("aten.mm.default", (f(n, 4 * n), f(4 * n, 3)), (A, B)) for n in (64, 96))
    first, second = proxy_of(one, RUNNER), proxy_of(two, RUNNER)
    assert first is not None and second is not None and format_call(first) == format_call(second)


@pytest.mark.parametrize("name", ["uneven_mlp", "inplace_net", "gpt_dropout", "moe"])
def test_rules_of_a_model_hold(name: str) -> None:
    _check_model(name, RuleBook(RUNNER))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CASES])
def test_rules_of_every_model_hold_at_its_sizes(name: str) -> None:
    _check_model(name, RuleBook(RUNNER), real_sizes=True)


def _check_model(name: str, book: RuleBook, real_sizes: bool = False) -> None:
    case = CASES[name]
    module, make_batch, _ = case.build()
    args, kwargs = make_batch(0, case.rows)
    graph = capture(module, args, kwargs).graph
    rules = book.of_graph(graph)
    assert sum(bool(r.factors) for r in rules) > 0.8 * sum(
        any(m.shape for m in _call(n, graph).operands) for n in graph.nodes
    )
    seen: set[str] = set()
    for node in graph.nodes:
        call = _call(node, graph)
        target = call if real_sizes else proxy_of(call, RUNNER)
        if target is None or format_call(target) in seen:
            continue
        seen.add(format_call(target))
        assert not verify_rule(target, book.find([target])[0], RUNNER, len(seen)), format_call(target)


def _call(node, graph) -> Call:
    return call_of(node, graph.values)[0]


def test_no_operator_is_named_in_rules() -> None:
    folder = Path(shardwise.rules.__file__).parent
    names = re.compile(r"\b(aten|prims|torch\.ops)\b|\bimport torch\b|\bconvolution|\bembedding\(|\baddmm\b")
    for path in folder.glob("*.py"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert not names.search(code), path.name


def test_refusal_names_the_operator() -> None:
    with pytest.raises(OperatorError, match="not registered"):
        RUNNER.meta(Call("aten.no_such_operator.default", (), ()))
