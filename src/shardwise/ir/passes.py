"""Small passes on graphs that every road takes."""

from __future__ import annotations

from dataclasses import replace

from .graph import BACKWARD, FORWARD, Arg, Graph, Node, Ref, Value, map_arg


def recompute_views(graph: Graph) -> Graph:
    """Backward makes its own views of what forward saved, so that nothing but storage crosses from one to the other.

    A view costs nothing to make again, and its operand is saved or gathered as the plan decides.
    """
    maker = {v.name: n for n in graph.nodes for v in n.results if v is not None}
    copies: dict[str, str] = {}
    nodes: list[Node] = []

    def local_name(name: str) -> str:
        """The name under which backward reads a value."""
        node = maker.get(name)
        if node is None or node.phase == BACKWARD or not is_view(node):
            return name
        if name not in copies:
            new = {n: local_name(n) for n in node.operands}
            for value in node.results:
                if value is not None:
                    copies[value.name] = f"{value.name}_b"
            results = tuple(None if v is None else _renamed(v, copies, new) for v in node.results)
            nodes.append(replace(rename_operands(node, new), results=results, phase=BACKWARD))
        return copies[name]

    for node in graph.nodes:
        if node.phase == FORWARD:
            nodes.append(node)
            continue
        new = {n: local_name(n) for n in node.operands}
        renamed = rename_operands(node, new)
        results = tuple(None if v is None else _renamed(v, {}, copies) for v in node.results)
        nodes.append(replace(renamed, results=results))
    outputs = tuple(
        replace(o, name=local_name(o.name)) if o.kind == "gradient" and o.name is not None else o for o in graph.outputs
    )
    return replace(graph, nodes=tuple(nodes), outputs=outputs, made_by="recompute_views")


def is_view(node: Node) -> bool:
    """Whether all results share storage with something before."""
    made = [v for v in node.results if v is not None]
    return bool(made) and all(v.alias is not None for v in made)


def _renamed(value: Value, own: dict[str, str], aliases: dict[str, str]) -> Value:
    alias = value.alias
    if alias is not None:
        alias = own.get(alias, aliases.get(alias, alias))
    return replace(value, name=own.get(value.name, value.name), alias=alias)


def rename_operands(node: Node, names: dict[str, str]) -> Node:
    """The node reading other values."""

    def change(leaf: Arg) -> Arg:
        return Ref(names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

    return replace(
        node,
        args=tuple(map_arg(a, change) for a in node.args),
        kwargs=tuple((k, map_arg(a, change)) for k, a in node.kwargs),
    )


def fix_aliases(graph: Graph) -> Graph:
    """Where the owner of a storage was dropped, or moved behind its alias, the first that is left owns it."""
    names = {i.value.name for i in graph.inputs}
    known: set[str] = set()
    owner: dict[str, str] = {}

    def fixed(value: Value) -> Value:
        if value.alias is not None and value.alias not in known:
            first = owner.setdefault(value.alias, value.name)
            value = replace(value, alias=None if first == value.name else first)
        known.add(value.name)
        return value

    # Inputs may stand in any order, so one that owns a storage is known to all of them.
    inputs = [replace(i, value=fixed(i.value)) if i.value.alias not in names else i for i in graph.inputs]
    known |= names
    nodes = [replace(n, results=tuple(None if v is None else fixed(v) for v in n.results)) for n in graph.nodes]
    return replace(graph, inputs=tuple(inputs), nodes=tuple(nodes))
