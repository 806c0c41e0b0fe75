"""The C library's memory: what a run frees is kept for its next step.

glibc gives freed blocks of megabytes back to the system, which has to clear their pages when the
next step of a training asks for them again. For convolutional networks that takes up to a quarter
of the time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, by the numbers of glibc's malloc.h."""

_KEPT = 1 << 30
"""Bytes of free memory that are kept, and of a block from which on it comes from the system."""


@functools.cache
def keep_freed() -> bool:
    """Let the C library keep freed memory; whether it does so.

    Only glibc is asked, once in a process, and only where no MALLOC_ variable of the environment
    or GLIBC_TUNABLES says how much it shall keep.
    """
    chosen = [k for k in os.environ if k.startswith("MALLOC_") or k == "GLIBC_TUNABLES"]
    library = _glibc()
    if library is None or chosen:
        return False
    taken = [library.mallopt(k, _KEPT) for k in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)]
    return all(taken)


def give_back() -> None:
    """Give freed memory back to the system, if it was kept."""
    if keep_freed():
        _glibc().malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    """glibc, if this process runs with it."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
