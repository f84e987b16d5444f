"""Measures the devices and links that a process group really has; every rank ends with the same numbers.

All ranks measure at the same time, since ranks that share a machine share its cores and memory. Of each repeat the
slowest rank counts, and of the repeats the median. Everything is measured in two passes, of which the faster counts: a
machine may be busy with something else for a moment, and what is measured is kept for later runs. All of it takes about
three seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ..cluster import COLLECTIVES, Cluster, Device, Level, fit_alpha_beta, probe_local, read_machine
from ..cost import bytes_on_wire

LINK_SIZES_BYTES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
_LINKS_BUDGET_S = 1.6
_REPEATS = 5
_ALTERNATIONS = 4  # of work and a collective without a barrier in between
_SECTION_S = 0.06  # each part of a device's measurement lasts at least this long, on every rank
_SMALLEST_ALPHA_S = 1e-9  # a fit may find no latency; a level needs a positive one


_PASSES = 2

Samples = dict[tuple[str, int], float]
"""(kind, bytes of the whole tensor) -> seconds."""


@dataclass(frozen=True)
class Rates:
    """A device while all ranks are busy, in seconds: per flop of each dtype, per byte copied, per operator."""

    flop_s: tuple[float, ...]
    byte_s: float
    launch_s: float


def measure_links(group: dist.ProcessGroup | None = None) -> list[tuple[str, int, float]]:
    """(kind, bytes, seconds) of every collective at several sizes over a group (None: all ranks, if there are any).

    Bytes are of the whole tensor, as in `cost.collectives`. Larger sizes are left out where the time does not
    suffice; the two smallest are always there. A group of one has no links: the list is empty.

    A collective is timed as a program meets it, between two pieces of work: ranks that come a little apart wait for
    each other, and caches are cold. Its time is that of the alternation less that of the work alone.
    """
    group = _group(group)
    if group is None or group.size() == 1:
        return []
    device = _device(group)
    return _faster([_sweep(group, device) for _ in range(_PASSES)])


def _faster(sweeps: list[tuple[float, Samples]]) -> list[tuple[str, int, float]]:
    """Of several sweeps, the fastest of each collective less the fastest of the work alone."""
    alone_s = min(alone for alone, _ in sweeps)
    found: Samples = {}
    for _, samples in sweeps:
        for key, seconds in samples.items():
            found[key] = min(seconds, found.get(key, seconds))
    return [(*key, max((found[key] - alone_s) / _ALTERNATIONS, _SMALLEST_ALPHA_S)) for key in sorted(found)]


def _sweep(group: dist.ProcessGroup, device: torch.device) -> tuple[float, Samples]:
    """(seconds of the work alone, seconds of the work and a collective)."""
    samples: Samples = {}
    # Budgets are spent in agreed seconds, so every rank takes the same decisions.
    share_s = _LINKS_BUDGET_S / (len(COLLECTIVES) * _PASSES)
    work = _work(device)
    alone_s = statistics.median(_timed(_alternating(work), 2 * _REPEATS, group, device)[1:])
    for kind in COLLECTIVES:
        spent_s = 0.0
        for index, nbytes in enumerate(LINK_SIZES_BYTES):
            collective, whole_bytes = _collective(kind, nbytes, group, device)
            run = _alternating(work, collective)
            warm_s = _timed(run, 1, group, device)[0]
            spent_s += warm_s
            if index >= 2 and spent_s + 3 * warm_s > share_s:
                break
            room_s = (share_s - spent_s) / (len(LINK_SIZES_BYTES) - index)
            repeats = max(3, min(_REPEATS, int(room_s / max(warm_s, 1e-6))))
            times = _timed(run, repeats, group, device)
            spent_s += sum(times)
            samples[kind, whole_bytes] = statistics.median(times)
    return alone_s, samples


def local_cluster(
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16),
) -> Cluster:
    """The cluster that this process group is: probed, measured, fitted, and identical on every rank.

    Without a process group it is one device. The network counts as one level that joins all ranks, since a group
    does not say how its ranks lie; its fits are those of the whole group.
    """
    group = _group(group)
    world = 1 if group is None else group.size()
    device = device or _device(group)
    rates, sweeps = [], []
    for _ in range(_PASSES):  # a moment in which the machine is slow shall not lie in both passes
        rates.append(_rates(dtypes, group, device))
        if group is not None and world > 1:
            sweeps.append(_sweep(group, device))
    flop_s = [min(r.flop_s[k] for r in rates) for k in range(len(dtypes))]
    flops_per_s = {str(dtype).removeprefix("torch."): 1.0 / s for dtype, s in zip(dtypes, flop_s)}
    byte_s, launch_s = min(r.byte_s for r in rates), min(r.launch_s for r in rates)
    name, memory_bytes = _identity(device, world)
    measured = Device(name, flops_per_s, memory_bytes, 1.0 / byte_s, launch_s)
    level = _fitted_level(_faster(sweeps) if sweeps else [], world)
    source = f"measured on {world} rank(s) of {name}"
    cluster = Cluster(f"measured-{world}", measured, (level,), source)
    return cluster if group is None else _same_on_all(cluster, group)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group's tensors live; without a group, the accelerator if there is one."""
    if group is not None and "gloo" in str(dist.get_backend(group)):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """The largest of every value over the ranks, on every rank."""
    if group is None or group.size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=_device(group))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def _section(measure: Callable[[], float], group: dist.ProcessGroup | None) -> float:
    _agreed([0.0], group)  # all ranks start together
    return _agreed([measure()], group)[0]


