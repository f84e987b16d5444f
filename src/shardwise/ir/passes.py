"""Small passes on graphs that every road takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .graph import BACKWARD, FORWARD, Arg, Graph, Node, Ref, Value, map_arg
from .liveness import storage_of


def recompute(graph: Graph) -> Graph:
    """Backward makes again what it does not keep: its own views, and what lies in the user's checkpointed regions.

    A view costs nothing to make again, and its operand is saved or gathered as the plan decides, so that nothing but
    storage crosses from forward to backward. Of a region only what others read of it outlives forward.
    """
    maker = {v.name: n for n in graph.nodes for v in n.results if v is not None}
    kept = _read_outside(graph, maker)
    owner = storage_of(graph)
    copies: dict[str, str] = {}
    nodes: list[Node] = []

    def made_again(node: Node | None, name: str) -> bool:
        if node is None or node.phase == BACKWARD:
            return False
        return is_view(node) or (node.recompute is not None and owner[name] not in kept)

    def local_name(name: str) -> str:
        """The name under which backward reads a value."""
        for todo in _first_to_make(name, maker, copies, made_again):
            node = maker[todo]
            new = {n: copies.get(n, n) for n in node.operands}
            for value in node.results:
                if value is not None:
                    copies[value.name] = f"{value.name}_b"
            results = tuple(None if v is None else _renamed(v, copies, new) for v in node.results)
            nodes.append(replace(rename_operands(node, new), results=results, phase=BACKWARD))
        return copies.get(name, name)

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
    return replace(graph, nodes=tuple(nodes), outputs=outputs, made_by="recompute")


def _read_outside(graph: Graph, maker: dict[str, Node]) -> set[str]:
    """Storages of checkpointed regions that forward reads outside of their region, or that leave the program."""
    owner = storage_of(graph)
    found = {owner[o.name] for o in graph.outputs if o.name is not None and o.kind != "gradient"}
    for node in graph.nodes:
        if node.phase == FORWARD:
            found |= {owner[n] for n in node.operands if n in maker and maker[n].recompute != node.recompute}
    return found


def _first_to_make(
    name: str, maker: dict[str, Node], copies: dict[str, str], made_again: Callable[[Node | None, str], bool]
) -> list[str]:
    """What has to be made again for a value, in order. Not recursive: a region may hold thousands of nodes."""
    order: list[str] = []
    seen: set[str] = set()
    stack = [(name, False)]
    while stack:
        here, ready = stack.pop()
        if ready:
            order.append(here)
        elif here not in copies and here not in seen and made_again(maker.get(here), here):
            seen |= {v.name for v in maker[here].results if v is not None}
            stack.append((here, True))
            stack += [(n, False) for n in maker[here].operands]
    return order


def without_sources(graph: Graph) -> Graph:
    """Without the user's lines, which differ where the same model lies in another folder."""
    return replace(graph, nodes=tuple(replace(n, source="") for n in graph.nodes))


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


def leaving_views(graph: Graph) -> set[int]:
    """Indices of the views of backward that only lead to outputs."""
    read: set[str] = set()
    found: set[int] = set()
    for k in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[k]
        names = {v.name for v in node.results if v is not None}
        if node.phase == BACKWARD and is_view(node) and not names & read:
            found.add(k)
        else:
            read.update(node.operands)
    return found


def leaving(graph: Graph) -> frozenset[str]:
    """The values of backward that nothing reads but outputs, and views that lead to them."""
    views = leaving_views(graph)
    read = {name for k, n in enumerate(graph.nodes) if k not in views for name in n.operands}
    made = {v.name for n in graph.nodes if n.phase == BACKWARD for v in n.results if v is not None}
    return frozenset(made - read)
