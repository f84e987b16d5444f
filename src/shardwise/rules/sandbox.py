"""Runs discovery in child processes that may die.

Executing operators blindly is unsafe: some corrupt the heap or abort on mismatched sizes, some hang. A forked child
works through many calls and tells before every attempt that it is alive. When it dies or falls silent, the call that
it was at starts again in a child that makes every attempt in a fork of its own: a crash, a hang or a corrupted heap
then costs that attempt alone, and it is always the same one.
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
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from ..ir.runner import Call, OpRunner
from .discover import discover
from .draws import Spec
from .ranges import RISKY, Attempt, find_spec
from .rule import Rule

ATTEMPT_TIMEOUT_S = 20.0
"""An attempt that takes longer is given up: thousands of times what one takes, since the machine may be busy."""
MAX_HANGS = 6
"""After this many attempts that took too long no further one is made for a call: what was found until then stands."""
CRASHED = Rule(found_on="crashed")
FAILED = "discovery failed"

T = TypeVar("T")
Subject = TypeVar("Subject")
"""What rules are found of: calls, or searches for windows."""
Progress = Callable[[int, int], None]


def discover_all(
    calls: Sequence[Subject],
    runner: OpRunner,
    progress: Progress = lambda done, total: None,
    timeout_s: float = ATTEMPT_TIMEOUT_S,
    isolated: bool = False,
    find: Callable[[Subject, OpRunner, Attempt], Rule] = discover,
) -> list[Rule]:
    """The rules that `find` finds of proxy calls, in order. Survives crashes and hangs of the operators.

    `isolated` makes every attempt in its own process from the start: slower, and nothing can disturb another.
    """
    rules: dict[int, Rule] = {}

    def take(index: int, rule: Rule) -> None:
        rules[index] = rule
        progress(len(rules), len(calls))

    start = 0
    while start < len(calls):
        if not isolated:
            start = _child_over(calls, range(start, len(calls)), runner, take, timeout_s, False, find)
        if start < len(calls):
            _child_over(calls, range(start, start + 1), runner, take, timeout_s, True, find)
            if start not in rules:
                take(start, CRASHED)
            start += 1
    return [rules[k] for k in range(len(calls))]


def spec_of(call: Call, runner: OpRunner, timeout_s: float = ATTEMPT_TIMEOUT_S) -> Spec | None:
    """What to draw the integers of a call from (`ranges.find_spec`). Survives crashes of the operator."""
    for isolated in (False, True):

        def work(send: Callable[[object], None], isolated: bool = isolated) -> None:
            runner.prepare_child()
            found = find_spec(call, runner, _isolated(send, timeout_s) if isolated else _direct(send, timeout_s))
            send((found and found[0],))

        for message in messages(work, timeout_s * (3 if isolated else 1)):
            if message is not None:
                return message[0]  # type: ignore[index]
    return None


def _child_over(
    calls: Sequence[Subject],
    indices: range,
    runner: OpRunner,
    take: Callable[[int, Rule], None],
    timeout_s: float,
    isolated: bool,
    find: Callable[[Subject, OpRunner, Attempt], Rule],
) -> int:
    """Forks a child for these calls; returns the first of them that it did not finish, or the end."""

    def work(send: Callable[[object], None]) -> None:
        runner.prepare_child()
        for index in indices:
            attempt = _isolated(send, timeout_s) if isolated else _direct(send, timeout_s)
            rule = _discover(calls[index], runner, attempt, find)
            if rule.found_on.startswith(FAILED) and not isolated:
                return  # an operator may have damaged this process: all further calls would fail alike
            send((index, rule))

    done = indices.start
    for message in messages(work, timeout_s * (3 if isolated else 1)):
        if message is not None:
            index, rule = message  # type: ignore[misc]
            take(index, rule)
            done = index + 1
    return done


def _discover(
    call: Subject, runner: OpRunner, attempt: Attempt, find: Callable[[Subject, OpRunner, Attempt], Rule]
) -> Rule:
    try:
        return find(call, runner, attempt)
    except MemoryError:
        return Rule(found_on="out of memory")
    except Exception as error:
        return Rule(found_on=f"{FAILED}: {type(error).__name__}: {error}")


def _direct(send: Callable[[object], None], timeout_s: float) -> Attempt:
    """Attempts in this process, but for the risky ones; each begins with a sign of life."""
    alone = _isolated(send, timeout_s / 2)

    def attempt(tag: str, work: Callable[[], T]) -> T | None:
        if tag.startswith(RISKY):
            return alone(tag, work)
        send(None)
        return work()

    return attempt


def _isolated(send: Callable[[object], None], timeout_s: float) -> Attempt:
    """Attempts in a process each; None where it dies or takes too long."""
    hung: list[str] = []

    def attempt(tag: str, work: Callable[[], T]) -> T | None:
        send(None)
        if len(hung) >= MAX_HANGS:
            return None
        start = time.monotonic()
        for result in messages(lambda answer: answer((work(),)), timeout_s):
            return result[0]  # type: ignore[index]
        if time.monotonic() - start >= timeout_s:
            hung.append(tag)
        return None

    return attempt


def messages(work: Callable[[Callable[[object], None]], None], timeout_s: float) -> Iterator[object]:
    """Yields what `work(send)` sends from a forked process, until that ends or is silent for `timeout_s`."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _child(work, write_end)
    os.close(write_end)
    try:
        yield from _read(read_end, timeout_s)
    finally:
        os.close(read_end)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(pid, 0)


def _read(fd: int, timeout_s: float) -> Iterator[object]:
    buffer = bytearray()
    deadline = time.monotonic() + timeout_s
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        data = os.read(fd, 1 << 20)
        if not data:
            return
        buffer += data
        while len(buffer) >= 4:
            (size,) = struct.unpack("<I", buffer[:4])
            if len(buffer) < 4 + size:
                break
            yield pickle.loads(bytes(buffer[4 : 4 + size]))
            del buffer[: 4 + size]
        deadline = time.monotonic() + timeout_s


def _child(work: Callable[[Callable[[object], None]], None], fd: int) -> NoReturn:
    """Silent: a crashing operator may print anything."""
    code = 1
    try:
        faulthandler.disable()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)

        def send(message: object) -> None:
            data = pickle.dumps(message)
            view = memoryview(struct.pack("<I", len(data)) + data)
            while view:
                view = view[os.write(fd, view) :]

        work(send)
        code = 0
    finally:
        os._exit(code)
