"""Quantities as people write them: "40GiB", "600GB/s", "200Gbit/s", "10us", "312TFLOPS". Plain numbers are base units.

Case matters, since "Gb" and "GB" differ by 8.
"""

from __future__ import annotations

import re

from ..errors import InputError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()}
_BITS_PER_S = {f"{p}{unit}": f / 8 for p, f in _DECIMAL.items() for unit in ("bit/s", "bps")}

UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes_per_s": {f"{unit}/s": f for unit, f in _BYTES.items()} | _BITS_PER_S,
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9},
    "flops_per_s": {f"{p}{unit}": f for p, f in _DECIMAL.items() for unit in ("FLOPS", "FLOP/s", "FLOPs")},
}
EXAMPLES = {
    "bytes": 'a size such as "40GiB", or bytes as a number',
    "bytes_per_s": 'a bandwidth such as "600GB/s", or bytes per second as a number',
    "s": 'a time such as "10us", or seconds as a number',
    "flops_per_s": 'a rate such as "312TFLOPS", or operations per second as a number',
    "s_per_byte": "seconds per byte as a number",
}

_QUANTITY = re.compile(r"\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)\s*")


def parse_quantity(text: str, unit: str) -> float:
    """The value of `text` in base units. Raises ValueError that says what was wrong."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a number with a unit")
    number, suffix = match.groups()
    known = UNITS.get(unit, {})
    if suffix and suffix not in known:
        same = [name for name in known if name.lower() == suffix.lower()]
        hint = f'; did you mean "{same[0]}"?' if same else f"; known units are {', '.join(sorted(known, key=len)[:12])}"
        raise ValueError(f"{suffix!r} is no unit here{hint if known else ''}")
    return float(number) * known.get(suffix, 1.0)


def memory_bytes(limit: int | str | None) -> int | None:
    """`"40GiB"` -> bytes. Raises InputError for anything else than a positive size."""
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit > 0):
        return limit
    try:
        value = int(parse_quantity(limit, "bytes")) if isinstance(limit, str) else 0
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise InputError(f"memory_limit: expected bytes or a size such as '40GiB', got {limit!r}")
    return value
