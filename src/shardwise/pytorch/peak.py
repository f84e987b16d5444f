"""Measured peak memory of a step: the running sum of the allocator events of torch.profiler, and VmHWM beside it.

Both disturb what they watch, so neither belongs into a run whose time counts.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once; of a DTensor this rank's piece."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def state_bytes(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Iterable[torch.Tensor]) -> int:
    """Bytes that live between two steps: parameters, buffers, optimizer state, gradients, the batch."""
    held = [*module.parameters(), *module.buffers(), *batch]
    held += [p.grad for p in module.parameters() if p.grad is not None]
    if optimizer is not None:
        held += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return storage_bytes(held)


def peak_increase_bytes(step: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes alive at any time of a step beyond those before it, by the allocator's events."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kind = 1 if device == "cuda" else 0  # c10::DeviceType
    found = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == kind]
    return peak_of((int(e["args"]["Addr"]), int(e["args"]["Bytes"])) for e in sorted(found, key=lambda e: e["ts"]))


def peak_of(events: Iterable[tuple[int, int]]) -> int:
    """The largest running sum of allocations and (negative) releases, given as (address, bytes) in order of time.

    The profiler misses what threads release that it does not watch, such as those of a process group. An address that
    is given out again was released in between.
    """
    level = peak = 0
    alive: dict[int, int] = {}
    for address, nbytes in events:
        if nbytes > 0:
            level += nbytes - alive.get(address, 0)
            alive[address] = nbytes
        else:
            level += nbytes
            alive.pop(address, None)
        peak = max(peak, level)
    return peak


def resident_increase_bytes(step: Callable[[], Any]) -> int | None:
    """The rise of the resident set over a step, by VmHWM; None where the kernel does not say.

    Only meaningful under MALLOC_MMAP_THRESHOLD_=65536: otherwise memory that malloc has kept hides the rise.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        step()
        return _status_bytes("VmHWM") - before
    except OSError:
        return None


def _status_bytes(key: str) -> int:
    match = re.search(rf"^{key}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"no {key} in /proc/self/status")
    return int(match[1]) * 1024
