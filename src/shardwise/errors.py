"""Every error that Shardwise raises on purpose, as one tree.

    ShardwiseError
    ├── InputError(ValueError)          what the user handed over does not fit; says what, where, what to try
    │   ├── ClusterFileError            a cluster file cannot be read; names file, line and key
    │   └── ConstraintError             a wish for a placement that no strategy can meet
    ├── CaptureError                    the model cannot be captured; names the user's own line
    ├── PlanError                       no plan exists
    │   └── MemoryLimitError            the memory limit cannot be met; carries the least that would do
    ├── MismatchError                   ranks do not agree on model, batch or plan
    ├── LostRankError(RuntimeError)     another rank has ended, or did not answer within the group's timeout
    ├── RunError                        processes that we started ended early
    ├── UnsupportedError                a use that the parallelized module refuses, with the reason
    └── CacheError                      a cache entry is damaged (callers rebuild; users see a warning only)

Invariants of our own code are `assert`, never one of these.
"""

from __future__ import annotations

from typing import Any


class ShardwiseError(Exception):
    """Base of all errors raised by Shardwise."""


class InputError(ShardwiseError, ValueError):
    """What the user handed over does not fit."""


class ClusterFileError(InputError):
    """A cluster file is malformed: the message names file, line and key."""


class ConstraintError(InputError):
    """A wish for a placement that no strategy of the operators can meet."""


class CaptureError(ShardwiseError):
    """The model cannot be turned into a graph; the message names the user's line."""


class PlanError(ShardwiseError):
    """No plan exists for this graph on this mesh."""


class MemoryLimitError(PlanError):
    """The memory limit cannot be met.

    `least_bytes` is the smallest per-device peak that any plan can reach, `mesh` the mesh on which one reaches it.
    Where it is not `proven` (large models), it is the smallest of the plans that were found.
    """

    def __init__(self, message: str, least_bytes: int, mesh: tuple[int, ...] = (), proven: bool = True):
        super().__init__(message)
        self.least_bytes = least_bytes
        self.mesh = mesh
        self.proven = proven


class MismatchError(ShardwiseError):
    """The ranks do not agree on model, batch or plan."""


class LostRankError(ShardwiseError, RuntimeError):
    """Another rank has ended, or did not answer within the process group's timeout."""


class RunError(ShardwiseError):
    """Processes that Shardwise started ended early; the message has their last words."""


class UnsupportedError(ShardwiseError):
    """A use that the parallelized module refuses; the message says why and what to do instead."""


class CacheError(ShardwiseError):
    """A cache entry is damaged. Callers rebuild it."""


def error_data(error: Exception) -> dict[str, Any]:
    """What rank 0 tells the others about what it raised while it planned for all; `same_error` reads it."""
    data: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, MemoryLimitError):
        data |= {"least_bytes": error.least_bytes, "mesh": list(error.mesh), "proven": error.proven}
    return data


def same_error(data: dict[str, Any]) -> ShardwiseError:
    """What rank 0 raised, for the other ranks: the same class, text and numbers."""
    kind, message = data["kind"], data["message"]
    if kind == MemoryLimitError.__name__:
        return MemoryLimitError(message, data["least_bytes"], tuple(data["mesh"]), data["proven"])
    for known in (InputError, ConstraintError, CaptureError, PlanError, UnsupportedError):
        if known.__name__ == kind:
            return known(message)
    return PlanError(f"rank 0 could not plan: {kind}: {message}")
