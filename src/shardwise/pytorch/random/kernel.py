"""The CPU kernel of the random operators: built once per user and machine, called through ctypes.

It is never built at import. The first large draw (or `prepare`) builds it, under a file lock, so that of several
ranks one compiles and the others wait. Without a compiler, or with SHARDWISE_NATIVE=0, one line is logged and
`generator.py` draws the same numbers more slowly.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("shardwise")

SOURCE = Path(__file__).with_name("kernel.cpp")
# -ffp-contract=off and no -ffast-math: the equality with generator.py depends on it.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]
# Smaller draws do not start a build: tiny calls, as in the discovery of rules, would pay seconds for microseconds.
BUILD_FROM_ELEMENTS = 32768

BITS, UNIFORM, BERNOULLI, NORMAL, EXPONENTIAL, INTEGER = range(6)

_lock = threading.Lock()
_function: Callable[..., int] | None = None
_tried = False


def cache_directory() -> Path:
    """Where built kernels lie: SHARDWISE_CACHE, or the user's cache directory."""
    base = os.environ.get("SHARDWISE_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"


def _cpu_features() -> str:
    """What -march=native depends on; a home directory may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def library_path() -> Path:
    parts = [SOURCE.read_text(), " ".join(FLAGS), torch.__version__, platform.machine(), _cpu_features()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_directory() / "native" / f"random-{digest}.so"


def _build(target: Path) -> None:
    from torch.utils import cpp_extension  # slow to import, so only where something is built

    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if the builder dies
        if target.exists():
            return
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            cpp_extension.load(
                "shardwise_random",
                [str(SOURCE)],
                extra_cflags=FLAGS,
                extra_ldflags=["-fopenmp"],
                build_directory=work,
                with_cuda=False,
                is_python_module=False,
            )
            os.replace(Path(work) / "shardwise_random.so", target)


def _load() -> Callable[..., int]:
    target = library_path()
    if not target.exists():
        _build(target)
    function = ctypes.CDLL(str(target)).shardwise_random
    number = ctypes.c_int64
    pointer = ctypes.c_void_p
    function.argtypes = [ctypes.c_int, ctypes.c_int, *[number] * 6, *[pointer] * 3, number, pointer]
    function.restype = ctypes.c_int
    return function


def prepare() -> bool:
    """Build and load the kernel now; whether there is one. A failure is logged once and not tried again."""
    global _function, _tried
    with _lock:
        if not _tried:
            _tried = True
            if os.environ.get("SHARDWISE_NATIVE", "1") != "0":
                try:
                    _function = _load()
                except Exception as error:  # a missing compiler, header, cache directory: all mean "no kernel"
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                    log.warning("random operators run without their CPU kernel: %s", reason)
    return _function is not None


def available(elements: int) -> bool:
    """Whether the kernel draws a result of this size."""
    return _function is not None or (elements >= BUILD_FROM_ELEMENTS and not _tried and prepare())


def draw(
    kind: int, seed: Tensor, stream: int, pos: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype, a: int, b: int
) -> Tensor:
    """Run the kernel on CPU tensors. `dtype` is int64, bool, float32 or float64; `a`, `b` as in kernel.cpp."""
    assert _function is not None
    out = torch.empty(shape, dtype=dtype)
    if out.numel() == 0:
        return out
    vectors = [vector.expand(shape) for vector in pos]
    rank = max(len(shape), 1)
    sizes = (ctypes.c_int64 * rank)(*(shape or (1,)))
    data = (ctypes.c_void_p * len(vectors))(*(vector.data_ptr() for vector in vectors))
    flat = [step for vector in vectors for step in (vector.stride() or (0,))]
    strides = (ctypes.c_int64 * len(flat))(*flat)
    status = _function(
        kind,
        dtype == torch.float64,
        int(seed),
        stream,
        a,
        b,
        rank,
        len(vectors),
        sizes,
        data,
        strides,
        out.numel(),
        out.data_ptr(),
    )
    assert status == 0
    return out
