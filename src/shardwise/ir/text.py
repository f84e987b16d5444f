"""The printed form of a graph: deterministic, readable, and parsed back by `parse_graph`.

    graph NAME {  # made by PASS
      input x: float32[4, 8] as parameter "fc.weight"
      y: float32[4, 8], z: float32[4] of x = aten.op.overload(x, [1, 2], dtype=Literal("dtype", "float32"))  @ {...}
      tie y, z
      output y as output "0"
    }

A type is dtype[shape], with `/ strides` inside the brackets where the value is not contiguous, and `of NAME` behind
it where it shares NAME's storage. Behind `@` stand the phase (if backward), the recompute tag, the user's line and the
loops around.
"""

from __future__ import annotations

import ast
import json
import math
import re

from .graph import FORWARD, Arg, Graph, Input, Literal, Node, Output, Ref, Value


def format_arg(arg: Arg) -> str:
    """One argument, as Python would read it."""
    if isinstance(arg, Ref):
        return arg.name
    if isinstance(arg, Literal):
        return f"{arg.kind}({json.dumps(arg.text)})"
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(format_arg, arg)) + "]"
    if isinstance(arg, float) and not math.isfinite(arg):
        return f'float("{arg}")'
    if isinstance(arg, str):
        return json.dumps(arg)
    return repr(arg)


def format_value(value: Value | None) -> str:
    """`name: dtype[shape]` and what is unusual about it; `_` where the operator returns nothing."""
    if value is None:
        return "_"
    strides = "" if value.stride is None else " / " + ", ".join(map(str, value.stride))
    alias = "" if value.alias is None else f" of {value.alias}"
    return f"{value.name}: {value.dtype}[{', '.join(map(str, value.shape))}{strides}]{alias}"


def format_node(node: Node) -> str:
    """One line for one node."""
    args = [format_arg(a) for a in node.args] + [f"{k}={format_arg(a)}" for k, a in node.kwargs]
    notes = {}
    if node.phase != FORWARD:
        notes["phase"] = node.phase
    if node.recompute is not None:
        notes["recompute"] = node.recompute
    if node.source:
        notes["source"] = node.source
    if node.region is not None:
        notes["region"] = node.region
    if node.loop:
        notes["loop"] = node.loop
    results = "; ".join(map(format_value, node.results))
    line = f"{results} = {node.op}({', '.join(args)})"
    return f"{line}  @ {json.dumps(notes)}" if notes else line


def format_graph(graph: Graph) -> str:
    """The whole graph; `parse_graph` is its inverse."""
    lines = [f"graph {graph.name} {{" + (f"  # made by {graph.made_by}" if graph.made_by else "")]
    lines += [f"  input {format_value(i.value)} as {i.kind} {json.dumps(i.path)}" for i in graph.inputs]
    lines += [f"  {format_node(node)}" for node in graph.nodes]
    lines += [f"  tie {a}, {b}" for a, b in graph.ties]
    lines += [f"  output {o.name or '_'} as {o.kind} {json.dumps(o.path)}" for o in graph.outputs]
    return "\n".join([*lines, "}"]) + "\n"


_VALUE = re.compile(r"(\w+): (\w+)\[([^\]/]*?)(?: / ([^\]]*))?\](?: of (\w+))?$")


def _parse_ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(",") if part.strip())


def parse_value(text: str) -> Value | None:
    """The inverse of `format_value`."""
    text = text.strip()
    if text == "_":
        return None
    match = _VALUE.match(text)
    if match is None:
        raise ValueError(f"not a value: {text!r}")
    name, dtype, shape, strides, alias = match.groups()
    return Value(name, _parse_ints(shape), dtype, None if strides is None else _parse_ints(strides), alias)


def _parse_expr(expr: ast.expr) -> Arg:
    if isinstance(expr, ast.Name):
        return Ref(expr.id)
    if isinstance(expr, ast.List):
        return tuple(_parse_expr(e) for e in expr.elts)
    if isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name):
        text = ast.literal_eval(expr.args[0])
        return float(text) if expr.func.id == "float" else Literal(expr.func.id, text)
    return ast.literal_eval(expr)


def _parse_node(line: str) -> Node:
    body, at, notes_text = line.rpartition("  @ {")
    if not at:
        body, notes = line, {}
    else:
        notes = json.loads("{" + notes_text)
    left, _, right = body.partition(" = ")
    op, _, rest = right.partition("(")
    call = ast.parse(f"f({rest}", mode="eval").body
    assert isinstance(call, ast.Call)
    return Node(
        results=tuple(parse_value(part) for part in left.split(";")) if left.strip() else (),
        op=op,
        args=tuple(_parse_expr(a) for a in call.args),
        kwargs=tuple((str(k.arg), _parse_expr(k.value)) for k in call.keywords),
        phase=notes.get("phase", FORWARD),
        recompute=notes.get("recompute"),
        source=notes.get("source", ""),
        region=notes.get("region"),
        loop=notes.get("loop", ""),
    )


def parse_graph(text: str) -> Graph:
    """The inverse of `format_graph`. Raises ValueError naming the line that cannot be read."""
    lines = [line.strip() for line in text.strip().splitlines()]
    header = re.match(r"graph (\S+) \{(?:  # made by (.*))?$", lines[0])
    if header is None or lines[-1] != "}":
        raise ValueError("a graph starts with 'graph NAME {' and ends with '}'")
    inputs, nodes, outputs, ties = [], [], [], []
    for number, line in enumerate(lines[1:-1], start=2):
        try:
            if match := re.match(r'input (.*) as (\w+) (".*")$', line):
                value = parse_value(match[1])
                assert value is not None
                inputs.append(Input(value, match[2], json.loads(match[3])))
            elif match := re.match(r'output (\w+) as (\w+) (".*")$', line):
                outputs.append(Output(None if match[1] == "_" else match[1], match[2], json.loads(match[3])))
            elif match := re.match(r"tie (\w+), (\w+)$", line):
                ties.append((match[1], match[2]))
            else:
                nodes.append(_parse_node(line))
        except (ValueError, SyntaxError, AssertionError) as error:
            raise ValueError(f"line {number}: cannot read {line!r}: {error}") from error
    return Graph(tuple(inputs), tuple(nodes), tuple(outputs), header[1], header[2] or "", tuple(ties))
