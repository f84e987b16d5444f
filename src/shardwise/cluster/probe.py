"""What /proc and /sys say of this machine, and a device estimated from it. Nothing is run.

The root is a parameter, so that tests and offline descriptions can point at a copied tree. Containers are seen:
the allowed CPUs and the memory and CPU limits of the control group count, where they stand under the root.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from .links import Level
from .model import Cluster, Device

# Rough constants of an estimate; a measurement replaces all of them.
_DEFAULT_HZ = 2.0e9  # where neither cpufreq nor cpuinfo gives a clock
_ACHIEVED = 0.6  # share of the peak that a blocked matmul reaches
_BYTES_PER_S_PER_CORE = 8e9  # one core's copy rate from DRAM on servers of the 2020s
_LARGEST_BYTES_PER_S = 100e9  # of a socket's DDR channels
_LAUNCH_S = 5e-6  # an eager operator on a CPU
_LINK_ALPHA_S = 50e-6  # one message of gloo over loopback
_LINK_BYTES_PER_S = 1.5e9  # and its bandwidth per rank


@dataclass(frozen=True)
class Machine:
    """Facts as read. `cores` are physical and allowed, `threads` logical; `hz` is the highest clock, in 1/s.

    `cache_bytes` is the largest cache of the first CPU; `cpu_limit` the control group's share, in cores.
    """

    cpu_name: str
    cores: int
    threads: int
    memory_bytes: int
    cache_bytes: int
    hz: float
    flags: frozenset[str]
    cpu_limit: float | None = None

    @property
    def usable_cores(self) -> float:
        """Cores that may be busy at the same time, the control group's limit included."""
        return self.cores if self.cpu_limit is None else min(float(self.cores), self.cpu_limit)

    def device(self, world: int = 1) -> Device:
        """One of `world` ranks that share this machine, with estimated figures."""
        share = self.usable_cores / world
        peak = share * self.hz * _ACHIEVED
        per_cycle = _float64_per_cycle(self.flags)
        half = {"bfloat16": ("amx_bf16", "avx512_bf16", "bf16"), "float16": ("amx_fp16", "avx512_fp16", "asimdhp")}
        flops = {"float64": peak * per_cycle, "float32": 2 * peak * per_cycle}
        for dtype, flags in half.items():
            # Matrix tiles peak at 32 times float32 vectors; a matmul out of memory was seen to reach 3 to 8.
            gains = [8.0 if "amx" in flag else 2.0 for flag in flags if flag in self.flags]
            flops[dtype] = flops["float32"] * max(gains, default=0.5)  # without support: converted to and fro
        bytes_per_s = min(self.usable_cores * _BYTES_PER_S_PER_CORE, _LARGEST_BYTES_PER_S)
        return Device(
            name=f"{self.cpu_name} ({share:g} cores, estimated)",
            flops_per_s=flops,
            memory_bytes=max(1, self.memory_bytes // world),
            memory_bytes_per_s=bytes_per_s / world,
            launch_s=_LAUNCH_S,
        )


def read_machine(root: str | Path = "/") -> Machine:
    """This machine, from /proc and /sys below `root`. Missing files give defaults, only no memory size is an error."""
    base = Path(root)
    cpuinfo = _text(base / "proc/cpuinfo")
    cpus = _allowed_cpus(base, cpuinfo)
    meminfo = re.search(r"MemTotal:\s*(\d+) kB", _text(base / "proc/meminfo"))
    if not meminfo:
        raise InputError(f"no MemTotal in {base / 'proc/meminfo'}; is {base} the root of a Linux system?")
    limits = [int(meminfo[1]) * 1024]
    for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(base / name).strip()
        limits += [int(text)] if text.isdigit() and int(text) > 0 else []
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return Machine(
        cpu_name=_cpu_name(cpuinfo),
        cores=_physical_cores(base, cpus),
        threads=len(cpus),
        memory_bytes=min(limits),
        cache_bytes=_largest_cache_bytes(base, min(cpus)),
        hz=_hz(base, cpuinfo, min(cpus)),
        flags=frozenset(flags[1].split()) if flags else frozenset(),
        cpu_limit=_cpu_limit(base),
    )


def probe_local(world: int, root: str | Path = "/") -> Cluster:
    """`world` ranks on this machine, estimated from what it says of itself, without running anything."""
    if world < 1:
        raise InputError(f"probe_local: world must be at least 1, got {world}")
    machine = read_machine(root)
    level = Level("loopback", world, _LINK_ALPHA_S, _LINK_BYTES_PER_S)
    source = f"estimated from /proc and /sys: {machine.cores} cores at {machine.hz / 1e9:.2f} GHz; nothing measured"
    return Cluster(f"local-{world}", machine.device(world), (level,), source)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_list(text: str) -> set[int]:
    """{0, 1, 2, 5} of "0-2,5"."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _allowed_cpus(base: Path, cpuinfo: str) -> set[int]:
    """Online and allowed to this process."""
    listed = {int(cpu) for cpu in re.findall(r"^processor\s*:\s*(\d+)", cpuinfo, re.MULTILINE)}
    online = _cpu_list(_text(base / "sys/devices/system/cpu/online")) or listed or {0}
    allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", _text(base / "proc/self/status"))
    return (online & _cpu_list(allowed[1]) if allowed else online) or online


def _physical_cores(base: Path, cpus: set[int]) -> int:
    """Threads of one core share its arithmetic units and count once."""
    cores = set()
    for cpu in cpus:
        siblings = _text(base / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()
        cores.add(siblings or str(cpu))
    return len(cores)


def _cpu_name(cpuinfo: str) -> str:
    for key in ("model name", "Model", "Hardware", "CPU part"):
        match = re.search(rf"^{key}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        if match:
            return match[1].strip()
    return "CPU"


def _hz(base: Path, cpuinfo: str, cpu: int) -> float:
    khz = _text(base / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq").strip()
    if khz.isdigit() and int(khz) > 0:
        return int(khz) * 1e3
    mhz = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpuinfo, re.MULTILINE)
    return max((float(value) for value in mhz), default=0.0) * 1e6 or _DEFAULT_HZ


def _largest_cache_bytes(base: Path, cpu: int) -> int:
    sizes = [0]
    for path in sorted((base / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*/size")):
        match = re.fullmatch(r"(\d+)([KMG]?)", _text(path).strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]])
    return max(sizes)


def _cpu_limit(base: Path) -> float | None:
    """Cores that the control group grants: version 2's cpu.max, then version 1's quota."""
    parts = _text(base / "sys/fs/cgroup/cpu.max").split()
    if not parts:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        parts = [_text(base / "sys/fs/cgroup/cpu" / name).strip() for name in names]
    if len(parts) == 2 and all(part.isdigit() for part in parts) and int(parts[0]) > 0 and int(parts[1]) > 0:
        cores = int(parts[0]) / int(parts[1])
        return cores if math.isfinite(cores) else None
    return None


def _float64_per_cycle(flags: frozenset[str]) -> float:
    """Two units of fused multiply-add (2 operations) over the widest vectors the flags name."""
    if "avx512f" in flags or "sve" in flags:
        return 32.0
    if "avx2" in flags:
        return 16.0
    return 8.0
