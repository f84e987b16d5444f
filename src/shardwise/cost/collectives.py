"""Seconds and bytes of a collective, in the alpha-beta model: alpha per message, beta = 1 / bandwidth per byte.

`nbytes` (n below) is the whole tensor as one group sees it: the gathered result of all_gather, the input of
reduce_scatter and all_reduce, and for all_to_all the whole tensor over the group, of which each of the p ranks
holds n/p. The arithmetic of reductions (gamma) is not counted: it is small beside beta, and fits contain it.

    kind            messages   bytes on the wire, per rank     algorithm
    all_gather      p-1        (p-1)/p n                       ring
    reduce_scatter  p-1        (p-1)/p n                       ring, or pairwise exchange
    all_reduce      2(p-1)     2(p-1)/p n                      ring: reduce_scatter, then all_gather
    all_to_all      p-1        (p-1)/p (n/p)                   pairwise exchange
    exchange        neighbours what they hold of one's window  point to point

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
Int. J. High Performance Computing Applications 19(1), 2005 (all_gather: ring; reduce_scatter: pairwise exchange;
all-to-all: pairwise exchange for long messages); P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", J. Parallel and Distributed Computing 69(2), 2009 (all_reduce).
"""

from __future__ import annotations

from ..cluster.links import COLLECTIVES, AxisLink

SHARED_BYTES = 4 << 20
"""All-reduces up to this size share a buffer, where nothing waits for them before backward has ended."""
BUFFER_BYTES = 4 << 20
"""A shared buffer is sent when it holds this much. Larger ones start later and hide less."""

_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
assert set(_PASSES) == set(COLLECTIVES)


def bytes_on_wire(kind: str, nbytes: float, size: int) -> float:
    """Bytes that one rank of a group of `size` sends for a collective over a tensor of `nbytes` (see above)."""
    if size <= 1:
        return 0.0
    held = nbytes / size if kind == "all_to_all" else nbytes
    return _PASSES[kind] * held * (size - 1) / size


def messages(kind: str, size: int) -> int:
    """Messages that one rank of a group of `size` sends one after the other."""
    return _PASSES[kind] * (size - 1)


def collective_s(kind: str, nbytes: float, link: AxisLink) -> float:
    """Seconds of a collective over a tensor of `nbytes` in every group of an axis at once.

    A measured fit of the kind is used where the link has one: alpha + beta x bytes on the wire per rank. Of the
    latency of a shared buffer a small all-reduce pays the part that it fills.
    """
    if link.size <= 1:
        return 0.0
    wire_bytes = bytes_on_wire(kind, nbytes, link.size)
    if link.fits and kind in link.fits:
        latency_s, beta_s_per_byte = link.fits[kind]
    else:
        latency_s, beta_s_per_byte = messages(kind, link.size) * link.alpha_s, 1.0 / link.bytes_per_s
    if link.shared_buffers and kind == "all_reduce" and nbytes <= SHARED_BYTES:
        latency_s *= nbytes / BUFFER_BYTES
    return latency_s + beta_s_per_byte * wire_bytes


def exchange_s(messages: int, nbytes: float, link: AxisLink) -> float:
    """Seconds in which every rank gets `nbytes` from so many others (the edges of a window that lie with neighbours).

    It runs as an all-to-all most of whose parts are empty, and takes the fit of that where the link has one.
    """
    if link.size <= 1 or messages == 0:
        return 0.0
    if link.fits and "all_to_all" in link.fits:
        latency_s, beta_s_per_byte = link.fits["all_to_all"]
    else:
        latency_s, beta_s_per_byte = messages * link.alpha_s, 1.0 / link.bytes_per_s
    return latency_s + beta_s_per_byte * nbytes
