"""The command line. Every command has --json, shows progress on long work, and exits with 0 only on success."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .api import audit_rules, plan_model, rules_of, ship_rules
from .demo import LARGEST_DIFFERENCE, Comparison, Options, run_demo
from .errors import InputError, ShardwiseError
from .models.training import Recipe
from .plan.describe import human_bytes, human_seconds
from .plan.plan import Plan
from .report.audit import audit_data, audit_lines, audit_page, audit_table
from .report.tables import curves, plan_tables, rule_rows, rule_table

app = cyclopts.App(name="shardwise", help="Trains and runs an unmodified model on many devices, planned automatically.")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Json = Annotated[bool, cyclopts.Parameter(name="--json", negative="", help="Print one JSON object, nothing else.")]


@app.command
def demo(
    *,
    ranks: int = 2,
    steps: int = 100,
    rows: int = 8,
    measure: Annotated[bool, cyclopts.Parameter(negative="")] = False,
    port: int | None = None,
    as_json: Json = False,
) -> int:
    """Train a small GPT on the Python standard library's source, on local ranks and on one process.

    Fails where the loss curves differ, or where the loss does not fall.

    Parameters
    ----------
    ranks
        Local processes of the parallel run.
    steps
        Training steps; at least 20.
    rows
        Rows of 128 bytes in the batch of a step, all ranks together.
    measure
        Measure the machine anew instead of taking the numbers of an earlier run.
    port
        A fixed port for the ranks to meet; by default a free one.
    """
    if ranks < 1 or steps < 20 or rows < 1:
        raise InputError("demo: expected ranks >= 1, steps >= 20 and rows >= 1")
    view = _DemoView(err if as_json else out, steps)
    with view.progress:
        found = run_demo(Options(ranks, Recipe(steps=steps, rows=rows), measure, port), view.watch)
    if as_json:
        print(json.dumps(_demo_data(found)))
    else:
        _show_demo(found)
    for failure in found.failures:
        err.print(f"demo failed: {failure}", style="bold red")
    return 1 if found.failures else 0


class _DemoView:
    """Progress of the demo, as its runs report."""

    def __init__(self, console: Console, steps: int):
        self.console, self.steps = console, steps
        self.progress = _progress(console)
        self.tasks: dict[str, Any] = {}
        self.kind = ""

    def watch(self, name: str, event: dict[str, Any]) -> None:
        """One event of `run_demo`."""
        if name == "start":
            self.kind = {"parallel": "parallel run", "single": "one process"}[event["kind"]]
        elif name == "progress":
            self._advance({"rules": "finding rules", "plan": "planning"}[event["stage"]], event["done"], event["total"])
        elif name == "step":
            if not self.console.is_terminal and event["number"] % 20 == 0:  # a log shows no bars until they end
                self.console.print(f"{self.kind}: step {event['number']}, loss {event['loss']:.3f}")
            self._advance(f"{self.kind}, loss {event['loss']:.3f}", event["number"] + 1, self.steps, key=self.kind)
        elif name == "planned":
            self._planned(event)

    def _advance(self, text: str, done: int, total: int, key: str | None = None) -> None:
        key = key or text
        if key not in self.tasks:
            self.tasks[key] = self.progress.add_task(text, total=total)
        self.progress.update(self.tasks[key], completed=done, total=total, description=text)

    def _planned(self, event: dict[str, Any]) -> None:
        origin = event["origin"]
        count = origin["discovered"]
        where = f"{count} discovered by running operators" if count else "all rules known"
        self.console.print(f"rules: {origin['operators']} nodes, {where} ({human_seconds(origin['rules_s'])})")
        how = "from the cache" if origin["plan_cached"] else "solved"
        self.console.print(f"plan: {how} ({human_seconds(origin['plan_s'])})")
        for table in plan_tables(Plan.from_json(json.dumps(event["plan"]))):
            self.console.print(table)


def _show_demo(found: Comparison) -> None:
    parallel, single, plan = found.parallel, found.single, found.parallel.plan
    assert plan is not None
    out.print(curves({f"{len(parallel.peaks)} ranks": parallel.losses, "one process": single.losses}))
    at = sorted({0, *range(19, len(parallel.losses), 20), len(parallel.losses) - 1})
    for name, losses in (("ranks", parallel.losses), ("one", single.losses)):
        out.print(f"  loss, {name:<6}" + "  ".join(f"{losses[k]:.5f}" for k in at))
    out.print("  at step      " + "  ".join(f"{k:<7}" for k in at))
    peaks = " and ".join(human_bytes(p) for p in parallel.peaks)
    whole, single_whole = human_seconds(parallel.whole_s), human_seconds(single.whole_s)
    out.print(
        f"step time     predicted {human_seconds(plan.seconds)}, measured {human_seconds(parallel.step_s)} "
        f"(with the optimizer {whole}); {parallel.threads} thread(s) a rank"
    )
    out.print(
        f"one process   measured {human_seconds(single.step_s)} (with the optimizer {single_whole}); "
        f"{single.threads} thread(s)"
    )
    out.print(
        f"peak memory   predicted {human_bytes(plan.peak_bytes)}, measured {peaks} "
        f"(one process: {human_bytes(single.peaks[0])})"
    )
    out.print(
        f"loss          fell by {found.fall:.2f} nats; the curves differ by at most {found.difference:.1e} relative "
        f"(limit {LARGEST_DIFFERENCE:.0e})"
    )


def _demo_data(found: Comparison) -> dict[str, Any]:
    plan = found.parallel.plan
    assert plan is not None
    return {
        "losses": {"parallel": found.parallel.losses, "single": found.single.losses},
        "difference": found.difference,
        "fall": found.fall,
        "predicted": {"step_s": plan.seconds, "peak_bytes": plan.peak_bytes},
        "measured": {
            "step_s": found.parallel.step_s,
            "with_optimizer_s": found.parallel.whole_s,
            "peak_bytes": found.parallel.peaks,
            "single_step_s": found.single.step_s,
            "single_peak_bytes": found.single.peaks[0],
        },
        "origin": found.parallel.origin,
        "failures": found.failures,
    }


@app.command
def plan(
    model: str,
    *,
    mesh: str | None = None,
    cluster: str = "a100x8",
    memory_limit: str | None = None,
    explain: list[str] | None = None,
    save: Path | None = None,
    as_json: Json = False,
) -> int:
    """Plan a model for a described cluster, without devices or ranks.

    Parameters
    ----------
    model
        FILE:FUNCTION; FUNCTION returns (model, args) or (model, args, kwargs). The model may be on the meta device.
    mesh
        A shape such as 2,4; by default the planner chooses.
    cluster
        A preset or a .toml or .json file.
    memory_limit
        Per device, such as 40GiB.
    explain
        Path of a parameter or input to explain; may be given several times.
    save
        Write the plan as JSON into this file.
    """
    with _strangers_to_stderr(), _stages() as progress:
        module, args, kwargs = load_model(model)
        found = plan_model(
            module,
            args,
            example_kwargs=kwargs,
            mesh=_shape(mesh),
            cluster=cluster,
            memory_limit=memory_limit,
            progress=progress,
        )
    try:
        explained = {path: found.plan.explain(path) for path in explain or []}
    except KeyError as error:
        raise InputError(f"--explain: {error.args[0]}") from None
    if save is not None:
        try:
            save.write_text(found.plan.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--save {save}: {error.strerror}") from None
    if as_json:
        print(json.dumps({"plan": json.loads(found.plan.to_json()), "explain": explained}))
        return 0
    for table in plan_tables(found.plan):
        out.print(table)
    for text in explained.values():
        out.print(text, markup=False)
    return 0


@app.command
def rules(
    model: str | None = None, *, ship: Annotated[bool, cyclopts.Parameter(negative="")] = False, as_json: Json = False
) -> int:
    """Show how every operator of a model splits, in factor notation, and where each rule came from.

    Parameters
    ----------
    model
        FILE:FUNCTION; FUNCTION returns (model, args) or (model, args, kwargs). The model may be on the meta device.
    ship
        Instead, find the rules of common operators anew and rewrite the book that ships with the package.
    """
    if (model is None) != ship:
        raise InputError("rules: expected FILE:FUNCTION, or --ship alone")
    if model is None:
        with _strangers_to_stderr(), _stages() as progress:
            count = ship_rules(progress)
        print(json.dumps({"shipped": count}) if as_json else f"{count} rules written into the shipped book")
        return 0
    with _strangers_to_stderr(), _stages() as progress:
        module, args, kwargs = load_model(model)
        found = rules_of(module, args, example_kwargs=kwargs, progress=progress)
    rows = rule_rows(found.graph, found.rules)
    whole = sorted({op for op, _, _, _ in rows} - {op for op, text, _, _ in rows if text != "replicated only"})
    if as_json:
        keys = ("operator", "rule", "from", "nodes")
        data = {
            "rules": [dict(zip(keys, row)) for row in rows],
            "replicated_only": whole,
            "discovered": found.discovered,
        }
        print(json.dumps(data))
        return 0
    out.print(rule_table(rows), markup=False)
    out.print(f"{len(found.graph.nodes)} nodes, {len(rows)} rules, {found.discovered} of them discovered now")
    out.print("operators that can only be replicated: " + (", ".join(whole) or "none"))
    return 0


@app.command
def audit(*operators: str, calls: int = 3, write: Path | None = None, as_json: Json = False) -> int:
    """Compare the discovered rules with those of torch.distributed.tensor, and let execution decide who is right.

    Parameters
    ----------
    operators
        Names such as mm, aten.mm or aten.mm.default; by default all of PyTorch's own operator database.
    calls
        Calls of different kinds of every operator, at most.
    write
        Write the result as a page of Markdown into this file.
    """
    with _strangers_to_stderr(), _stages() as progress:
        report = audit_rules(operators, calls_each=calls, progress=progress)
    if write is not None:
        command = " ".join(["shardwise audit", *operators, f"--calls {calls} --write {write}"])
        try:
            write.write_text(audit_page(report, command), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--write {write}: {error.strerror}") from None
    if as_json:
        print(json.dumps(audit_data(report)))
        return 0
    out.print(audit_table(report))
    for line in audit_lines(report):
        out.print(line, markup=False, soft_wrap=True)
    return 0


def load_model(where: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The (model, args, kwargs) that FILE:FUNCTION returns. Raises InputError."""
    file, colon, name = where.rpartition(":")
    if not colon or not file or not name:
        raise InputError(f"expected FILE:FUNCTION such as train.py:build, got {where!r}")
    path = Path(file)
    if not path.is_file():
        raise InputError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(f"shardwise_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{file}: not a Python file; its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look a module up by its name
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does
    _guarded(lambda: spec.loader.exec_module(module), f"{file} cannot be imported")  # type: ignore[union-attr]
    function = vars(module).get(name)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        close = difflib.get_close_matches(name, names, 3)
        raise InputError(f"{file} has no function {name!r}; close: {', '.join(close) or 'none'}")
    found = _guarded(function, f"{where} failed")
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise InputError(f"{where} returned {_shape_of(found)}; expected (model, args) or (model, args, kwargs)")
    model, args, *rest = found
    kwargs = rest[0] if rest else {}
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise InputError(f"{where} returned {_shape_of(found)}; args has to be a tuple and kwargs a dict")
    return model, tuple(args), kwargs


def _guarded(call: Callable[[], Any], what: str) -> Any:
    """Runs the user's code; what it raises becomes an InputError that names the line."""
    try:
        return call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}, line {last.lineno}"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}, line {error.lineno}"
        raise InputError(f"{what}: {type(error).__name__}: {error} ({place})") from error


def _shape_of(found: object) -> str:
    if isinstance(found, tuple):
        return "a tuple of (" + ", ".join(type(item).__name__ for item in found) + ")"
    return type(found).__name__


def _shape(mesh: str | None) -> tuple[int, ...] | None:
    if mesh is None:
        return None
    try:
        return tuple(int(n) for n in mesh.strip("()").split(",") if n.strip())
    except ValueError:
        raise InputError(f"--mesh: expected a shape such as 2,4, got {mesh!r}") from None


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextlib.contextmanager
def _strangers_to_stderr() -> Iterator[None]:
    """Standard output is for results: what the user's file or the solver prints goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error for every stage that reports."""
    names = {"rules": "finding rules", "plan": "planning", "samples": "running samples", "audit": "executing"}
    tasks: dict[str, Any] = {}
    with _progress(err) as progress:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(names[stage], total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield show


def main() -> None:
    """The entry point: one clear line for every error that we raise on purpose."""
    try:
        code = app(sys.argv[1:])
    except ShardwiseError as error:
        err.print(f"{type(error).__name__}: {error}", markup=False, style="red")
        code = 1
    except KeyboardInterrupt:
        err.print("interrupted; nothing is left running")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
