"""`make clean` and `make mrproper`: remove files that make can create again, never results or downloads.

    python -m scripts.dev.clean KIND ...    kinds: caches, data, config, venv

Removes only what the project's commands wrote, known by content. Removes nothing that git tracks, nothing that
CONFIG_DATASET_FILES names, nothing outside this folder, and nothing while a study or `make data` runs.
Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from runtime.dotconfig import split_words
from runtime.errors import UserError, run_command
from runtime.files import DamagedFileError, open_regular, read_json
from study.make_arguments import refuse_unknown_variables

CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache")  # each marked by the file CACHEDIR.TAG
SOURCES = (
    "bench",
    "defconfigs",
    "docs",
    "gpt2",
    "referee",
    "grpo",
    "ra",
    "runtime",
    "scripts",
    "study",
    "tests",
)
KINDS = ("caches", "data", "config", "venv")
CORPUS = re.compile(r"\w+-[0-9a-f]{12}")
UNFINISHED = re.compile(r"\.\w+-[0-9a-f]{12}\.\d+\.tmp")  # the folder of a corpus while it is prepared
LOCK = re.compile(r"\.\w+-[0-9a-f]{12}\.lock")
EXAMINATION = re.compile(r"\.admission-[0-9a-f]{16}\.json")
WRITTEN = ("# Written by `make`", "# Saved from .config")  # how the configurations that make writes begin


def configured(symbol: str, config: Path = Path(".config")) -> str:
    """Return the text that a .config gives the symbol, also where the file is invalid; empty where it gives none."""
    text = config.read_text("utf-8", "surrogateescape") if config.is_file() else ""
    found = re.search(rf'^CONFIG_{symbol}="(.+)"$', text, re.MULTILINE)
    return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


def kept_paths(studies: Iterable[Path]) -> set[Path]:
    """List the files of git and those that the configurations name, and the folders that contain them."""
    git = shutil.which("git")
    listed = subprocess.run([git, "ls-files", "-z"], capture_output=True).stdout if git else b""
    names = [os.fsdecode(name) for name in listed.split(b"\0")]
    for config in (Path(".config"), Path(".config.old"), *(study / "config" for study in studies)):
        names.append(configured("HELLASWAG_FILE", config))
        held_out = [word.partition("=")[2] for word in split_words(configured("EVAL_SETS", config))]
        for pattern in (*split_words(configured("DATASET_FILES", config)), *held_out):
            names += glob.glob(os.path.expanduser(pattern), recursive=True)
    files = {form for name in names if name for form in (Path(name).absolute(), Path(name).resolve())}
    return files | {parent for file in files for parent in file.parents}


def caches() -> Iterator[Path]:
    """Yield Python's compiled files in the source folders, and the marked caches of the tools."""
    for folder in (entry for source in SOURCES for entry, _, _ in os.walk(source)):
        if Path(folder).name == "__pycache__":
            yield from sorted(Path(folder).glob("*.pyc"))
    yield from (path for path in map(Path, CACHES) if (path / "CACHEDIR.TAG").is_file())


def prepared(directory: Path) -> Iterator[Path]:
    """Yield the files of `make data` in the data folder, the manifest of a corpus last."""
    if not directory.is_dir():
        return
    from gpt2.shards import read_manifest, written_files  # needs the packages that prepared the data

    for path in sorted(directory.glob("*")):
        if UNFINISHED.fullmatch(path.name) and not path.is_symlink():
            yield from (path / name for name in written_files(path))
        elif is_empty_lock(path) or is_examination(path):
            yield path
        elif CORPUS.fullmatch(path.name) and path.is_dir():
            try:
                splits = read_manifest(path).splits.values()
            except UserError:
                print(f"not removed: {path}: it has no manifest of a prepared corpus")
                continue
            names = [Path(shard.file).name for split in splits for shard in split.shards]
            yield from (path / name for name in [*names, "manifest.json"])


def is_empty_lock(path: Path) -> bool:
    """Whether the file is the lock of a corpus, which has no content."""
    return bool(LOCK.fullmatch(path.name)) and path.is_file() and not path.stat().st_size


def is_examination(path: Path) -> bool:
    """Whether the file holds a saved examination of a variant."""
    if not EXAMINATION.fullmatch(path.name):
        return False
    try:
        content = read_json(path)
    except (FileNotFoundError, DamagedFileError):
        return False
    return isinstance(content, dict) and {"variant", "violations"} <= content.keys()


def configurations() -> Iterator[Path]:
    """Yield the configurations in this folder that begin as make writes them."""
    for path in map(Path, (".config", ".config.old", "defconfig")):
        if path.is_file() and path.read_text("utf-8", "replace").startswith(WRITTEN):
            yield path
        elif path.exists():
            print(f"not removed: {path}: make did not write it")


def refusal(path: Path, kept: set[Path]) -> str:
    """Return the reason not to remove this path; empty where there is none."""
    here, there = Path.cwd().resolve(), path.resolve()
    if there == here:
        return "it is this folder itself"
    if not there.is_relative_to(here):
        return f"it is outside this folder ({there})"
    for source in (here / name for name in (".git", *SOURCES)):
        compiled = "__pycache__" in (path.name, path.parent.name)
        if (there.is_relative_to(source) and not compiled) or source.is_relative_to(there):
            return f"{source.name} is protected"
    if {path.absolute(), there} & kept:
        return "git tracks it, a configuration names it, or it contains such a file"
    return ""


def remove(path: Path, kept: set[Path]) -> None:
    """Remove a file, a link or a folder, and the folders that become empty. Print a reason not to."""
    if not (path.exists() or path.is_symlink()):
        return
    if reason := refusal(path, kept):
        print(f"not removed: {path}: {reason}")
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    with contextlib.suppress(OSError):  # not empty
        for parent in path.parents:
            if not refusal(parent, kept):
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
    studies = {path for parent in (folder, Path("results")) for path in parent.glob("*")}
    chosen = {
        "caches": caches,
        "data": lambda: prepared(data),
        "config": configurations,
        "venv": lambda: [Path(".venv")] if Path(".venv/pyvenv.cfg").is_file() else [],
    }
    kept = kept_paths(studies)
    with contextlib.ExitStack() as stack:
        for lock in sorted([*(study / "lock" for study in studies), *data.glob(".*.lock")]):
            stack.enter_context(hold(lock))
        for kind in arguments:
            for path in list(chosen[kind]()):
                remove(path, kept)
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
