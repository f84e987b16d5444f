"""Before every call the ranks tell each other what they are about to run: 64 bytes each, gathered by all.

    calls | module | epoch | arguments | values | rows | batched | seed        int64 each

`calls` counts the calls (-1: this rank failed before it could say), `module` and `arguments` mark the parts of the
program's key, `epoch` numbers the states that the module has had on this rank, `values` is a checksum of what must be
the same on every rank, `rows` and `batched` say how many rows this rank brings and in which arguments, and rank 0's
`seed` drives the random operators of the step. They do the same before a backward, which depends on what the user does
with the outputs, and before an output that lies in pieces is gathered. So no two ranks ever run different programs
against each other, which would hang, or sum what does not belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from math import gcd

import torch
import torch.distributed as dist

from ..errors import MismatchError
from ..ir.placement import Shard, local_shape
from .world import lost_ranks

FIELDS = 8
FAILED = -1
FORWARD, BACKWARD, GATHER = 0, -2, -3
"""What stands for `module` where a rank does not call it; every other number is a forward."""
SAMPLE = 1 << 14
"""Elements of a tensor whose places its checksum tells apart, evenly spread; more would cost more than they find."""


@dataclass(frozen=True)
class Statement:
    """What one rank is about to run."""

    calls: int
    module: int
    epoch: int
    arguments: int
    values: int
    rows: int
    batched: int
    seed: int


@dataclass(frozen=True)
class Agreement:
    """What all ranks are about to run. Lists are by rank."""

    epochs: tuple[int, ...]
    rows: tuple[int, ...]
    batched: int
    seed: int


@dataclass
class Council:
    """The ranks of a parallelized module, or this process alone."""

    group: dist.ProcessGroup | None
    name: str
    """Of the module's class, for messages."""
    calls: int = 0

    def agree(self, own: Statement, restate: Callable[[int], Statement]) -> Agreement:
        """Raises MismatchError on every rank where their statements differ, LostRankError where one is gone.

        A tensor is a batch if it is one on all ranks: a mask may be as long as one rank's rows by chance. Where the
        ranks disagree they tell each other again, by what `restate` says of the tensors that are left.
        """
        if self.group is None:
            return Agreement((own.epoch,), (own.rows,), own.batched, own.seed)
        statements = self._exchange(own)
        batched = -1
        for statement in statements:
            batched &= statement.batched
        if any(s.batched != batched for s in statements):
            statements = self._exchange(restate(batched))
        self._compare(statements)
        return Agreement(
            tuple(s.epoch for s in statements), tuple(s.rows for s in statements), batched, statements[0].seed
        )

    def agree_on(self, what: int, call: int, detail: str) -> None:
        """Before a BACKWARD or a GATHER of a call. Raises MismatchError on every rank where another does anything
        else, LostRankError where one is gone."""
        if self.group is not None:
            mark = int.from_bytes(hashlib.sha256(detail.encode()).digest()[:7], "big")
            self._compare(self._exchange(Statement(call, what, 0, mark, 0, 0, 0, 0)))

    def fail(self) -> None:
        """Tells the others that this rank raises instead of running."""
        if self.group is not None:
            self._exchange(Statement(FAILED, 0, 0, 0, 0, 0, 0, 0))

    def _exchange(self, own: Statement) -> list[Statement]:
        """Everybody's statement. Raises MismatchError where a rank has failed."""
        numbers = [getattr(own, f.name) for f in fields(own)]
        world = dist.get_world_size(self.group)
        everybody = torch.empty(world * FIELDS, dtype=torch.int64)
        with lost_ranks(f"the ranks compared their calls of {self.name}"):
            dist.all_gather_single(everybody, torch.tensor(numbers, dtype=torch.int64), group=self.group)
        statements = [Statement(*row) for row in everybody.view(world, FIELDS).tolist()]
        failed = [k for k, s in enumerate(statements) if s.calls == FAILED]
        if failed and own.calls != FAILED:
            raise MismatchError(f"{_ranks(failed)} raised an error in this call of {self.name}; see its own traceback")
        return statements

    def _compare(self, all_ranks: list[Statement]) -> None:
        first = all_ranks[0]
        kinds = [min(s.module, FORWARD) for s in all_ranks]
        if len(set(kinds)) > 1:
            by_kind = {kind: [k for k, x in enumerate(kinds) if x == kind] for kind in _DOES if kind in kinds}
            doings = "; ".join(f"{_ranks(ranks)} {_DOES[kind]}" for kind, ranks in by_kind.items())
            raise MismatchError(
                f"{self.name}: the ranks do not do the same: {doings}. Call, use and differentiate it on every rank "
                "alike; a rank that only looks at an output needs the others to look at it too"
            )
        for key, what, advice in _CHECKS[kinds[0]]:
            odd = [k for k, s in enumerate(all_ranks) if getattr(s, key) != getattr(first, key)]
            if odd:
                counts = "" if key != "calls" else f" ({[s.calls for s in all_ranks]} by rank)"
                verb = "differs" if len(odd) == 1 else "differ"
                raise MismatchError(f"{self.name}: {_ranks(odd)} {verb} from rank 0{counts}: {what}. {advice}")


