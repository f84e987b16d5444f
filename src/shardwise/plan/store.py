"""Plans on disk: one file per planning problem, named by the hash of everything that a plan depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..cluster import Cluster
from ..ir import disk
from ..ir.graph import Graph
from ..ir.text import format_graph
from ..rules.rule import Rule
from .plan import FORMAT, Plan
from .problem import Settings

_SOURCES = ("plan", "solve", "cost", "cluster", "ir")
_WHAT = "the plan"


def plan_key(graph: Graph, rules: Iterable[Rule], cluster: Cluster, settings: Sequence[Settings]) -> str:
    """Equal for equal problems, on every machine and in every run; where in the user's files they stand is no part."""
    graph = replace(graph, nodes=tuple(replace(node, source="") for node in graph.nodes))
    digest = hashlib.sha256()
    parts = (
        disk.source_digest(_SOURCES),
        format_graph(graph),
        json.dumps([rule.to_dict() for rule in rules], sort_keys=True),
        cluster.fingerprint(),
        repr(list(settings)),
    )
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _path(key: str) -> Path:
    return disk.cache_dir() / "plans" / f"{key[:32]}.json"


def load_plan(key: str) -> Plan | None:
    """The plan of a problem that was solved before."""

    def parse(text: str) -> Plan:
        content = disk.decode("plan", text, FORMAT)
        if content["key"] != key:
            raise ValueError("it answers another problem")
        return Plan.from_json(json.dumps(content["plan"]))

    return disk.read(_path(key), _WHAT, parse)


def save_plan(key: str, plan: Plan) -> None:
    """Keeps a plan for the next run."""
    content = {"key": key, "plan": json.loads(plan.to_json())}
    disk.write(_path(key), _WHAT, disk.encode("plan", content, FORMAT))
