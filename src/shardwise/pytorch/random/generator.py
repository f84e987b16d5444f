"""The counter-based generator in plain torch: any device, and the reference of the CPU kernel, bit for bit.

An element's 64 random bits are `squares64(position, key(seed, stream))` (Widynski 2020, arXiv 2004.06278), chosen by
`benchmarks/random_numbers.py` among published counter generators. Every distribution is computed from these bits
with IEEE-exact operations only (+, -, *, /): logarithm, root, sine and cosine are written out, since those of a
library round differently in a vector's body and in its tail, and then a slice would not equal the slice of the whole.

torch has no unsigned 64-bit arithmetic: int64 wraps, and a logical shift is an arithmetic one with the sign masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
LOW_32 = 0xFFFFFFFF


def signed(value: int) -> int:
    """The int64 with the same 64 bits as `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def mix64(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford, variant 13)."""
    z = (z ^ shift_right(z, 30)) * signed(MIX_1)
    z = (z ^ shift_right(z, 27)) * signed(MIX_2)
    return z ^ shift_right(z, 31)


def make_key(seed: Tensor, stream: int) -> Tensor:
    """An odd 64-bit key (0-dim int64) from the seed of the step and the number of the random operator."""
    return mix64(mix64(seed + signed(GOLDEN)) + signed((stream + 1) * GOLDEN)) | 1


def second_key(key: Tensor) -> Tensor:
    """The key of an element's second 64 bits."""
    return mix64(key + signed(GOLDEN)) | 1


def _rotate(x: Tensor) -> Tensor:
    return (x << 32).bitwise_or_(shift_right(x, 32))


def squares64(counter: Tensor, key: Tensor) -> Tensor:
    y = counter * key
    z = y + key
    x = _rotate((y * y).add_(y))
    x = _rotate(x.mul_(x).add_(z))
    x = _rotate(x.mul_(x).add_(y))
    t = x.mul_(x).add_(z)
    x = _rotate(t)
    return shift_right(x.mul_(x).add_(y), 32).bitwise_xor_(t)


def positions_sum(pos: Sequence[Tensor]) -> Tensor:
    """Global positions of the elements of the result: the broadcast sum of the position vectors."""
    total = pos[0]
    for vector in pos[1:]:
        total = total + vector
    return total


def bits(seed: Tensor, stream: int, pos: Sequence[Tensor]) -> Tensor:
    return squares64(positions_sum(pos), make_key(seed, stream))


# How many random bits torch.rand puts into a number of this type: its mantissa with the hidden bit.
UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Numbers are computed in float64, rounded to this type, then to `dtype`: the kernel knows only these two."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def uniform(seed: Tensor, stream: int, pos: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    count = UNIFORM_BITS[dtype]
    return shift_right(bits(seed, stream, pos), 64 - count).double().mul_(2.0**-count).to(work_dtype(dtype)).to(dtype)


def bernoulli_threshold(p: float) -> int | None:
    """An element is true where its bits, read as int64, are below this; None: always."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a probability lies in [0, 1], this one is {p}")
    return None if p == 1.0 else int(math.ldexp(p, 64)) - 2**63


def bernoulli(seed: Tensor, stream: int, pos: Sequence[Tensor], p: float) -> Tensor:
    threshold = bernoulli_threshold(p)
    drawn = bits(seed, stream, pos)
    return torch.ones_like(drawn, dtype=torch.bool) if threshold is None else drawn < threshold


def integer(seed: Tensor, stream: int, pos: Sequence[Tensor], low: int, high: int) -> Tensor:
    """Uniform in low .. high - 1: the high word of bits x range.

    The bias is at most range / 2^64 <= 2^-32; larger ranges take 128 bits, so at most 2^-64.
    """
    size = high - low
    position, key = positions_sum(pos), make_key(seed, stream)
    word = squares64(position, key)
    if size <= 2**32:
        carried = shift_right((word & LOW_32) * size, 32)
        return shift_right(shift_right(word, 32) * size + carried, 32).add_(low)
    low_word = word * signed(size)
    total = low_word + _high_product(squares64(position, second_key(key)), size)
    flip = -(2**63)
    carry = (total ^ flip) < (low_word ^ flip)
    return _high_product(word, size) + carry + low


def _high_product(a: Tensor, b: int) -> Tensor:
    """The high 64 bits of the unsigned product."""
    a_low, a_high, b_low, b_high = a & LOW_32, shift_right(a, 32), b & LOW_32, b >> 32
    middle = a_high * b_low + shift_right(a_low * b_low, 32)
    other = a_low * b_high + (middle & LOW_32)
    return a_high * b_high + shift_right(middle, 32) + shift_right(other, 32)


def log_positive(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 (fdlibm e_log.c), error below one unit in the last place."""
    raw = x.view(torch.int64) + ((0x3FF00000 - 0x3FE6A09E) << 32)
    k = ((raw >> 52) - 1023).double()
    x = ((raw & 0x000FFFFFFFFFFFFF) + (0x3FE6A09E << 32)).view(torch.float64)
    f = x - 1.0
    half = (f * f) * 0.5
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (((w * 1.531383769920937332e-01) + 2.222219843214978396e-01) * w + 3.999999999940941908e-01)
    odd = z * (
        (((w * 1.479819860511658591e-01) + 1.818357216161805012e-01) * w + 2.857142874366239149e-01) * w
        + 6.666666666666735130e-01
    )
    return (((half + (even + odd)) * s + k * 1.90821492927058770002e-10) - half + f) + k * 6.93147180369123816490e-01


def square_root(x: Tensor) -> Tensor:
    """Of positive normal float64: three Newton steps for 1/sqrt(x), one of Heron's; at most a last bit off.

    torch.sqrt on the CPU is MKL's, which is not correctly rounded, so not what the kernel or another device gives.
    """
    y = (0x5FE6EB50C7B537A9 - (x.view(torch.int64) >> 1)).view(torch.float64)
    half = x * 0.5
    for _ in range(3):
        y = y * (1.5 - half * y * y)
    root = x * y
    return (root + x / root) * 0.5


def _sine(x: Tensor) -> Tensor:
    """On [-pi/4, pi/4] (fdlibm k_sin.c)."""
    z = x * x
    p = z * 1.58969099521155010221e-10 + -2.50507602534068634195e-08
    for constant in (2.75573137070700676789e-06, -1.98412698298579493134e-04, 8.33333333332248946124e-03):
        p = p * z + constant
    p = p * z + -1.66666666666666324348e-01
    return p * z * x + x


def _cosine(x: Tensor) -> Tensor:
    """On [-pi/4, pi/4] (fdlibm k_cos.c)."""
    z = x * x
    p = z * -1.13596475577881948265e-11 + 2.08757232129817482790e-09
    for constant in (-2.75573143513906633035e-07, 2.48015872894767294178e-05, -1.38888888888741095749e-03):
        p = p * z + constant
    p = p * z + 4.16666666666666019037e-02
    return p * z * z - z * 0.5 + 1.0


QUARTER_TURN = float.fromhex("0x1.921fb54442d18p+0")  # pi / 2


def normal(seed: Tensor, stream: int, pos: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Box-Muller on one element's own bits: the high half is the radius (up to 6.76), the low half the angle."""
    drawn = bits(seed, stream, pos)
    u = (shift_right(drawn, 32).double() + 0.5) * 2.0**-32
    radius = square_root(log_positive(u) * -2.0)
    angle = ((drawn & 0x3FFFFFFF).double() + 0.5) * (QUARTER_TURN * 2.0**-30) - QUARTER_TURN / 2
    side = torch.where((drawn & 0x40000000) != 0, _sine(angle), _cosine(angle))
    side = torch.where((drawn & 0x80000000) != 0, -side, side)
    return (radius * side).to(work_dtype(dtype)).to(dtype)


def exponential(seed: Tensor, stream: int, pos: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """-log(u); never zero, as in torch, since users take its logarithm."""
    u = (shift_right(bits(seed, stream, pos), 12).double() + 0.5) * 2.0**-52
    return not_zero((-log_positive(u)).to(work_dtype(dtype)), dtype)


def not_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float16 cannot hold the smallest draws: they become its smallest normal number."""
    return values.clamp_min_(torch.finfo(dtype).tiny).to(dtype) if dtype == torch.float16 else values.to(dtype)
