"""Find HellaSwag's validation file: a configured copy, an earlier download, or the original from the network."""

from __future__ import annotations

import hashlib
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from gpt2.eval.hellaswag import HellaSwagError
from runtime.errors import one_line
from runtime.files import write_bytes
from runtime.settings import EvaluationConfig

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
FILE_NAME = "hellaswag_val.jsonl"
STALL_SECONDS = 10.0  # without a byte from the server
MAX_BYTES = 64 * 2**20  # the original is 12 MB
REMEDY = "fix: set CONFIG_HELLASWAG_FILE to a copy"


def obtain(
    evaluation: EvaluationConfig,
    data_dir: Path,
    report: Callable[[str], None],
    url: str = URL,
    timeout_seconds: float = 20.0,
    sha256: str = SHA256,
) -> Path | str:
    """Return the path of the items, or the reason why there are none. Downloads the original if necessary.

    A download ends after `timeout_seconds`, or after STALL_SECONDS without a byte. HellaSwagError: a configured file
    does not exist, or the download would replace another file.
    """
    configured = evaluation.hellaswag_file
    if configured is not None:
        if not configured.is_file():
            raise HellaSwagError(
                f"CONFIG_HELLASWAG_FILE={configured} is not a file; fix: name a .jsonl of items, or leave it empty to "
                "download"
            )
        return configured
    path = data_dir / FILE_NAME
    try:
        if path.exists():
            if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
                return path
            raise HellaSwagError(
                f"{path} is not the original HellaSwag file, which this project downloads there; fix: to score it, set "
                f"CONFIG_HELLASWAG_FILE={path}; else move it to another folder"
            )
        report(f"HellaSwag: downloading {url} (timeout {timeout_seconds:g} s)")
        content = _download(url, timeout_seconds)
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            return f"{url} has SHA-256 {found[:12]}..., not {sha256[:12]}...; {REMEDY}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except (OSError, ValueError, HTTPException) as error:
        return f"HellaSwag cannot be downloaded from {url}: {one_line(error)}; {REMEDY}"
    return path


def _download(url: str, timeout_seconds: float) -> bytes:
    """Return the whole body. OSError if it is too large or not complete within `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    content = bytearray()
    with urllib.request.urlopen(url, timeout=min(STALL_SECONDS, timeout_seconds)) as response:
        while chunk := response.read1(1 << 16):
            content += chunk
            if len(content) > MAX_BYTES or time.monotonic() > deadline:
                raise OSError(f"{len(content)} bytes and no end within {timeout_seconds:g} s")
    return bytes(content)
