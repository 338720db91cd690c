"""Errors for the user, and the one place that prints them."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from referee.errors import UserError as UserError
from runtime.output import LastingOutput, open_missing, printable

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


INTERRUPTED = 130
STREAMS = ("<stdout>", "<stderr>")  # their names in an OSError


def one_line(error: BaseException) -> str:
    """Return the error's text in one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def first_sentences(error: BaseException, most: int = 300) -> str:
    """Return the type of the error and the sentences of its text that fit into `most` characters, at least one."""
    first, *others = re.split(r"(?<=[.!?])\s+", one_line(error))
    for sentence in others:
        if len(first) + len(sentence) >= most:
            break
        first = f"{first} {sentence}"
    name = type(error).__name__
    return name if first == name else f"{name}: {first.removesuffix('.')}"


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its status. An error for the user becomes one line on stderr and status 1.

    So does an OSError that names a file, such as a folder in place of a file, or a file without permissions.
    Ctrl-C becomes one line and status INTERRUPTED, as in a shell.
    Everything that the command prints is escaped. It continues when the reader of its output ends, as in
    `make memory | head`.
    """
    open_missing()
    out, err = LastingOutput(sys.stdout), LastingOutput(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # type: ignore[type-var]
        try:
            status = main()
            sys.stdout.flush()  # may meet a full disk
        except UserError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            status = 1
        except OSError as error:
            number, name = disk_full(error), error.filename2 or error.filename
            if name in STREAMS:
                fact, fix = (
                    f"{name} cannot be written: {error.strerror}",
                    "redirect it to a disk with free space",
                )
            elif number:
                fact, fix = explain_full_disk(number, Path(name or "."))
            elif isinstance(name, str):
                fact = f"{name} cannot be used: {error.strerror}"
                fix = "correct its permissions, or move it away if another file or folder belongs there"
            else:
                raise
            print(f"error: {printable(fact)}; fix: {fix}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            status = INTERRUPTED
        finally:
            sys.stdout.flush()  # the last lines too may meet a closed pipe
    sys.exit(status or 0)


# Find the source line of a module's method.


LIBRARY = ("torch.", "gpt2.")  # modules whose lines are never the user's
ROOT = Path(__file__).parents[1]


def short_path(path: str) -> str:
    """A source path relative to the repository, where it lies there."""
    return str(Path(path).relative_to(ROOT)) if Path(path).is_relative_to(ROOT) else path


def source_line(
    module: Any, methods: tuple[str, ...] = ("attend", "forward", "__init__")
) -> tuple[str, int] | None:
    """File and line of the first of `methods` that a class outside torch and gpt2 defines for this module."""
    for kind in type(module).__mro__:
        if f"{kind.__module__}.".startswith(LIBRARY) or kind is object:
            continue
        for name in methods:
            if name in vars(kind):
                try:
                    _, line = inspect.getsourcelines(vars(kind)[name])
                    return short_path(inspect.getsourcefile(kind) or "?"), line
                except (OSError, TypeError):
                    return None
    return None
