"""Which counter-based generator draws fastest, and what our random operators cost beside torch's.

python -m benchmarks.random_numbers [--json FILE] [--quick] [--threads N]

Every row draws 1.5 million elements (a 1500 x 1000 activation) and takes the median of interleaved repetitions, so
that a busy machine slows all rows alike. Rows named "mask, compiled" and "mask, torch int64" compare generators: 64
bits of its own for every element, then a comparison. Quality is settled by the literature, not here: Philox, Threefry
and squares64 pass BigCrush; SplitMix64 does too, but its streams are one sequence cut at different places.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Row, Target, run
from shardwise.pytorch import random as R
from shardwise.pytorch.random import generator, kernel

SHAPE = (1500, 1000)
N = SHAPE[0] * SHAPE[1]
P = 0.9
RATIO = "our dropout over native dropout, 1.5M elements"
COMPILED = ("nothing", "splitmix64", "squares64", "philox4x32_10", "philox4x32_10_paired", "threefry2x64_20")


def compiled_candidates(folder: Path) -> dict[str, Callable[[], object]]:
    """The generators of random_candidates.cpp, or none where there is no compiler."""
    library = folder / "candidates.so"
    flags = [flag for flag in kernel.FLAGS if flag != "-fopenmp"]
    source = Path(__file__).with_name("random_candidates.cpp")
    command = [os.environ.get("CXX", "g++"), "-std=c++17", *flags, "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    functions = ctypes.CDLL(str(library))
    out = torch.empty(N, dtype=torch.bool)
    threshold = generator.bernoulli_threshold(P)
    calls = {}
    for name in COMPILED:
        function = getattr(functions, name)
        function.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        function.restype = None
        calls[name] = lambda function=function: function(0x9E3779B97F4A7C15, threshold, N, out.data_ptr())
    return calls


def philox_torch(counter: Tensor, key: int) -> Tensor:
    """Philox4x32-10 in int64 arithmetic, one counter an element."""
    low = 0xFFFFFFFF
    c0, c1 = counter & low, generator.shift_right(counter, 32)
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key & low, key >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = generator.shift_right(p1, 32) ^ c1 ^ k0, generator.shift_right(p0, 32) ^ c3 ^ k1
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0 | (c1 << 32)


def threefry_torch(counter: Tensor, key: int) -> Tensor:
    """Threefry2x64-20 in int64 arithmetic."""
    keys = (key, 0, 0x1BD11BDAA9FC1A22 ^ key)
    a, b = counter + generator.signed(keys[0]), torch.full_like(counter, keys[1])
    for block in range(5):
        for turn in (16, 32, 24, 21) if block % 2 else (16, 42, 12, 31):
            a = a + b
            b = ((b << turn) | generator.shift_right(b, 64 - turn)) ^ a
        a = a + generator.signed(keys[(block + 1) % 3])
        b = b + generator.signed(keys[(block + 2) % 3] + block + 1)
    return a


def torch_candidates() -> dict[str, Callable[[], object]]:
    counter = torch.arange(N)
    threshold = generator.bernoulli_threshold(P)
    key = 0x1E3779B97F4A7C15
    golden = generator.signed(generator.GOLDEN)
    tensor_key = torch.tensor(key)
    return {
        "splitmix64": lambda: generator.mix64(counter * golden + key) < threshold,
        "squares64": lambda: generator.squares64(counter, tensor_key) < threshold,
        "philox4x32_10": lambda: philox_torch(counter, key) < threshold,
        "threefry2x64_20": lambda: threefry_torch(counter, key) < threshold,
    }


def operator_rows() -> dict[str, Callable[[], object]]:
    x = torch.randn(SHAPE)
    seed = torch.tensor(1)
    pos = R.positions(SHAPE)

    def dropout() -> Tensor:
        mask = R.random_bernoulli(seed, 0, pos, P)
        return x * mask * (1 / P)

    return {
        "torch native_dropout": lambda: torch.native_dropout(x, 1 - P, True),
        "our dropout": dropout,
        "torch bernoulli_": lambda: torch.empty(SHAPE, dtype=torch.bool).bernoulli_(P),
        "our bernoulli": lambda: R.random_bernoulli(seed, 0, pos, P),
        "torch rand": lambda: torch.rand(SHAPE),
        "our uniform": lambda: R.random_uniform(seed, 0, pos, torch.float32),
        "torch randn": lambda: torch.randn(SHAPE),
        "our normal": lambda: R.random_normal(seed, 0, pos, torch.float32),
        "torch exponential_": lambda: torch.empty(SHAPE).exponential_(),
        "our exponential": lambda: R.random_exponential(seed, 0, pos, torch.float32),
        "torch randint": lambda: torch.randint(0, 1000, SHAPE),
        "our integer": lambda: R.random_integer(seed, 0, pos, 0, 1000),
        "our bernoulli, plain torch": lambda: generator.bernoulli(seed, 0, pos, P),
        "our normal, plain torch": lambda: generator.normal(seed, 0, pos, torch.float32),
    }


def measure(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median milliseconds of each call; one round runs every call once."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_all(options: argparse.Namespace) -> tuple[list[Row], dict[str, float | None]]:
    """Milliseconds of every candidate."""
    torch.set_num_threads(options.threads)
    has_kernel = R.prepare()
    with tempfile.TemporaryDirectory() as folder:
        calls = {f"mask, compiled: {name}": call for name, call in compiled_candidates(Path(folder)).items()}
        calls |= {f"mask, torch int64: {name}": call for name, call in torch_candidates().items()}
        calls |= operator_rows()
        times = measure(calls, 7 if options.quick else 31)
    rows = [{"name": name, "elements": N, "ms": value, "kernel": has_kernel} for name, value in times.items()]
    return rows, {RATIO: times["our dropout"] / times["torch native_dropout"] if has_kernel else None}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1, help="one, so that generators are compared, not schedulers")


if __name__ == "__main__":
    run(__doc__, (Target(RATIO, 1.0),), measure_all, _options)
