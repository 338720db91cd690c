"""Recognise errors of exhausted memory or disk, whichever library raises them, and name what is exhausted.

torch raises OutOfMemoryError for allocations on GPUs and NPUs, and plain RuntimeErrors for the CPU's allocator, for
cuBLAS, hipBLAS and cuDNN, and for a file that it could not write.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

OUT_OF_MEMORY = (
    "DefaultCPUAllocator",  # ... not enough memory: you tried to allocate 123 bytes
    "out of memory",
    "std::bad_alloc",
    "Cannot allocate memory",
    "STATUS_ALLOC_FAILED",  # of cuBLAS, cuSPARSE, hipBLAS and cuDNN
    "ALLOCATION_FAILED",  # of cuDNN's internal errors
    "rocblas_status_memory_error",
    "miopenStatusAllocFailed",
    "could not create a memory object",  # oneDNN
)
# of torch.compile: Triton's and the CPU's; a compiler's command that failed, for example without Python.h
NO_COMPILER = re.compile(
    r"Failed to find C compiler|No working C\+\+ compiler|C\+\+ compile error|working triton installation|Python\.h|"
    r"Command '\['[^']*(?:cc|clang|\+\+)[\d.-]*'"
)
DEVICE_FAULT = re.compile(
    r"\b(CUDA|HIP) error: (?!no kernel image|invalid device function)|\bNPU function error: "
)
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def out_of_memory(error: BaseException) -> bool:
    """Whether this error or one of its causes says that memory ran out."""
    return any(
        isinstance(link, MemoryError)
        or type(link).__name__ == "OutOfMemoryError"
        or (isinstance(link, RuntimeError) and any(sign in str(link) for sign in OUT_OF_MEMORY))
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        for link in chain(error)
    )


def device_fault(error: BaseException) -> bool:
    """Whether this error or one of its causes is a fault of the device, and not that the build of torch lacks it."""
    return any(isinstance(link, RuntimeError) and DEVICE_FAULT.search(str(link)) for link in chain(error))


def explain_missing_compiler(error: BaseException) -> str:
    """Return what torch.compile lacks and the fix; empty if no compiler failed."""
    found = next((link for link in chain(error) if NO_COMPILER.search(str(link))), None)
    if found is None:
        return ""
    reason = next(line for line in str(found).splitlines() if NO_COMPILER.search(line)).strip()
    return (
        f"torch.compile has no working compiler: {reason}; fix: install gcc and Python's headers (python3-dev), or set "
        "CONFIG_COMPILE=n, which trains without torch.compile"
    )


def disk_full(error: BaseException) -> int:
    """Return the errno of this error or of its cause if it says that the disk takes no more, else 0."""
    found = (link.errno for link in chain(error) if isinstance(link, OSError) and link.errno in FULL)
    return next(found, None) or 0


def explain_full_disk(number: int, folder: Path) -> tuple[str, str]:
    """Return what is exhausted in the folder and the fix. number: of `disk_full`."""
    folder = existing_parent(folder)
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        size = "" if limit == resource.RLIM_INFINITY else f" of {gib(limit)} (ulimit -f)"
        return (
            f"a file in {folder} exceeds the limit of file sizes{size}",
            "raise the limit: ulimit -f unlimited",
        )
    if number == errno.EDQUOT:
        return f"the disk quota for {folder} is used up", "delete files, or write to another disk"
    if number == errno.EROFS:
        return f"{folder} is on a read-only file system", "write to another disk, or mount it writable"
    disk = os.statvfs(folder)
    if disk.f_files and not disk.f_favail:
        return f"the disk of {folder} has no free inodes: it holds too many files", "delete files of any size"
    return f"no free disk space for {folder} ({gib(free_bytes(folder))} free)", "free disk space"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def free_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user can still write at `path`, which need not exist."""
    return shutil.disk_usage(existing_parent(path)).free


def existing_parent(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def gib(count: float) -> str:
    """Format bytes: 3.2 GiB, 870 MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
