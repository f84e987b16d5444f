"""What all benchmarks share: options, the machine, rows, targets, and the JSON that they are written in.

    {"machine": {...}, "rows": [...], "targets": [{"name", "value", "limit", "sense", "met", "modelled"}]}

A benchmark is a function `measure(quick) -> (rows, values)`; `run` does the rest. Every target stands in every run:
one that was not measured has null for value and met. The exit code says whether it ran, not what was met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A limit that an issue names. `modelled`: the value comes from a model, not from a clock."""

    name: str
    limit: float
    sense: str = "<="
    modelled: bool = False

    def judged(self, value: float | None) -> dict[str, Any]:
        """The target with its value."""
        assert self.sense in ("<=", ">=")
        met = None if value is None else (value <= self.limit if self.sense == "<=" else value >= self.limit)
        keys = {"name": self.name, "value": value, "limit": self.limit, "sense": self.sense}
        return keys | {"met": met, "modelled": self.modelled}


def machine(**more: Any) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    from shardwise.cluster import read_machine

    found = read_machine()
    facts = {
        "cpu": found.cpu_name,
        "cores": found.cores,
        "memory_gib": round(found.memory_bytes / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts | more


def run(
    doc: str | None,
    targets: tuple[Target, ...],
    measure: Callable[[argparse.Namespace], tuple[list[Row], Mapping[str, float | None]]],
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="five minutes on two cores; may measure fewer targets")
    options(parser)
    chosen = parser.parse_args()
    facts = machine()
    start = time.perf_counter()
    rows, values = measure(chosen)
    unknown = set(values) - {t.name for t in targets}
    assert not unknown, f"no such targets: {unknown}"
    judged = [t.judged(values.get(t.name)) for t in targets]
    facts["seconds"] = round(time.perf_counter() - start, 1)
    show(facts, rows, judged)
    if chosen.json:
        data = {"machine": facts, "rows": rows, "targets": judged}
        chosen.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def show(facts: Row, rows: list[Row], targets: list[Row]) -> None:
    """For people."""
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    for row in rows:
        print("  " + ", ".join(f"{key} {_short(value)}" for key, value in row.items()))
    for t in targets:
        value = "not measured" if t["value"] is None else f"{_short(t['value'])}"
        verdict = {True: "met", False: "MISSED", None: "-"}[t["met"]]
        print(f"{t['name']:<20} {value:>14}   {t['sense']} {t['limit']:<8g} {verdict}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def child(module: str, arguments: Mapping[str, Any], ranks: int | None = None, **env: str) -> list[Row]:
    """Runs `python -m MODULE --child JSON` in processes of its own, `ranks` of them under torchrun, and returns the
    rows that it printed with `report`."""
    command = [sys.executable]
    if ranks is not None:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", module, "--child", json.dumps(arguments)]
    found = {"OMP_WAIT_POLICY": "PASSIVE"} | dict(os.environ, **env)  # spinning threads suffer from a busy machine
    if sys.platform == "linux":
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{module} {arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return list(_rows(done.stdout))


def _rows(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        if line.startswith("ROW "):
            yield json.loads(line.removeprefix("ROW "))


def report(**row: Any) -> None:
    """A child's row for its parent."""
    print("ROW " + json.dumps(row), flush=True)


def is_child() -> dict[str, Any] | None:
    """The arguments, in a process that `child` started."""
    return json.loads(sys.argv[2]) if len(sys.argv) == 3 and sys.argv[1] == "--child" else None
