"""`make clean` and `make mrproper`: remove files that make can create again, never results or downloads.

    python -m scripts.dev.clean KIND ...    kinds: caches, data, config, venv

Removes files by the names that the project's commands give them. Removes nothing that git tracks, nothing outside this
folder or behind a link, and nothing while a study or `make data` runs. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import UserError, run_command
from runtime.files import DamagedFileError, open_regular
from study.make_arguments import refuse_unknown_variables

CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache")  # each marked by the file CACHEDIR.TAG
SOURCES = ("bench", "docs", "gpt2", "referee", "grpo", "ra", "runtime", "scripts", "study", "tests")
CORPUS = re.compile(r"\w+-[0-9a-f]{12}")
UNFINISHED = re.compile(r"\.\w+-[0-9a-f]{12}\.\d+\.tmp")  # the folder of a corpus while it is prepared
LOCK = re.compile(r"\.\w+-[0-9a-f]{12}\.lock")
EXAMINATION = re.compile(r"\.admission-[0-9a-f]{16}\.json")
WRITTEN = ("# Written by `make`", "# Saved from .config")  # how the configurations that make writes begin


def configured(symbol: str) -> str:
    """Return the text that .config gives the symbol, also where the file is invalid; empty where it gives none."""
    config = Path(".config")
    text = config.read_text("utf-8", "surrogateescape") if config.is_file() else ""
    found = re.search(rf'^CONFIG_{symbol}="(.+)"$', text, re.MULTILINE)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


def git_files() -> set[Path]:
    """Return the files that git tracks; none without git."""
    git = shutil.which("git")
    listed = subprocess.run([git, "ls-files", "-z"], capture_output=True).stdout if git else b""
    return {Path.cwd() / os.fsdecode(name) for name in listed.split(b"\0")}


def caches(_: Path) -> Iterator[Path]:
    """Yield Python's compiled files in the source folders, and the marked caches of the tools."""
    for source in SOURCES:
        yield from sorted(Path(source).glob("**/__pycache__/*.pyc"))
    yield from (path for path in map(Path, CACHES) if (path / "CACHEDIR.TAG").is_file())


def prepared(data: Path) -> Iterator[Path]:
    """Yield the files of `make data` in the data folder."""
    from gpt2.shards import written_files  # needs the packages that prepared the data

    for path in sorted(data.glob("*")):
        complete = CORPUS.fullmatch(path.name) and (path / "manifest.json").is_file()
        if complete or UNFINISHED.fullmatch(path.name):
            yield from (path / name for name in written_files(path))
        elif path.is_file() and (EXAMINATION.fullmatch(path.name) or LOCK.fullmatch(path.name)):
            yield path


def configurations(_: Path) -> Iterator[Path]:
    """Yield the configurations in this folder that begin as make writes them."""
    for path in map(Path, (".config", ".config.old", "defconfig")):
        if path.is_file() and path.read_text("utf-8", "replace").startswith(WRITTEN):
            yield path
        elif path.exists():
            print(f"not removed: {path}: make did not write it")


def environments(_: Path) -> Iterator[Path]:
    """Yield the virtual environment."""
    yield from (path for path in [Path(".venv")] if (path / "pyvenv.cfg").is_file())


KINDS = {"caches": caches, "data": prepared, "config": configurations, "venv": environments}


def remove(path: Path, tracked: set[Path]) -> None:
    """Remove a file, a link or a folder, and the folders that become empty. Print a reason not to."""
    place = Path.cwd() / path
    if place in tracked:
        print(f"not removed: {path}: git tracks it")
        return
    if place.parent.resolve() != place.parent or not place.is_relative_to(Path.cwd()):
        print(f"not removed: {path}: it is outside this folder or behind a link ({place.resolve()})")
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    with contextlib.suppress(OSError):  # not empty
        for parent in path.parents:
            parent.rmdir()


def hold(lock: Path) -> contextlib.AbstractContextManager[object]:
    """Hold a lock, so that no study starts meanwhile. UserError where a process has it."""
    try:
        file = open_regular(lock)
    except (FileNotFoundError, DamagedFileError):
        return contextlib.nullcontext()
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read(20).decode(errors="replace").strip() or "unknown"
        raise UserError(
            f"{lock} is held by process {holder}: a study or `make data` is running; "
            "nothing is removed; fix: wait for it or stop it"
        ) from None
    return file


def main(arguments: list[str]) -> int:
    refuse_unknown_variables()
    unknown = [kind for kind in arguments if kind not in KINDS]
    if unknown or not arguments:
        raise UserError(f"unknown kinds {unknown}; fix: use some of {', '.join(KINDS)}")
    data, folder = Path(configured("DATA_DIR") or "data"), Path(configured("RESULTS_DIR") or "results")
    locks = {lock for parent in (folder, Path("results")) for lock in parent.glob("*/lock")}
    tracked = git_files()
    with contextlib.ExitStack() as stack:
        for lock in sorted([*locks, *data.glob(".*.lock")]):
            stack.enter_context(hold(lock))
        for kind in arguments:
            for path in list(KINDS[kind](data)):
                remove(path, tracked)
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
