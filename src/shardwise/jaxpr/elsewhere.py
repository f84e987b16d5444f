"""Discovers rules in a process of its own.

The discovery forks children, and a process in which a backend of jax runs cannot be forked: its threads are missing in
the child. So calls go to a new process that starts no backend, which forks as it likes:
`python -m shardwise.jaxpr.elsewhere` reads one JSON list of calls, and writes a line for every rule found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from ..errors import PlanError
from ..ir.graph import Graph, Input, Node, Ref, Value, leaves, replace_leaves
from ..ir.runner import Call, OpRunner, call_of
from ..ir.text import format_graph, parse_graph
from ..rules.rule import Rule
from ..rules.sandbox import discover_all

Progress = Callable[[int, int], None]


def discover_elsewhere(
    calls: Sequence[Call], runner: OpRunner, progress: Progress = lambda done, total: None
) -> list[Rule]:
    """The rules of proxy calls, in order. Survives whatever happens to the process."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    rules: dict[int, Rule] = {}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([write_call(c) for c in calls]))
            process.stdin.close()
            for line in process.stdout:
                if line.startswith('{"rule"'):
                    data = json.loads(line)
                    rules[data["index"]] = Rule.from_dict(data["rule"])
                    progress(len(rules), len(calls))
        finally:
            if process.poll() is None and len(rules) < len(calls):
                process.terminate()
    if len(rules) < len(calls):
        raise PlanError(
            f"the process that finds rules ended early (exit code {process.returncode}) after {len(rules)} of "
            f"{len(calls)}; its last words stand above"
        )
    return [rules[k] for k in range(len(calls))]


def write_call(call: Call) -> str:
    """A call as the text of a graph with one node."""
    names = [f"x{k}" for k in range(len(call.operands))]
    inputs = tuple(Input(Value(n, m.shape, m.dtype), "input", n) for n, m in zip(names, call.operands))
    new = {p: Ref(names[int(a.name)]) for p, a in leaves(call.args, call.kwargs) if isinstance(a, Ref)}
    args, kwargs = replace_leaves(call.args, call.kwargs, dict(new))
    return format_graph(Graph(inputs, (Node((None,), call.op, args, kwargs),), ()))


def read_call(text: str) -> Call:
    """The inverse of `write_call`."""
    graph = parse_graph(text)
    return call_of(graph.nodes[0], graph.values)[0]


def main() -> None:
    """The process of its own."""
    from .runner import JaxRunner

    calls = [read_call(text) for text in json.load(sys.stdin)]
    told = sys.stdout

    def tell(index: int, rule: Rule) -> None:
        told.write(json.dumps({"rule": rule.to_dict(), "index": index}) + "\n")
        told.flush()

    for start in range(0, len(calls), BATCH):
        part = calls[start : start + BATCH]
        for k, rule in enumerate(discover_all(part, JaxRunner())):
            tell(start + k, rule)


BATCH = 8
"""Calls that share a child: a child starts a backend of its own, and reports when it is through with all."""

if __name__ == "__main__":
    main()
