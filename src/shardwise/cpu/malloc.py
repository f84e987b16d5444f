"""Freed memory stays with the process, so that the next step does not fault its pages in again.

glibc gives freed memory back to the system above a threshold, and takes blocks of a few megabytes from it one by one.
A training step frees all activations and gradients and asks for the same sizes again: of the GPT of the demo 2,700 to
7,400 page faults a step, 6 to 15 ms of 480 (docs/results.md). Device allocators of accelerators keep memory likewise.
"""

from __future__ import annotations

import ctypes
import os
import sys

# malloc.h of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX on 64 bits; larger values are refused
_NEVER = -1

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Where one of these is set, the user has tuned malloc, and nothing is changed."""


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to keep what is freed, for the whole process; True where it did.

    False where the user has tuned malloc through the environment, or the C library is another one.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in SETTINGS):
        return False
    try:
        ctypes.CDLL("libc.so.6").gnu_get_libc_version  # noqa: B018  # another libc may have a mallopt of its own
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Both, since setting either one ends glibc's own adjustment of the other.
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