_SAME = (
    "Give every rank the same batch, or use batch='local' where each brings its own rows (a sampler that shuffles "
    "must do so by the same seed)"
)


_ALIKE = "Use the outputs alike on every rank"
_DOES = {FORWARD: "would call it", BACKWARD: "would run backward", GATHER: "would use an output that lies in pieces"}
_CHECKS = {
    FORWARD: (
        ("calls", "in the number of the call", "Do the same number of steps on every rank"),
        ("module", "in the state of the module (modes, attributes, dtypes, flags)", "Change it on all ranks alike"),
        ("arguments", "in the arguments (structure, shapes, dtypes or values that are no tensors)", _SAME),
        ("values", "in the values of the tensors", _SAME),
    ),
    BACKWARD: (
        ("calls", "in the call whose backward runs", _ALIKE),
        ("arguments", "in which outputs receive gradients", _ALIKE),
    ),
    GATHER: (
        ("calls", "in the call whose output is used", _ALIKE),
        ("arguments", "in the output that is used first", _ALIKE),
    ),
}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern: the checksum sees where a value stands."""
    numbers = torch.arange(1, SAMPLE + 1, dtype=torch.int64) * 0x9E3779B97F4A7C1
    return ((numbers ^ (numbers >> 29)) | 1).to(device)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: list[torch.Tensor]) -> int:
    """62 bits of the tensors' values and of where they stand; the same on every rank for the same tensors.

    All elements are added up, and of large tensors a sample is weighted by where it stands, in steps that share no
    factor with the size, so that no column is left out.
    """
    total = 0
    for k, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        if flat.numel() == 0 or tensor.device.type == "meta":
            continue
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        step = -(-flat.numel() // SAMPLE)
        while gcd(step, flat.numel()) > 1:
            step += 1
        flat = flat.contiguous()
        bits = flat.view(_BITS[flat.element_size()])
        sample = bits[::step].to(torch.int64)
        part = int((sample * _weights(tensor.device)[: sample.numel()]).sum()) + 7 * int(bits.sum(dtype=torch.int64))
        total = (total * 31 + part * (2 * k + 1)) % (1 << 62)
    return total


def expected_rows(total: int, mesh: tuple[int, ...]) -> list[int]:
    """Rows of every device, in the order of the mesh, when a batch of `total` is cut over all axes."""
    devices = 1
    for n in mesh:
        devices *= n
    found = []
    for index in range(devices):
        coords, rest = [], index
        for n in reversed(mesh):
            coords.append(rest % n)
            rest //= n
        found.append(local_shape((total,), (Shard(0),) * len(mesh), mesh, tuple(reversed(coords)))[0])
    return found


def rebalance(tensor: torch.Tensor, have: list[int], want: list[int], ranks: list[int]) -> torch.Tensor:
    """This rank's rows of the same batch, cut as `want` says. `ranks` are those of the devices in mesh order."""
    me = ranks.index(dist.get_rank())

    def overlap(a: int, b: int) -> int:
        """Rows that device a has and device b wants."""
        low = max(sum(have[:a]), sum(want[:b]))
        high = min(sum(have[: a + 1]), sum(want[: b + 1]))
        return max(0, high - low)

    position = {r: k for k, r in enumerate(ranks)}
    sends = [overlap(me, position[r]) for r in range(len(ranks))]
    receives = [overlap(position[r], me) for r in range(len(ranks))]
    wire = tensor.detach().contiguous()
    wire = wire.to(torch.uint8) if wire.dtype == torch.bool else wire
    # The pieces travel in the order of the ranks, the rows lie in the order of the mesh.
    mine = list(torch.split(wire, [overlap(me, k) for k in range(len(ranks))]))
    out = wire.new_empty((want[me], *wire.shape[1:]))
    with lost_ranks("the ranks evened out the rows of a batch"):
        dist.all_to_all_single(out, torch.cat([mine[position[r]] for r in range(len(ranks))]), receives, sends)
    pieces = dict(zip(range(len(ranks)), torch.split(out, receives)))
    return torch.cat([pieces[r] for r in ranks]).to(tensor.dtype)
