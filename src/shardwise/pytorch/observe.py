"""What a trace does not say of itself: the user's line of every node, and the checkpointed region that it lies in.

A dispatch mode on top of the tracer sees every operator of forward before it is traced. The line is that of the
innermost frame that is neither torch's nor ours; the region is known by the hooks for saved tensors that
`torch.utils.checkpoint(use_reentrant=False)` has set up, since the traced graph is the same with and without them.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointFunction

from ..errors import CaptureError
from .compat import TorchDispatchMode, current_tracer, top_saved_tensors_hooks

_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
SOURCE, REGION = "shardwise_source", "shardwise_region"
"""Keys of `fx.Node.meta`."""


class Observer(TorchDispatchMode):
    """Active during the forward of a capture."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.trains = torch.is_grad_enabled()
        self.regions: dict[Any, str] = {}
        """Hook of a checkpointed region -> its name; holds the hooks, so that none takes the place of another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return func(*args, **(kwargs or {}))
        if self.trains and not torch.is_grad_enabled():
            _refuse_reentrant()
        nodes = tracer.graph.nodes  # type: ignore[attr-defined]
        last = _last(nodes)
        out = func(*args, **(kwargs or {}))
        source, region = _user_line(), self._region()
        for node in reversed(nodes):
            if node is last:
                break
            node.meta[SOURCE] = source
            if region is not None:
                node.meta[REGION] = region
        return out

    def _region(self) -> str | None:
        hooks = top_saved_tensors_hooks()
        if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook"):
            return None
        return self.regions.setdefault(hooks[0], f"checkpoint{len(self.regions)}")


def _refuse_reentrant() -> None:
    """Raises CaptureError in a reentrant checkpoint: it runs forward without gradients and a backward of its own."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise CaptureError(
                f"torch.utils.checkpoint with use_reentrant=True cannot be captured (at {_user_line(frame)}). Pass "
                "use_reentrant=False, which saves as much and gives the same gradients"
            )
        frame = frame.f_back


def _last(nodes: Any) -> fx.Node | None:
    return next(iter(reversed(nodes)), None)


def _user_line(frame: FrameType | None = None) -> str:
    """`file:line` of the innermost frame outside torch and this package, from `frame` (default: the caller's) on."""
    frame = frame or sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
