"""Pieces that overlap: found by execution for whatever has windows, and for nothing else."""

import pytest

from shardwise.ir.graph import Ref
from shardwise.ir.runner import Call, TensorMeta
from shardwise.pytorch.runner import TorchRunner
from shardwise.rules.book import RuleBook, read_rules, write_rules
from shardwise.rules.rule import DimRef, Factor, Halo, Rule, format_rule
from shardwise.rules.verify import verify_rule
from shardwise.rules.window import Overlap, Window, needed_spans, owned_spans

RUNNER = TorchRunner()
BOOK = RuleBook(RUNNER, use_disk=False)


def meta(*shape):
    return TensorMeta(shape, "float32")


def arg(value):
    return tuple(value) if isinstance(value, list | tuple) else value


def call_of(op, operands, *args):
    refs = iter(range(len(operands)))
    return Call(op, tuple(operands), tuple(Ref(str(next(refs))) if a is Ellipsis else arg(a) for a in args))


def out_size(n, kernel, stride, padding, dilation):
    return (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def conv(dims, n, kernel, stride, padding, dilation=1, transposed=False):
    weight = meta(5, 6, *(kernel,) * dims) if not transposed else meta(6, 5, *(kernel,) * dims)
    settings = [(k,) * dims for k in (stride, padding, dilation)]
    operands = [meta(4, 6, *(n,) * dims), weight]
    return call_of("aten.convolution.default", operands, ..., ..., None, *settings, transposed, (0,) * dims, 1)


def conv_backward(dims, n, kernel, stride, padding, dilation=1, mask=(True, True, False)):
    out = out_size(n, kernel, stride, padding, dilation)
    operands = [meta(4, 5, *(out,) * dims), meta(4, 6, *(n,) * dims), meta(5, 6, *(kernel,) * dims)]
    settings = [(k,) * dims for k in (stride, padding, dilation)]
    more = (None, *settings, False, (0,) * dims, 1, mask)
    return call_of("aten.convolution_backward.default", operands, ..., ..., ..., *more)


def halos(call):
    """(dims of the operands, left, right, ratios, operands extended by zeros) of the factors with a halo."""
    found = []
    for f in BOOK.find([call])[0].factors:
        if f.halo is not None:
            dims = tuple(r.dim if isinstance(r, DimRef) else None for r in f.operands)
            found.append((dims, f.halo.left, f.halo.right, f.halo.operands, f.halo.zeros))
    return found


def verified(call):
    """The factors with a halo, none of which fails on fresh inputs."""
    rule = BOOK.find([call])[0]
    for seed in (1,):
        assert verify_rule(Call(call.op, tuple(TensorMeta(m.shape, "float64") for m in call.operands), call.args),
                           rule, RUNNER, seed) == []  # fmt: skip
    return [f for f in rule.factors if f.halo is not None]


WINDOWS = [
    (3, 1, 1, 1, (1, 1)),
    (3, 1, 0, 1, (0, 0)),  # what it reads beyond is in the sizes: a window has two elements more than results
    (4, 1, 2, 1, (2, 2)),
    (3, 2, 1, 1, (1, 0)),
    (2, 2, 0, 1, (0, 0)),
    (5, 3, 2, 1, (1, 0)),
    (3, 1, 2, 2, (2, 2)),
]
"""(kernel, stride, padding, dilation, margins)"""


@pytest.mark.parametrize(
    ("dims", "kernel", "stride", "padding", "dilation", "margins"),
    # Three dims are slow, so those have the kernels of three elements alone.
    [(dims, *window) for dims in (1, 2, 3) for window in WINDOWS if dims < 3 or window[0] == 3],
)
def test_convolution(dims, kernel, stride, padding, dilation, margins):
    call = conv(dims, 12, kernel, stride, padding, dilation)
    expected = [((2 + d, None), *margins, (stride, 0), ()) for d in range(dims)]
    found = halos(call)
    assert [f for f in found if f[0][1] is None] == [f for f in expected if f[1:3] == margins] and len(found) == dims
    assert len(verified(call)) == dims


@pytest.mark.parametrize("n", [9, 10, 13])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (5, 3, 2), (4, 2, 0)])
def test_remainders_of_sizes(n, kernel, stride, padding):
    assert len(verified(conv(1, n, kernel, stride, padding))) == 1
    assert len(verified(conv_backward(1, n, kernel, stride, padding))) == 1


