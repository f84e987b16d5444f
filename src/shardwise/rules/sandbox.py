"""Runs discovery in a child process that may die.

Executing operators blindly is unsafe: some corrupt the heap or abort on mismatched sizes, some hang. One forked child
works through many calls; before each risky execution it announces a tag. When the child crashes or runs out of time,
the candidate of the last tag is struck out and a new child goes on where the old one stopped.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence

from ..ir.runner import Call, OpRunner
from .discover import discover
from .rule import Rule

CANDIDATE_TIMEOUT_S = 10.0
"""A candidate that says nothing for this long is struck out."""
MAX_CRASHES = 12
"""After this many crashes a call is replicated only."""


def discover_all(
    calls: Sequence[Call],
    runner: OpRunner,
    progress: Callable[[int, int], None] = lambda done, total: None,
    timeout_s: float = CANDIDATE_TIMEOUT_S,
) -> list[Rule]:
    """The rules of proxy calls, in order. Survives crashes and hangs of the operators."""
    rules: list[Rule | None] = [None] * len(calls)
    skip: list[set[str]] = [set() for _ in calls]
    start = 0
    while start < len(calls):
        start = _one_child(calls, runner, rules, skip, start, progress, timeout_s)
    return [rule if rule is not None else Rule(found_on="crashed") for rule in rules]


def _one_child(
    calls: Sequence[Call],
    runner: OpRunner,
    rules: list[Rule | None],
    skip: list[set[str]],
    start: int,
    progress: Callable[[int, int], None],
    timeout_s: float,
) -> int:
    """Forks a child from call `start` on; returns the call at which the next child has to start."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child(calls, runner, skip, start, write_end)
    os.close(write_end)
    current, tag = start, ""
    try:
        for kind, payload in _messages(read_end, timeout_s):
            if kind == "try":
                current, tag = payload
            elif kind == "rule":
                index, rule = payload
                rules[index] = rule
                current, tag = index + 1, ""
                progress(current, len(calls))
    finally:
        os.close(read_end)
        _end(pid)
    if current < len(calls):
        skip[current].add(tag)
        if len(skip[current]) > MAX_CRASHES or tag == "":
            rules[current] = Rule(found_on="crashed")
            return current + 1
    return current


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)


def _messages(fd: int, timeout_s: float):
    """Yields (kind, payload) until the child closes its end or says nothing for `timeout_s`."""
    buffer = b""
    deadline = time.monotonic() + timeout_s
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        data = os.read(fd, 1 << 16)
        if not data:
            return
        buffer += data
        deadline = time.monotonic() + timeout_s
        while len(buffer) >= 4:
            (size,) = struct.unpack("<I", buffer[:4])
            if len(buffer) < 4 + size:
                break
            yield pickle.loads(buffer[4 : 4 + size])
            buffer = buffer[4 + size :]


def _child(calls: Sequence[Call], runner: OpRunner, skip: list[set[str]], start: int, fd: int) -> None:
    """Never returns. Silent: a crashing operator may print anything."""
    code = 1
    try:
        faulthandler.disable()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        runner.prepare_child()

        def send(message: object) -> None:
            data = pickle.dumps(message)
            os.write(fd, struct.pack("<I", len(data)) + data)

        for index in range(start, len(calls)):

            def announce(tag: str, index: int = index) -> bool:
                if tag in skip[index]:
                    return False
                send(("try", (index, tag)))
                return True

            try:
                rule = discover(calls[index], runner, announce)
            except MemoryError:
                rule = Rule(found_on="out of memory")
            except Exception as error:
                rule = Rule(found_on=f"discovery failed: {type(error).__name__}: {error}")
            send(("rule", (index, rule)))
        code = 0
    finally:
        os._exit(code)
