"""What the decompositions of one capture share: the seed, the numbering of the random operators, the positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwise.errors import CaptureError
from shardwise.pytorch import compat
from shardwise.pytorch.random.calls import RandomCalls


class RandomState:
    """Hands the seed and the stream numbers to `random_decompositions`.

    The captured wrapper binds its seed argument around the model's forward:

        def forward(self, seed, *args):
            with self.state.bind(seed):
                return self.model(*args)

    Every trace of the forward binds anew, so the streams count from zero in each; the seed stays bound after the
    forward, since random operators may also be traced in the backward.
    """

    def __init__(self) -> None:
        self._seed: Tensor | None = None
        self._streams = 0
        self._tracer: object | None = None
        self._vectors: dict[tuple, Tensor] = {}

    @contextmanager
    def bind(self, seed: Tensor) -> Iterator[None]:
        """Draw from `seed`, a 0-dim int64 tensor, from now on; number the operators from zero."""
        if seed.dim() or seed.dtype != torch.int64:
            raise CaptureError(f"the seed is a 0-dim int64 tensor, not {seed.dtype} of shape {tuple(seed.shape)}")
        self.release()
        self._seed = seed
        with RandomCalls():
            yield

    def release(self) -> None:
        """Forget the bound seed and all traced values."""
        self._seed, self._streams, self._tracer = None, 0, None
        self._vectors.clear()

    @property
    def seed(self) -> Tensor:
        """The seed, as the level at which decompositions run may use it."""
        if self._seed is None:
            raise CaptureError("a random operator was traced before a seed was bound: use RandomState.bind(seed)")
        return compat.unwrap_functional(self._seed)

    @property
    def streams(self) -> int:
        """How many random operators were numbered so far."""
        return self._streams

    def next_stream(self) -> int:
        self._streams += 1
        return self._streams - 1

    def positions(self, shape: Sequence[int], device: torch.device) -> list[Tensor]:
        """The position vectors of a whole result of this shape: pos[d] = arange(n_d) * stride_d along dim d.

        Operators of one trace share them: each is one small vector in the graph, not one per operator.
        """
        tracer = compat.current_tracer()
        if tracer is None or tracer is not self._tracer:
            self._tracer = tracer
            self._vectors.clear()
        if not shape:
            return [self._vector(1, 1, (), device)]
        vectors, stride = [], 1
        for dim in reversed(range(len(shape))):
            view = tuple(-1 if other == dim else 1 for other in range(len(shape)))
            vectors.append(self._vector(shape[dim], stride, view, device))
            stride *= shape[dim]
        return vectors[::-1]

    def _vector(self, size: int, stride: int, view: tuple[int, ...], device: torch.device) -> Tensor:
        key = (size, stride, view, device)
        if key not in self._vectors:
            vector = torch.arange(size, device=device)
            if stride != 1 and size > 1:
                vector = vector * stride
            self._vectors[key] = vector if len(view) == 1 else vector.view([size if n == -1 else n for n in view])
        return self._vectors[key]


def positions(shape: Sequence[int], device: torch.device | str = "cpu") -> list[Tensor]:
    """The position vectors of a whole result of this shape, outside a capture."""
    return RandomState().positions(shape, torch.device(device))
