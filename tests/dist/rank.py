"""One rank of the pool: the process that runs what the test session sends it.

Messages, each one pickle in one `send_bytes`:
    session -> rank   (generation, fn, args), or None to end
    rank -> session   Reply
Every function gets a fresh process group, so that nothing a test leaves behind (a group out of step, groups made on
the side, collectives never waited for) reaches the next one. The old group is destroyed when the next function
arrives: by then every rank has answered, so nobody waits in it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute, debug

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Reply:
    ok: bool
    value: Any = None  # what the function returned
    error: str = ""  # "ValueError: text"
    trace: str = ""  # the rank's traceback


def rank_main(rank: int, world: int, port: int, stack_file: str, inbox: Connection) -> None:
    torch.set_num_threads(1)  # before any work: a child forked after two threads have worked hangs in matmul
    _die_with_the_session()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # the session asks a rank that hangs
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        while (message := _receive(inbox)) is not None:
            inbox.send_bytes(_answer(message, rank, world, store))
            if message.failed:
                _leave_group()  # closes the connections: peers that wait for this rank fail now, not in a minute
    # No destruction of the group and of Python's own state: a rank at its end has nothing to save.
    os._exit(0)


@dataclass
class _Message:
    data: bytes
    failed: bool = False


def _receive(inbox: Connection) -> _Message | None:
    try:
        data = inbox.recv_bytes()
    except EOFError:  # the session is gone
        return None
    return _Message(data) if data else None


def _answer(message: _Message, rank: int, world: int, store: dist.Store) -> bytes:
    try:
        generation, fn, args = pickle.loads(message.data)
        _join_fresh_group(generation, rank, world, store)
        return pickle.dumps(Reply(ok=True, value=_call(fn, rank, world, args)))
    except BaseException as error:  # also pytest's outcomes and SystemExit: the rank must live on
        message.failed = True
        text = traceback.format_exception_only(error)[-1].strip()
        return pickle.dumps(Reply(ok=False, error=text, trace=traceback.format_exc()))


def _call(fn: Callable[..., Any], rank: int, world: int, args: tuple) -> Any:
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    try:
        return fn(rank, world, *args)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)


def _join_fresh_group(generation: int, rank: int, world: int, store: dist.Store) -> None:
    _leave_group()
    store = dist.PrefixStore(f"run{generation}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # Meshes of one shape are equal whatever group they were made on, and torch keeps what it found for a mesh: the
        # next function's DTensors would get the mesh of a dead group.
        debug._clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()


def _die_with_the_session() -> None:
    """In a session of its own, so that one signal ends a rank and all it forked; killed when the parent dies."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
