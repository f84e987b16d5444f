"""A pool of gloo ranks shared by the whole test session: spawned once per world size, fed with functions.

    def share(rank, world, x):                  # at the top of a module, so that a rank can import it
        t = torch.tensor([x * rank]); dist.all_reduce(t)
        return t.item()

    assert run_world(4, share, 10) == [60] * 4   # the results by rank

Every call finds a fresh process group and torch's generator at seed 0. A rank that raises fails the caller with its
traceback. A rank that dies or does not answer in time costs the pool: all its processes are killed by id, the caller
gets an error that names the rank and what it ran, and the next call starts a new pool.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import IO, Any

# gloo looks up the host's name otherwise, and may find an address that leads nowhere. Inherited by all children.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch.distributed as dist

from tests.dist.rank import Reply, rank_main

_STARTUP_S = 120.0  # importing torch in 4 processes on a busy machine
_GRACE_S = 10.0  # for the other ranks, after one has failed; then they count as out of step
_STACK_S = 0.3  # for a hanging rank to write its stacks


class RankError(AssertionError):
    """A function failed in a rank. `rank` is the first to fail, `trace` its traceback."""

    def __init__(self, message: str, rank: int, trace: str = ""):
        super().__init__(message)
        self.rank = rank
        self.trace = trace


class RankDied(RankError):
    """The process of a rank ended while it ran a function."""


class RankTimeout(RankError):
    """A rank did not answer in time."""


class Pool:
    """`world` processes; started by the first `run`, and again after they were killed."""

    def __init__(self, world: int):
        self.world = world
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._generation = 0
        self._store: dist.TCPStore | None = None
        self._stack_files: list[IO[bytes]] = []  # without names, so that a killed session leaves none behind

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._ranks if process.pid is not None]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`fn(rank, world, *args)` on every rank; what each returned, by rank. `timeout` in seconds, for all."""
        self._generation += 1
        name = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
        try:
            message = pickle.dumps((self._generation, fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"{name} or its arguments cannot be sent to a rank: {error}") from error
        # An idle rank has nothing to say: something to read is the end of file of one that died.
        if any(pipe.poll() or not process.is_alive() for process, pipe in self._ranks):
            self.close()
        if not self._ranks:
            self._start()
        return self._exchange(message, name, timeout)

    def _exchange(self, message: bytes, name: str, timeout: float) -> list[Any]:
        try:
            for rank, (_, pipe) in enumerate(self._ranks):
                self._send(rank, pipe, message, name)
            return self._collect(name, time.monotonic() + timeout, timeout)
        except (RankDied, RankTimeout):
            self.close()
            raise
        except RankError:  # every rank has answered: the processes live on
            raise
        except BaseException:  # Ctrl-C, pytest-timeout: some ranks still run
            self.close()
            raise

    def close(self) -> None:
        """Kills every rank and what it forked, each by its id, and waits for the end."""
        ranks, self._ranks = self._ranks, []
        for process, _ in ranks:
            _kill(process)
        for process, pipe in ranks:
            process.join()
            process.close()
            pipe.close()
        self._store = None
        for file in self._stack_files:
            file.close()
        self._stack_files.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Port 0: the system picks a free one, and nobody can take it in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            stacks = tempfile.TemporaryFile(buffering=0)
            self._stack_files.append(stacks)
            path = f"/proc/{os.getpid()}/fd/{stacks.fileno()}"
            arguments = (rank, self.world, self._store.port, path, theirs)
            process = context.Process(target=rank_main, args=arguments, name=f"rank{rank}of{self.world}")
            process.start()
            theirs.close()  # so that the end of the rank is an end of file here
            self._ranks.append((process, ours))
        # Waits for the imports, so that they do not count against the time-out of the first function.
        self._exchange(pickle.dumps((0, _started, ())), "its start", _STARTUP_S)

    def _send(self, rank: int, pipe: Connection, message: bytes, name: str) -> None:
        try:
            pipe.send_bytes(message)
        except OSError:
            raise self._died(rank, name) from None

    def _collect(self, name: str, deadline: float, timeout: float) -> list[Any]:
        replies: dict[int, Reply] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        first_failed: int | None = None
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._late(sorted(waiting.values()), replies, first_failed, name, timeout)
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    raise self._died(rank, name) from None
                if not replies[rank].ok and first_failed is None:
                    first_failed = rank
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if first_failed is not None:
            raise RankError(self._failure_text(first_failed, replies, name), first_failed, replies[first_failed].trace)
        return [replies[rank].value for rank in range(self.world)]

    def _failure_text(self, first: int, replies: dict[int, Reply], name: str) -> str:
        lines = [f"rank {first} of {self.world} failed in {name}: {replies[first].error}", replies[first].trace]
        for rank, reply in sorted(replies.items()):
            if not reply.ok and rank != first:
                lines.append(f"rank {rank} failed after it: {reply.error}")
        return "\n".join(lines)

    def _died(self, rank: int, name: str) -> RankDied:
        process = self._ranks[rank][0]
        process.join(timeout=5)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return RankDied(f"rank {rank} of {self.world} died ({how}) while it ran {name}", rank)

    def _late(
        self, late: list[int], replies: dict[int, Reply], first_failed: int | None, name: str, timeout: float
    ) -> RankError:
        if first_failed is not None:
            text = self._failure_text(first_failed, replies, name)
            text += f"\nranks {late} still ran {_GRACE_S:.0f} s later; they were killed\n{self._stacks(late)}"
            return RankTimeout(text, first_failed, replies[first_failed].trace)
        stacks = self._stacks(late)
        ranks = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        text = f"{ranks} of {self.world} did not answer within {timeout:g} s; killed while running {name}\n{stacks}"
        return RankTimeout(text, late[0], stacks)

    def _stacks(self, ranks: list[int]) -> str:
        """Where each of the ranks stands, written by themselves on a signal."""
        for rank in ranks:
            process = self._ranks[rank][0]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)  # one that has no handler yet dies of it, as it soon would
        time.sleep(_STACK_S)
        found = []
        for rank in ranks:
            text = os.pread(self._stack_files[rank].fileno(), 1 << 20, 0).decode(errors="replace").strip()
            found.append(f"stacks of rank {rank}:\n{text or '(none: it had not started, or does not take signals)'}")
        return "\n".join(found)


def _started(rank: int, world: int) -> None:
    pass


_POOLS: dict[int, Pool] = {}


def pool(world: int) -> Pool:
    """The session's pool of that size."""
    return _POOLS.setdefault(world, Pool(world))


def run_world(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`fn(rank, world, *args)` on `world` ranks; the results by rank."""
    return pool(world).run(fn, *args, timeout=timeout)


@atexit.register  # after multiprocessing's own, so it runs before it: that one would wait for ranks for ever
def close_pools() -> None:
    while _POOLS:
        _POOLS.popitem()[1].close()


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    """The rank and all that it forked: it leads a process group of its own."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it had not yet made its group, or has ended
    process.kill()
