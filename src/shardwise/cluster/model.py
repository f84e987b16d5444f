"""A cluster: one kind of device, and the levels of network that join the devices.

    Cluster = name, device: Device, levels: Level*, source       innermost level first; world = product of sizes
    Device  = name, flops_per_s: dtype -> float, memory_bytes, memory_bytes_per_s, launch_s
    Level   = name, size, alpha_s, bytes_per_s, fits?            see links.py

A cluster is described by a preset, a file, a probe of this machine or a measurement; `source` says which. It is
plain data: it travels as JSON and has a fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import InputError
from .links import AxisLink, Level, _check, _positive, axis_links, mesh_shapes, world_size

DTYPES = ("float64", "float32", "bfloat16", "float16")

# Where a device gives no figure for a dtype, the next dtype in this order that has one stands in for it.
_STAND_INS = {
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("float64", "bfloat16", "float16"),
    "bfloat16": ("float16", "float32", "float64"),
    "float16": ("bfloat16", "float32", "float64"),
}


@dataclass(frozen=True)
class Device:
    """One device as a roofline: peak arithmetic, memory, and a fixed cost per operator.

    `flops_per_s` by dtype name, `memory_bytes` that a rank may fill, `memory_bytes_per_s` read plus written,
    `launch_s` the overhead of one operator whatever its size.
    """

    name: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.flops_per_s:
            raise InputError(f"{where}: flops_per_s needs at least one of {', '.join(DTYPES)}")
        for dtype, value in self.flops_per_s.items():
            if dtype not in DTYPES:
                raise InputError(f"{where}: flops_per_s knows {', '.join(DTYPES)}, not {dtype!r}")
            _check(_positive(value), where, f"flops_per_s.{dtype}", value)
        for key in ("memory_bytes", "memory_bytes_per_s", "launch_s"):
            _check(_positive(getattr(self, key)), where, key, getattr(self, key))

    def flops_per_s_of(self, dtype: str) -> float:
        """Peak for a dtype name such as "float32" or "torch.bfloat16".

        float8 counts as bfloat16, complex as its real part, integers and bool as float32.
        """
        name = dtype.removeprefix("torch.")
        if name.startswith("float8"):
            name = "bfloat16"
        elif name.startswith("complex"):
            name = {"complex32": "float16", "complex128": "float64"}.get(name, "float32")
        elif name not in _STAND_INS:
            name = "float32"
        for candidate in (name, *_STAND_INS[name]):
            if candidate in self.flops_per_s:
                return self.flops_per_s[candidate]
        raise AssertionError("a device has at least one figure")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind under levels of network, innermost level first. `source` says where the numbers are from."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.levels:
            raise InputError(f"cluster {self.name!r}: needs at least one level (a single device is a level of size 1)")

    @staticmethod
    def load(name_or_path: str | os.PathLike[str]) -> Cluster:
        """A preset ("a100x8") or a .toml or .json file. Raises ClusterFileError."""
        from .files import load_cluster

        return load_cluster(name_or_path)

    @staticmethod
    def of(cluster: Cluster | str | os.PathLike[str]) -> Cluster:
        """A cluster, or what `load` makes of a path or name. Raises InputError for anything else."""
        if isinstance(cluster, Cluster):
            return cluster
        if not isinstance(cluster, str | os.PathLike):
            kind = type(cluster).__name__
            raise InputError(f"cluster: expected a Cluster, the path of a file or the name of a preset, got {kind}")
        return Cluster.load(cluster)

    @property
    def world_size(self) -> int:
        """The number of devices; one rank each."""
        return world_size(self.levels)

    def axes(self, shape: tuple[int, ...]) -> tuple[AxisLink, ...]:
        """The link that the groups of each axis of such a mesh use. Raises InputError unless it fills the world."""
        return axis_links(self.levels, tuple(shape))

    def mesh_shapes(self, world: int | None = None, max_dims: int = 3) -> tuple[tuple[int, ...], ...]:
        """Every mesh shape over `world` ranks (None: all of the cluster's), at most `max_dims` axes."""
        return mesh_shapes(self.world_size if world is None else world, max_dims)

    def scaled(self, link_factor: float) -> Cluster:
        """A described cluster, the same but for links `link_factor` times faster (latency and bandwidth)."""
        _check(_positive(link_factor), f"cluster {self.name!r}", "link_factor", link_factor)
        note = f"links x {link_factor:g}"
        levels = tuple(level.scaled(link_factor) for level in self.levels)
        return Cluster(f"{self.name} ({note})", self.device, levels, f"described: {note} of: {self.source}")

    def to_dict(self) -> dict:
        """Plain data for JSON, in base units; `from_dict` reads it back."""
        device = self.device
        return {
            "name": self.name,
            "source": self.source,
            "device": {
                "name": device.name,
                "memory_bytes": int(device.memory_bytes),
                "memory_bytes_per_s": float(device.memory_bytes_per_s),
                "launch_s": float(device.launch_s),
                "flops_per_s": {dtype: float(value) for dtype, value in sorted(device.flops_per_s.items())},
            },
            "levels": [_level_dict(level) for level in self.levels],
        }

    @staticmethod
    def from_dict(data: object) -> Cluster:
        """The inverse of `to_dict`, validated like a file. Raises ClusterFileError."""
        from .files import parse_cluster

        return parse_cluster(data)

    def fingerprint(self) -> str:
        """sha256 of the canonical JSON: equal for equal clusters, on every machine and in every run."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __str__(self) -> str:
        levels = " x ".join(f"{level.size} {level.name}" for level in self.levels)
        return f"{self.name}: {self.world_size} x {self.device.name} ({levels}); {self.source}"


def _level_dict(level: Level) -> dict:
    data: dict = {
        "name": level.name,
        "size": int(level.size),
        "alpha_s": float(level.alpha_s),
        "bytes_per_s": float(level.bytes_per_s),
    }
    if level.fits:
        data["fits"] = {
            kind: {"alpha_s": float(alpha_s), "beta_s_per_byte": float(beta)}
            for kind, (alpha_s, beta) in sorted(level.fits.items())
        }
    return data
