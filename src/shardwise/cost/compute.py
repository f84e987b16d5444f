"""Seconds of an operator on one device: the roofline and a launch."""

from __future__ import annotations

from ..cluster.model import Device


def roofline_s(flops: float, read_write_bytes: float, dtype: str, device: Device) -> float:
    """The longer of arithmetic and memory traffic, plus the launch.

    S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
    architectures", Communications of the ACM 52(4), 2009. `dtype` is a name such as "float32".
    """
    arithmetic_s = flops / device.flops_per_s_of(dtype)
    memory_s = read_write_bytes / device.memory_bytes_per_s
    return max(arithmetic_s, memory_s) + device.launch_s
