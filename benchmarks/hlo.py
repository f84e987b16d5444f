"""The bytes that the collectives of a compiled HLO module put on the wire, per device."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.cost.collectives import bytes_on_wire

ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
KINDS = {
    "all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
}  # fmt: skip
_CALL = re.compile(
    r"=\s+(\(.*?\)|\S+)\s+(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


def collective_bytes(text: str) -> dict[str, float]:
    """Kind -> bytes, loops counted as often as they run."""
    bodies = dict(_computations(text))
    count = re.search(r"num_partitions=(\d+)", text)
    devices = int(count[1]) if count else 1
    times = _times(bodies)
    found: dict[str, float] = {}
    for name, lines in bodies.items():
        for line in lines:
            match = _CALL.search(line)
            if match is None:
                continue
            kind, size = match[2], _group_size(line, devices)
            nbytes = sum(_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(match[1]))
            if kind == "collective-permute":
                wire = float(nbytes)
            elif kind == "reduce-scatter":  # the result is one piece of the tensor
                wire = bytes_on_wire("reduce_scatter", nbytes * size, size)
            elif kind == "all-to-all":  # the result is what one device holds
                wire = bytes_on_wire("all_to_all", nbytes * size, size)
            else:
                wire = bytes_on_wire(KINDS[kind], nbytes, size)
            found[kind] = found.get(kind, 0.0) + wire * times.get(name, 1)
    return found


def _bytes(dtype: str, dims: str) -> int:
    count = 1
    for d in dims.split(","):
        count *= int(d) if d else 1
    return count * ITEM_BYTES.get(dtype, 0)


def _group_size(line: str, devices: int) -> int:
    """Devices of a group; all of them where none are listed."""
    if match := _LISTED.search(line):
        return len(match[1].split(","))
    if match := _IOTA.search(line):
        return int(match[2])
    return devices


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", []
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")) and line.rstrip().endswith("{"):
            name, lines = line.removeprefix("ENTRY ").split()[0].lstrip("%"), []
        elif line.startswith("}"):
            yield name, lines
        else:
            lines.append(line)


def _times(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often every computation runs: the trip counts that the compiler knows, nested ones multiplied."""
    inside: dict[str, tuple[str, int]] = {}
    for name, lines in bodies.items():
        for line in lines:
            if match := re.search(r"body=%?([\w.\-]+)", line):
                count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                inside[match[1]] = (name, int(count[1]) if count else 1)

    def times(name: str) -> int:
        if name not in inside:
            return 1
        outer, count = inside[name]
        return count * times(outer)

    return {name: times(name) for name in bodies}
