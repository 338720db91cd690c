"""Exhausted memory and disk are recognised in the errors of the libraries."""

import errno
import os
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from runtime import errors
from runtime.errors import device_fault, disk_full, explain_full_disk, out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("HIP out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("rocBLAS error: rocblas_status_memory_error"),
        RuntimeError("miopenStatusAllocFailed"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_every_out_of_memory_error_is_recognised_directly_and_as_a_cause(error: Exception) -> None:
    assert out_of_memory(error)
    outer = ValueError("something else")
    outer.__cause__ = error
    assert out_of_memory(outer)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), OSError(errno.ENOENT, "x"), ValueError("memory")]
)
def test_other_errors_are_neither(error: Exception) -> None:
    assert not out_of_memory(error)
    assert not disk_full(error)
    assert not device_fault(error)


def test_an_exceeded_file_size_limit_is_a_full_disk_also_through_torch_save(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RuntimeError) as caught, (tmp_path / "a.pt").open("wb") as file:
            torch.save({"a": torch.zeros(100_000)}, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert disk_full(caught.value)
    assert not out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("number", "inodes", "fact"),
    [
        (errno.ENOSPC, 10, "no free disk space for {} ("),
        (errno.ENOSPC, 0, "the disk of {} has no free inodes: it holds too many files"),
        (errno.EDQUOT, 10, "the disk quota for {} is used up"),
        (errno.EROFS, 10, "{} is on a read-only file system"),
        (errno.EFBIG, 10, "a file in {} exceeds the limit of file sizes of 3 MiB (ulimit -f)"),
    ],
)
def test_the_exhausted_resource_is_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, inodes: int, fact: str
) -> None:
    disk = types.SimpleNamespace(f_files=100, f_favail=inodes)
    monkeypatch.setattr(errors.os, "statvfs", lambda path: disk)
    monkeypatch.setattr(errors, "free_bytes", lambda path: 0)
    monkeypatch.setattr(errors.resource, "getrlimit", lambda kind: (3 * 2**20, -1))
    error = RuntimeError("torch")
    error.__cause__ = OSError(number, "x")
    assert disk_full(error) == number
    found, fix = explain_full_disk(number, tmp_path / "not" / "yet")
    assert found.startswith(fact.format(tmp_path))
    assert fix


COMPILE = """
import sys, torch
from runtime.errors import explain_missing_compiler
try:
    torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
except Exception as error:
    print(explain_missing_compiler(error))
"""


def test_a_machine_without_a_compiler_is_told_how_to_train_without_one(tmp_path: Path) -> None:
    environment = os.environ | {"CXX": "/no/compiler", "CC": "/no/compiler", "PATH": "/none"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert "torch.compile has no working compiler: " in done.stdout, done.stderr
    assert "set CONFIG_COMPILE=n" in done.stdout
