"""A graph with all its rules, and its place on disk.

Finding the rules of a graph asks the framework for decompositions and strides even where every rule is known. What
came of it is kept under the hash of the graph and of the sources that decide it, so that the next run only reads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ir import disk
from ..ir.graph import Graph, Node
from ..ir.text import format_graph, parse_graph
from .rule import Rule

FORMAT = 1
"""Version of the JSON form."""
_SOURCES = ("rules", "ir", "pytorch")
_WHAT = "the rules of a graph"


@dataclass(frozen=True)
class Ruled:
    """A graph with decompositions where they help, its rules, and what the decompositions stand for."""

    graph: Graph
    rules: tuple[Rule, ...]
    """One per node."""
    regions: dict[str, Node]
    """Region -> the node that it replaces."""
    fused_rules: dict[str, Rule]
    """Region -> the rule of that node."""
    discovered: int = 0
    """Rules found by running operators just now."""


def ruled_key(graph: Graph, framework: str) -> str:
    """Equal for graphs that print alike, for one framework version and one version of the discovery."""
    digest = hashlib.sha256()
    for part in (framework, disk.source_digest(_SOURCES), format_graph(graph)):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _path(key: str) -> Path:
    return disk.cache_dir() / "graphs" / f"{key[:32]}.json"


def save_ruled(key: str, ruled: Ruled) -> None:
    """Keeps what was found for the next run."""
    numbers: dict[Rule, int] = {}
    content = {
        "key": key,
        "graph": format_graph(ruled.graph),
        "of": [numbers.setdefault(rule, len(numbers)) for rule in ruled.rules],
        "regions": {name: node.name for name, node in ruled.regions.items()},
        "fused": {name: numbers.setdefault(rule, len(numbers)) for name, rule in ruled.fused_rules.items()},
    }
    content["rules"] = [rule.to_dict() for rule in numbers]
    disk.write(_path(key), _WHAT, disk.encode("ruled", content, FORMAT))


def load_ruled(key: str, graph: Graph) -> Ruled | None:
    """What an earlier run found for `graph`."""
    nodes = {node.name: node for node in graph.nodes}

    def parse(text: str) -> Ruled:
        content: dict[str, Any] = disk.decode("ruled", text, FORMAT)
        try:
            if content["key"] != key:
                raise ValueError("it answers another graph")
            rules = [Rule.from_dict(data) for data in content["rules"]]
            opened = parse_graph(content["graph"])
            of = content["of"]
            if len(of) != len(opened.nodes):
                raise ValueError(f"{len(of)} rules for {len(opened.nodes)} nodes")
            return Ruled(
                opened,
                tuple(rules[k] for k in of),
                {name: nodes[node] for name, node in content["regions"].items()},
                {name: rules[k] for name, k in content["fused"].items()},
            )
        except (LookupError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    return disk.read(_path(key), _WHAT, parse)