def _rates(dtypes: Sequence[torch.dtype], group: dist.ProcessGroup | None, device: torch.device) -> Rates:
    """The slowest rank's, on every rank."""
    flop_s = tuple(_section(partial(_matmul_s_per_flop, dtype, device), group) for dtype in dtypes)
    byte_s = _section(lambda: _copy_s_per_byte(device), group)
    return Rates(flop_s, byte_s, _section(lambda: _launch_s(device), group))


def _collective(
    kind: str, nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[Callable[[], object], int]:
    """A collective over a tensor of about `nbytes`, and the exact size of that tensor."""
    size = group.size()
    parts = max(1, nbytes // (4 * size * size)) * size  # float32; all_to_all cuts each rank's part again
    whole = torch.zeros(parts * size, device=device)
    part = torch.zeros(parts, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(part), part, group=group),
    }
    return calls[kind], 4 * parts * size


def _work(device: torch.device) -> Callable[[], object]:
    """About a millisecond of it."""
    size = 2048 if device.type == "cuda" else 256
    left, out = torch.randn(size, size, device=device), torch.empty(size, size, device=device)
    return partial(torch.mm, left, left, out=out)


def _alternating(*parts: Callable[[], object]) -> Callable[[], None]:
    """The parts one after the other, several times."""

    def run() -> None:
        for _ in range(_ALTERNATIONS):
            for part in parts:
                part()

    return run


def _timed(run: Callable[[], object], repeats: int, group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Seconds of each repeat on the slowest rank."""
    times = []
    for _ in range(repeats):
        _agreed([0.0], group)  # a barrier, cheaper than the barrier
        times.append(_once_s(run, device))
    return _agreed(times, group)


def _once_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, its device's work included."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _median_s(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a run, repeated for at least `_SECTION_S` so that ranks overlap."""
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < _SECTION_S:
        times.append(_once_s(run, device))
    return statistics.median(times)


def _matmul_s_per_flop(dtype: torch.dtype, device: torch.device) -> float:
    """Of the smallest square matmul that takes long enough to tell: a CPU's 256 to a GPU's 8192."""
    size, largest = 256, 8192 if device.type == "cuda" else 1024
    while True:
        left = torch.randn(size, size, device=device).to(dtype)
        matmul = partial(torch.mm, left, left)
        best_s = min(_once_s(matmul, device) for _ in range(3))  # a disturbed run must not end the growth
        if best_s > 4e-3 or size >= largest:
            return _median_s(matmul, device) / (2.0 * size**3)
        size *= 2


def _copy_s_per_byte(device: torch.device) -> float:
    nbytes = 256 << 20 if device.type == "cuda" else 64 << 20  # beyond most caches
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return _median_s(lambda: target.copy_(source), device) / (2.0 * nbytes)


def _launch_s(device: torch.device) -> float:
    """Of one small operator among many, issued one after the other."""
    left, out, count = torch.ones(16, device=device), torch.ones(16, device=device), 200

    def launches() -> None:
        for _ in range(count):
            torch.add(left, left, out=out)

    return _median_s(launches, device) / count


def _identity(device: torch.device, world: int) -> tuple[str, int]:
    """The device's name and the memory that one rank may fill, in bytes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory
    machine = read_machine()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return machine.cpu_name, max(1, machine.memory_bytes // max(1, min(here, world)))


def _fitted_level(samples: list[tuple[str, int, float]], world: int) -> Level:
    """One level over all ranks: a fit per collective, and from all_reduce the figures of a single link."""
    if not samples:
        estimated = probe_local(1).levels[0]
        return Level("none", 1, estimated.alpha_s, estimated.bytes_per_s)
    fits = {}
    for kind in COLLECTIVES:
        points = [(bytes_on_wire(kind, nbytes, world), seconds) for k, nbytes, seconds in samples if k == kind]
        fits[kind] = fit_alpha_beta(points)
    alpha_s, beta_s_per_byte = fits["all_reduce"]
    per_message_s = max(alpha_s / (2 * (world - 1)), _SMALLEST_ALPHA_S)
    return Level("process group", world, per_message_s, 1.0 / max(beta_s_per_byte, 1e-15), fits)


def _same_on_all(cluster: Cluster, group: dist.ProcessGroup) -> Cluster:
    """The first rank's cluster on every rank: names and memory may differ where machines do."""
    if group.size() == 1:
        return cluster
    memory_bytes = int(-_agreed([-float(cluster.device.memory_bytes)], group)[0])
    data = cluster.to_dict()
    data["device"]["memory_bytes"] = memory_bytes
    texts = [json.dumps(data)]
    dist.broadcast_object_list(texts, group=group, group_src=0)
    return Cluster.from_dict(json.loads(texts[0]))