BOTH = (True, True, False)
GRADIENTS = [
    (dims, *window, mask)
    for dims in (1, 2, 3)
    for window in ((3, 1, 1, 1), (3, 2, 1, 1), (4, 2, 1, 1), (3, 1, 2, 2), (5, 1, 0, 1))
    for mask in ((True, False, False), (False, True, False), BOTH)
    # More dims are slow: they have both gradients at once, and three dims one window.
    if dims == 1 or (mask == BOTH and (dims == 2 or window[:2] == (3, 2)))
]


@pytest.mark.parametrize(("dims", "kernel", "stride", "padding", "dilation", "mask"), GRADIENTS)
def test_gradients_of_convolution(dims, kernel, stride, padding, dilation, mask):
    call = conv_backward(dims, 12, kernel, stride, padding, dilation, mask)
    factors = verified(call)
    assert len(factors) == dims
    for f in factors:
        # The image counts every position once, the gradient of the results is read beyond the own piece.
        assert f.halo.zeros == (1,) and f.halo.operands == (1, stride, 0)
        assert f.results[1] == ("sum" if mask[1] else None) and isinstance(f.results[0], DimRef) == mask[0]


def test_pooling():
    x, grad = meta(4, 6, 12, 12), meta(4, 6, 6, 6)
    pool = (3, 3), (2, 2), (1, 1)
    assert len(verified(call_of("aten.avg_pool2d.default", [x], ..., *pool))) == 2
    backward = call_of("aten.avg_pool2d_backward.default", [grad, x], ..., ..., *pool, False, True, None)
    assert [f.halo.zeros for f in verified(backward)] == [(1,), (1,)]


def test_transposed_convolution_and_padding():
    assert [f[3:] for f in halos(conv(2, 8, 4, 2, 1, transposed=True))] == [((1, 0), ())] * 2
    assert len(verified(call_of("aten.constant_pad_nd.default", [meta(4, 12)], ..., (1, 2), 0.5))) == 1


NONE = [
    call_of("aten._softmax.default", [meta(4, 16)], ..., -1, False),
    call_of("aten.cumsum.default", [meta(4, 16)], ..., 1),
    call_of("aten.flip.default", [meta(4, 16)], ..., (1,)),
    call_of("aten.roll.default", [meta(4, 16)], ..., (1,), (1,)),
    call_of("aten.tril.default", [meta(4, 16, 16)], ...),
    call_of("aten.sort.default", [meta(4, 16)], ..., 1),
    call_of("aten._fft_r2c.default", [meta(4, 16)], ..., (1,), 0, True),
    call_of("aten.native_layer_norm.default", [meta(4, 16), meta(16), meta(16)], ..., (16,), ..., ..., 1e-5),
    call_of("aten.max_pool2d_with_indices.default", [meta(4, 6, 12, 12)], ..., (2, 2), (2, 2)),  # positions in a plane
]


@pytest.mark.parametrize("call", NONE, ids=lambda c: c.op)
def test_what_has_no_windows(call):
    assert halos(call) == []


def test_half_precision_and_integers():
    x = [TensorMeta((4, 6, 12), "bfloat16"), TensorMeta((5, 6, 3), "bfloat16")]
    single = conv(1, 12, 3, 1, 1)
    assert halos(Call(single.op, tuple(x), single.args)) == halos(single) != []
    assert halos(call_of("aten.constant_pad_nd.default", [TensorMeta((4, 12), "int64")], ..., (1, 2), 0)) == []


def test_windows_of_uneven_pieces():
    # 9 elements on 4 devices are 3, 3, 3, 0; with a stride of 2 the operand has 17, of which they own 5, 5, 5, 2.
    overlap = Overlap(Halo(1, 0, (2,), (1,)), ((9, 1),))
    windows = overlap.windows(4)
    assert windows == (Window(0, 6), Window(2, 3), Window(5, 0), None)
    assert needed_spans(17, 2, windows) == ((0, 5), (4, 11), (10, 17), (0, 0))
    assert owned_spans(17, 4) == ((0, 5), (5, 10), (10, 15), (15, 17))
    assert overlap.share(4) == 4 / 9


def test_a_rule_with_a_halo_is_written_and_read():
    factor = Factor((DimRef(2), DimRef(2), None), (DimRef(2), "sum"), halo=Halo(1, 2, (1, 2, 0), (2, 0), (1,)))
    rule = Rule((factor,), found_on="here")
    assert read_rules(write_rules({"key": rule}, "here")) == {"key": rule}
    text = format_rule(rule, ((3, 3, 3), (3, 3)))
    assert text == "([_,_,i],[_,_,2i],[_,_,_]) -> ([_,_,2i],[_,_,_]) reduce{i:sum} halo{i:1,2} zeros{i:1}"
