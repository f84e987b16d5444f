"""Random small planning problems, and the best plan of each by trying all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations, product

from shardwise.cluster import Cluster
from shardwise.cluster.links import Level
from shardwise.cluster.model import Device
from shardwise.ir.graph import BACKWARD, FORWARD, Graph, Input, Node, Output, Ref, Value
from shardwise.plan.evaluate import Assignment, Evaluation, evaluate, needed_layouts
from shardwise.plan.problem import Problem, Settings, Vertex, build_problem
from shardwise.rules.rule import DimRef, Factor, Rule

SIDE = 8
ROWS, COLUMNS = DimRef(0), DimRef(1)


def cluster(world: int) -> Cluster:
    """Slow enough devices and links that splitting pays sometimes."""
    device = Device("toy", {"float32": 1e9}, 1 << 30, 1e9, 1e-7)
    return Cluster("toy", device, (Level("link", world, 2e-7, 1e9),), "test")


def _unary(rng: random.Random) -> Rule:
    factors = [Factor((ROWS,), (ROWS,)), Factor((COLUMNS,), (COLUMNS,))]
    return Rule(tuple(rng.sample(factors, rng.randint(1, 2))), ((0,),) if rng.random() < 0.5 else ())


def _binary(rng: random.Random) -> Rule:
    factors = [Factor((ROWS, ROWS), (ROWS,)), Factor((COLUMNS, COLUMNS), (COLUMNS,))]
    return Rule(tuple(rng.sample(factors, rng.randint(1, 2))), ((0, 1),) if rng.random() < 0.5 else ())


def _product(rng: random.Random) -> Rule:
    return Rule(
        (Factor((ROWS, None), (ROWS,)), Factor((None, COLUMNS), (COLUMNS,)), Factor((COLUMNS, ROWS), ("sum",))), ()
    )


def _pair(rng: random.Random) -> Rule:
    return Rule((Factor((ROWS,), (ROWS, ROWS)), Factor((COLUMNS,), (COLUMNS, "sum"))), ())


def random_graph(rng: random.Random, operators: int) -> tuple[Graph, tuple[Rule, ...]]:
    """Parameters and inputs, operators of several kinds in forward and backward, gradients and outputs."""
    inputs = [Input(Value("w0", (SIDE, SIDE), "float32"), "parameter", "w0")]
    inputs.append(Input(Value("x0", (SIDE, SIDE), "float32"), "input", "x0"))
    values = {i.value.name: i.value for i in inputs}
    nodes, rules = [], []
    split = rng.randint(1, operators - 1)
    for k in range(operators):
        phase = FORWARD if k < split else BACKWARD
        recent = list(values)[-4:] + list(values)[:2]
        kind = rng.choice(("unary", "view", "binary", "product", "pair"))
        value = Value(f"v{k}", (SIDE, SIDE), "float32")
        args = [rng.choice(recent) for _ in range(2 if kind in ("binary", "product") else 1)]
        results: tuple[Value | None, ...] = (value,)
        if kind == "view":
            owner = args[0]
            results = (replace(value, alias=owner),)
        elif kind == "pair":
            second = Value(f"u{k}", (SIDE, SIDE), "float32")
            results = (value, second if rng.random() < 0.7 else None)
        make = {"unary": _unary, "view": _unary, "binary": _binary, "product": _product, "pair": _pair}[kind]
        nodes.append(Node(results, f"toy.{kind}", tuple(map(Ref, args)), phase=phase))
        rules.append(make(rng))
        values.update((v.name, v) for v in results if v is not None)
    forward = [v.name for n in nodes if n.phase == FORWARD for v in n.results if v is not None]
    backward = [v.name for n in nodes if n.phase == BACKWARD for v in n.results if v is not None]
    outputs = [Output(forward[-1], "output", "output 0"), Output(backward[-1], "gradient", "w0")]
    if rng.random() < 0.5:
        outputs.append(Output(rng.choice(backward), "output", "output 1"))
    return Graph(tuple(inputs), tuple(nodes), tuple(outputs)), tuple(rules)


def _thin(rng: random.Random, vertex: Vertex, most: int) -> Vertex:
    """The same vertex with at most so many of its strategies, the first among them."""
    count = len(vertex.seconds)
    some = [0, *sorted(rng.sample(range(1, count), min(count, most) - 1))]

    def pick(table: tuple) -> tuple:
        return tuple(table[k] for k in some) if table else table

    return replace(
        vertex,
        need_layouts=pick(vertex.need_layouts),
        give_layouts=pick(vertex.give_layouts),
        seconds=pick(vertex.seconds),
        choices=pick(vertex.choices),
        shares=pick(vertex.shares),
    )


def random_problem(seed: int, mesh: tuple[int, ...], most_plans: int = 700) -> Problem:
    """A problem with few enough plans to try them all."""
    rng = random.Random(seed)
    graph, rules = random_graph(rng, rng.randint(4, 8))
    flops = {n.name: rng.choice((0.0, 0.0, 500.0, 4000.0)) for n in graph.nodes}
    devices = 1
    for parts in mesh:
        devices *= parts
    problem = build_problem(graph, rules, cluster(devices), Settings(mesh), flops)
    tied = {k for pair in problem.ties for k in pair}
    most = 8
    while plans(problem) > most_plans:
        most = max(1, most - 1)
        thin = [v if k in tied else _thin(rng, v, most) for k, v in enumerate(problem.vertices)]
        problem.vertices[:] = thin
        if most == 1:
            break
    return problem


def plans(problem: Problem) -> int:
    """Assignments without the choice of what is kept; gradients follow their parameters."""
    total = 1
    gradients = {g for _, g in problem.ties}
    for k, vertex in enumerate(problem.vertices):
        total *= 1 if k in gradients else len(vertex.seconds)
    return total


def all_plans(problem: Problem) -> list[tuple[Assignment, Evaluation]]:
    """Every possible plan, with every set of kept copies."""
    gradients = {g: p for p, g in problem.ties}
    ranges = [[0] if k in gradients else range(len(v.seconds)) for k, v in enumerate(problem.vertices)]
    found = []
    for choice in product(*ranges):
        chosen = list(choice)
        for gradient, parameter in gradients.items():
            stored = problem.vertices[parameter].give_layouts[chosen[parameter]][0]
            needs = [n[0] for n in problem.vertices[gradient].need_layouts]
            chosen[gradient] = needs.index(stored) if stored in needs else 0
        copies = sorted(_copies(problem, tuple(chosen)), key=str)[:4]
        for kept in chain.from_iterable(combinations(copies, n) for n in range(len(copies) + 1)):
            assignment = Assignment(tuple(chosen), frozenset(kept))
            evaluation = evaluate(problem, assignment)
            if evaluation.seconds < float("inf"):
                found.append((assignment, evaluation))
    return found


def _copies(problem: Problem, chosen: tuple[int, ...]) -> list:
    from shardwise.plan.evaluate import layout_of

    found = []
    for name in problem.made_by:
        own = layout_of(problem, chosen, name)
        both = needed_layouts(problem, chosen, name, 0) & needed_layouts(problem, chosen, name, 1)
        found += [(name, q) for q in both if q != own]
    return found
