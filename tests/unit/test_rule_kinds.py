"""Discovered rules of further kinds of operators, each with the right answer: transforms, scans, windows, attention
with a mask, complex numbers, half precision, one index alone."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.ir.graph import Ref
from shardwise.ir.runner import Call
from shardwise.rules.book import RuleBook
from shardwise.rules.discover import REFUSED, UNREPEATABLE, discover
from shardwise.rules.proxy import proxy_of
from shardwise.rules.rule import format_rule
from shardwise.rules.sandbox import FAILED, discover_all
from shardwise.rules.verify import verify_rule
from tests.graphs import RUNNER
from tests.unit.test_rules import bf, f, i, z

A, B, C, D = (Ref(str(k)) for k in range(4))
Q = f(8, 6, 16, 32)
K = f(8, 6, 24, 32)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu.default"
MASK = (("attn_mask", D),)

EXPECTED: list[tuple[str, tuple, tuple, tuple, str]] = [
    # A transform mixes its dim, and is linear.
    ("_fft_c2c.default", (z(8, 16),), (A, (1,), 0, True), (), "([i,_]) -> ([i,_]) linear{0}"),
    ("_fft_r2c.default", (f(8, 16),), (A, (1,), 0, True), (), "([i,_]) -> ([i,_]) linear{0}"),
    ("_fft_c2r.default", (z(8, 9),), (A, (1,), 0, 16), (), "([i,_]) -> ([i,_]) linear{0}"),
    # Scans and sorts do not split along their dim.
    ("cumprod.default", (f(8, 32),), (A, 1), (), "([i,_]) -> ([i,_])"),
    ("logcumsumexp.default", (f(8, 32),), (A, 1), (), "([i,_]) -> ([i,_])"),
    ("cummax.default", (f(8, 32),), (A, 1), (), "([i,_]) -> ([i,_],[i,_])"),
    ("msort.default", (f(8, 32),), (A,), (), "([_,i]) -> ([_,i])"),
    ("searchsorted.Tensor", (f(8, 16), f(8, 5)), (A, B), (), "([i,_],[i,j]) -> ([i,j])"),
    # Reductions that are no sum, and one that is.
    ("linalg_vector_norm.default", (f(8, 32),), (A, 2, (1,)), (), "([i,_]) -> ([i])"),
    ("logsumexp.default", (f(8, 32),), (A, (1,)), (), "([i,_]) -> ([i])"),
    ("var.correction", (f(8, 32),), (A, (1,)), (), "([i,_]) -> ([i])"),
    ("histc.default", (f(32),), (A, 10, 0, 1), (), "([i]) -> ([_]) reduce{i:sum}"),
    # Distances: what flows back to one side is summed over the other.
    (
        "_cdist_backward.default",
        (f(8, 9), f(8, 5), f(9, 5), f(8, 9)),
        (A, B, C, 2.0, D),
        (),
        "([i,j],[i,k],[j,k],[i,j]) -> ([i,k]) reduce{j:sum} linear{0|1,2}",
    ),
    # Windows: a channel is a block of rows of the unfolded picture.
    (
        "im2col.default",
        (f(8, 3, 10, 10),),
        (A, (3, 3), (1, 1), (0, 0), (1, 1)),
        (),
        "([i,j,_,_]) -> ([i,j.9,_]) linear{0}",
    ),
    (
        "unfold_backward.default",
        (f(8, 15, 4),),
        (A, (8, 32), 1, 4, 2),
        (),
        "([i,_,_]) -> ([i,_]) local{i:1.0} linear{0}",
    ),
    (
        "grid_sampler_2d.default",
        (f(8, 3, 10, 10), f(8, 5, 6, 2)),
        (A, B, 0, 0, False),
        (),
        "([i,j,_,_],[i,k,l,_]) -> ([i,j,k,l]) linear{0}",
    ),
    # Attention: rows, heads, and queries where no triangle is cut off; keys mix.
    (ATTENTION, (Q, K, K), (A, B, C, 0.0, False), (), "([i,j,k,_],[i,j,_,_],[i,j,_,_]) -> ([i,j,k,_],[i,j,k])"),
    (
        ATTENTION,
        (Q, Q, Q, f(16, 16)),
        (A, B, C, 0.0, False),
        MASK,
        "([i,j,k,_],[i,j,_,_],[i,j,_,_],[k,_]) -> ([i,j,k,_],[i,j,k])",
    ),
    # Complex numbers and half precision.
    ("mul.Tensor", (z(8, 32), z(32)), (A, B), (), "([i,j],[j]) -> ([i,j]) linear{0|1}"),
    ("abs.default", (z(8, 32),), (A,), (), "([i,j]) -> ([i,j])"),
    (
        "addmm.default",
        (bf(128), bf(64, 32), bf(32, 128)),
        (A, B, C),
        (),
        "([i],[j,k],[k,i]) -> ([j,i]) once{k:0} reduce{k:sum} linear{0,1|0,2}",
    ),
    (
        "bmm.default",
        (bf(8, 16, 32), bf(8, 32, 7)),
        (A, B),
        (),
        "([i,j,k],[i,k,l]) -> ([i,j,l]) reduce{k:sum} linear{0|1}",
    ),
    # Scatter with a sum, and one index alone: its range is the vocabulary, too.
    (
        "scatter_reduce.two",
        (f(16, 32), i(16, 9), f(16, 9)),
        (A, 1, B, C, "sum"),
        (),
        "([i,k],[i,j],[i,j]) -> ([i,k]) once{j:0} reduce{j:sum} index{k:1,pad} linear{0,2}",
    ),
    # It compares its operands, which are equal almost nowhere if they are drawn apart: no minimum over pieces.
    (
        "_segment_reduce_backward.default",
        (f(8, 6), f(8, 6), f(12, 6), i(8)),
        (A, B, C, "max"),
        (("lengths", D), ("offsets", None), ("initial", 2)),
        "([_,i],[_,i],[_,i],[_]) -> ([_,i]) linear{0}",
    ),
    ("embedding.default", (f(250, 32), i()), (A, B), (), "([j,i],[]) -> ([i]) reduce{j:sum} index{j:1,mask} linear{0}"),
    (
        "index_select.default",
        (f(16, 32), i()),
        (A, 0, B),
        (),
        "([j,i],[]) -> ([_,i]) reduce{j:sum} index{j:1,mask} linear{0}",
    ),
]
CALLS = [Call(f"aten.{name}", operands, args, kwargs) for name, operands, args, kwargs, _ in EXPECTED]


@pytest.fixture(scope="module")
def book() -> RuleBook:
    """Rules found now, whatever the cache and the shipped book say; all of them in one go."""
    found = RuleBook(RUNNER, use_disk=False, use_shipped=False)
    found.find(CALLS)
    return found


@pytest.mark.parametrize("call, want", list(zip(CALLS, (e[4] for e in EXPECTED))), ids=lambda x: getattr(x, "op", ""))
def test_rules(call: Call, want: str, book: RuleBook) -> None:
    (rule,) = book.find([call])
    results = RUNNER.meta(call)
    ranks = tuple(len(m.shape) for m in call.operands), tuple(0 if m is None else len(m.shape) for m in results)
    assert format_rule(rule, ranks) == want
    proxy = proxy_of(call, RUNNER)
    assert proxy is not None
    (small,) = book.find([proxy])
    for seed in range(3):
        assert not verify_rule(proxy, small, RUNNER, seed)


def test_a_stand_in_has_as_many_results_as_the_call() -> None:
    """A size may be the number of results."""
    call = Call("aten.unbind_copy.int", (f(8, 6, 32),), (A, 1))
    (rule,) = RuleBook(RUNNER, use_disk=False, use_shipped=False).find([call])
    assert [len(x.results) for x in rule.factors] == [6, 6]
    assert format_rule(rule, ((3,), (2,) * 6)) == "([i,_,j]) -> ([i,j],[i,j],[i,j],[i,j],[i,j],[i,j]) linear{0}"


@pytest.mark.parametrize(
    "call",
    [
        Call("aten.bernoulli.p", (f(8, 32),), (A, 0.5)),
        Call("aten.native_dropout.default", (f(8, 32),), (A, 0.5, True)),
    ],
    ids=lambda call: call.op,
)
def test_what_draws_by_itself_is_told(call: Call, book: RuleBook) -> None:
    """Its own numbers cannot be split: a program draws with the operators of docs/random.md instead."""
    (rule,) = book.find([call])
    assert rule.found_on == UNREPEATABLE and not rule.factors and not rule.linear


@pytest.mark.parametrize(("op", "found_on"), [("aten.sin.default", REFUSED), ("mine.sin.default", UNREPEATABLE)])
def test_memory_of_others_is_no_random_number(op: str, found_on: str) -> None:
    """An operator that never repeats itself draws, unless the framework knows better: made-up operands may lead it to
    read what is not its own."""

    class Unsteady:
        """A runner whose operator returns other numbers every time."""

        framework = RUNNER.framework

        def __getattr__(self, name: str):
            return getattr(RUNNER, name)

        def may_draw(self, call: Call) -> bool:
            return RUNNER.may_draw(call) if call.op.startswith("aten.") else True

        def run(self, call: Call, operands: list) -> list:
            return [np.random.default_rng().random(call.operands[0].shape)]

    assert discover(Call(op, (f(5, 7),), (A,)), Unsteady()).found_on == found_on  # type: ignore[arg-type]


def test_a_discovery_that_fails_does_not_spoil_the_next() -> None:
    """An operator may damage the process that it runs in: what fails there is tried alone, and the others elsewhere."""

    class Damaged:
        """A runner that nothing can be done with once it has run `sin`, until it is forked anew."""

        framework = RUNNER.framework
        broken = False

        def __getattr__(self, name: str):
            return getattr(RUNNER, name)

        def run(self, call: Call, operands: list) -> list:
            if call.op == "aten.sin.default":
                Damaged.broken = True
            if Damaged.broken:
                raise AttributeError("damaged")
            return RUNNER.run(call, operands)

    calls = [Call(f"aten.{name}.default", (f(5, 7),), (A,)) for name in ("exp", "sin", "cos")]
    first, second, third = discover_all(calls, Damaged())  # type: ignore[arg-type]
    assert first.factors and third.factors
    assert not second.factors and not second.found_on.startswith(RUNNER.framework), FAILED
