"""The demo: trains the byte-level GPT on local ranks under torchrun and on one process, and compares.

`run_demo` starts the runs one after the other, each in processes of its own, and reads what they report: one JSON
object a line on their standard output. `python -m shardwise.demo OPTIONS` is such a process.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from .api import MEASURE, parallelize
from .errors import InputError, RunError, ShardwiseError
from .models.text import stdlib_corpus
from .models.training import Recipe, demo_batches, demo_model, demo_optimizer, train
from .plan.plan import Plan
from .pytorch.peak import peak_increase_bytes, state_bytes
from .pytorch.world import close_group, gather_objects, rank

LARGEST_DIFFERENCE = 1e-4
"""Relative, between the losses of a step on several ranks and on one process, in fp32."""
SMALLEST_FALL = 1.0
"""Nats, from the first loss to the mean of the last ten."""
_SKIPPED_STEPS = 5  # of a median: the first ones warm up caches and allocators
_PATIENCE_S = 10.0  # for ranks to end when they are told to

Watch = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Options:
    """What the user may choose."""

    ranks: int = 2
    recipe: Recipe = field(default_factory=Recipe)
    measure: bool = False
    """Measure the machine anew instead of taking the numbers of an earlier run."""
    port: int | None = None


@dataclass(frozen=True)
class Run:
    """What one of the two runs reported."""

    losses: tuple[float, ...]
    step_s: float
    """Median seconds of forward and backward."""
    whole_s: float
    """Median seconds of a step with the optimizer."""
    threads: int
    peaks: tuple[int, ...] = ()
    """Measured peak bytes of every rank."""
    plan: Plan | None = None
    origin: dict[str, Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """Both runs, and what the demo promises of them."""

    parallel: Run
    single: Run

    @property
    def difference(self) -> float:
        """The largest relative difference of a loss; infinite where one is no number."""
        pairs = zip(self.parallel.losses, self.single.losses, strict=True)
        found = [abs(a - b) / abs(b) for a, b in pairs]
        return max(found) if all(map(math.isfinite, found)) else math.inf

    @property
    def fall(self) -> float:
        """Nats by which the loss of the parallel run fell."""
        last = self.parallel.losses[-10:]
        return self.parallel.losses[0] - sum(last) / len(last)

    @property
    def failures(self) -> tuple[str, ...]:
        """What did not hold; empty where all did."""
        found = []
        if not self.difference <= LARGEST_DIFFERENCE:
            found.append(f"the losses differ by {self.difference:.1e} relative, more than {LARGEST_DIFFERENCE:.0e}")
        if not self.fall >= SMALLEST_FALL:
            found.append(f"the loss fell by {self.fall:.2f} nats only; at least {SMALLEST_FALL:g} was expected")
        return tuple(found)


def run_demo(options: Options, watch: Watch) -> Comparison:
    """Both runs, one after the other. Raises InputError, RunError. Leaves no process behind, whatever happens."""
    stdlib_corpus()  # raises before anything is started
    if options.port is not None:
        check_port(options.port)
    cores = len(os.sched_getaffinity(0))
    parallel = _launch(options, max(1, cores // options.ranks), watch, "parallel")
    single = _launch(options, cores, watch, "single")
    return Comparison(parallel, single)


def check_port(port: int) -> None:
    """Raises InputError where something listens there already."""
    with socket.socket() as probe:
        try:
            probe.bind(("localhost", port))
        except (OSError, OverflowError) as error:
            raise InputError(f"port {port} cannot be used ({error}); choose another, or leave --port out") from None


def _launch(options: Options, threads: int, watch: Watch, kind: str) -> Run:
    data = {"kind": kind, "recipe": asdict(options.recipe), "measure": options.measure, "threads": threads}
    worker = ["-m", "shardwise.demo", json.dumps(data)]
    command = [sys.executable, *worker]
    if kind == "parallel":
        meeting = ["--standalone"]
        if options.port is not None:
            meeting = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{options.port}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(options.ranks)]
        command = [*launcher, *worker]
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONUNBUFFERED="1")
    # Threads that spin while they wait make a step three times slower where others use the cores too.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; a host name that does not resolve is common
    watch("start", {"kind": kind, "threads": threads})
    with _process(command, env) as process:
        return _collect(process, watch, kind, threads)


@contextmanager
def _process(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child whose output is read; ended together with its ranks when the block is left, by whatever way."""
    pipe = subprocess.PIPE
    # A session of its own: ctrl-C reaches this process alone, which then ends the ranks in order.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _collect(process: subprocess.Popen[str], watch: Watch, kind: str, threads: int) -> Run:
    assert process.stdout is not None
    steps: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    rest: deque[str] = deque(maxlen=30)
    for line in process.stdout:
        event = _event(line)
        if event is None:
            if line.strip() and not line.startswith("USDT:"):  # the profiler's own trace points
                rest.append(line)
            continue
        name = event.pop("event")
        found[name] = event
        if name == "step":
            steps.append(event)
        watch(name, event)
    code = process.wait()
    if "error" in found:
        raise RunError(f"the {kind} run failed: {found['error']['message']}")
    if code != 0 or "end" not in found:
        raise RunError(f"the {kind} run ended early (exit code {code}); its last lines:\n{''.join(rest)}")
    timed = steps[_SKIPPED_STEPS:] or steps
    planned = found.get("planned")
    return Run(
        tuple(s["loss"] for s in steps),
        statistics.median(s["seconds"] for s in timed),
        statistics.median(s["whole_s"] for s in timed),
        threads,
        tuple(found["end"]["peaks"]),
        None if planned is None else Plan.from_json(json.dumps(planned["plan"])),
        None if planned is None else planned["origin"],
    )


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"event"'):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None


def _say(name: str, **data: Any) -> None:
    """Reports to `run_demo`. A launcher that is gone breaks the pipe, and so ends the run."""
    if rank() == 0:
        print(json.dumps({"event": name, **data}), flush=True)


def _die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends: torchrun cannot tell its ranks when it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def work(options: dict[str, Any]) -> None:
    """One rank of the parallel run, or the single process."""
    _die_with_parent()
    recipe = Recipe(**options["recipe"])
    module = demo_model(recipe)
    example = next(demo_batches(recipe, 1))
    if options["kind"] == "parallel":
        start = time.perf_counter()
        cluster = MEASURE if options["measure"] else None
        module = parallelize(module, example, cluster=cluster, progress=_progress)
        origin = asdict(module._shardwise.origin)
        seconds = time.perf_counter() - start
        _say("planned", plan=json.loads(module.plan.to_json()), origin=origin, seconds=seconds)
    optimizer = demo_optimizer(module, recipe)
    for step in train(module, optimizer, recipe):
        _say("step", **asdict(step))
    held = state_bytes(module, optimizer, example)

    def one_more() -> None:
        module(*example).backward()
        optimizer.step()
        optimizer.zero_grad()

    peak = held + peak_increase_bytes(one_more)
    _say("end", peaks=gather_objects(peak))
    close_group()


def _progress(stage: str, done: int, total: int) -> None:
    _say("progress", stage=stage, done=done, total=total)


def main() -> int:
    """A child of `run_demo`."""
    try:
        work(json.loads(sys.argv[1]))
    except ShardwiseError as error:
        _say("error", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
