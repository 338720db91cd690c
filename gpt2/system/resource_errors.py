"""Recognise errors of exhausted memory or disk, whichever library raises them.

torch raises OutOfMemoryError for CUDA and ROCm allocations, and plain RuntimeErrors for the CPU's allocator, for
cuBLAS and hipBLAS handles, and for a file that it could not write.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

OUT_OF_MEMORY = (
    "DefaultCPUAllocator",  # ... not enough memory: you tried to allocate 123 bytes
    "out of memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "BLAS_STATUS_ALLOC_FAILED",
    "could not create a memory object",  # oneDNN
)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no space, over quota, over the file size limit


def out_of_memory(error: BaseException) -> bool:
    """Whether this error or one of its causes says that memory ran out."""
    return any(
        isinstance(link, MemoryError)
        or type(link).__name__ == "OutOfMemoryError"
        or (isinstance(link, RuntimeError) and any(sign in str(link) for sign in OUT_OF_MEMORY))
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        for link in chain(error)
    )


def disk_full(error: BaseException) -> bool:
    """Whether this error or one of its causes says that the disk is full."""
    return any(isinstance(link, OSError) and link.errno in FULL for link in chain(error))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def free_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user can still write at `path`, which need not exist."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def gib(count: float) -> str:
    """Format bytes: 3.2 GiB, 870 MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
