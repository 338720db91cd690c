"""`make clean` and `make mrproper`: remove files that make can create again. Removes results only by name.

    python -m scripts.dev.clean KIND ...    kinds: caches, data, config, venv, results (RESULTS=yes of `make mrproper`)

Removes nothing outside this folder and follows no link out of it. Removes from the data folder only the files of
`make data`, not the user's texts.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from kconfig.arguments import make_variables

CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
SOURCES = (".git", "bench", "defconfigs", "gpt2", "kconfig", "pages", "ra", "scripts", "study", "tests")
# A corpus, its lock and its temporary folder; the downloaded HellaSwag and its temporary file.
PREPARED = re.compile(
    r"\.?\w+-[0-9a-f]{12}(\.lock|\.\d+\.tmp)?|hellaswag_val\.jsonl|\.hellaswag_val\.jsonl\.\w+"
)
KINDS = ("caches", "data", "config", "venv", "results")


def configured(symbol: str, default: str) -> Path:
    """Return the path that .config names, or `default` where there is no .config."""
    config = Path(".config")
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    found = re.search(rf'^CONFIG_{symbol}="(.+)"$', text, re.MULTILINE)
    return Path(found.group(1) if found else default)


def caches(excluded: list[Path]) -> list[Path]:
    """List the tools' caches in this folder, without the excluded folders."""
    found: list[Path] = []
    for folder, names, _ in os.walk("."):
        found += [Path(folder, name) for name in names if name in CACHES]
        names[:] = [n for n in names if n not in CACHES and Path(folder, n).resolve() not in excluded]
    return found


def prepared(directory: Path) -> list[Path]:
    """List the files of `make data` in the data folder; the folder itself where it holds nothing else."""
    if not directory.is_dir():
        return []
    named = configured("HELLASWAG_FILE", "").resolve()
    entries = list(directory.iterdir())
    found = [path for path in entries if PREPARED.fullmatch(path.name) and path.resolve() != named]
    return [directory] if len(found) == len(entries) else found


def refusal(path: Path, protected: list[Path]) -> str | None:
    """Return the reason not to remove this path, or None."""
    here, there = Path.cwd().resolve(), path.resolve()
    if there == here or not there.is_relative_to(here):
        return f"outside this folder ({there})" if there != here else "this folder itself"
    for other in protected:
        if there.is_relative_to(other) or other.is_relative_to(there):
            return f"{os.path.relpath(other)} is protected"
    return None


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    unknown = [kind for kind in arguments if kind not in KINDS]
    if unknown or not arguments:
        print(f"error: unknown kinds {unknown}; fix: use some of {', '.join(KINDS)}", file=sys.stderr)
        return 1
    results = configured("RESULTS_DIR", "results")
    sources = [Path(name).resolve() for name in SOURCES]
    protected = sources + ([] if "results" in arguments else [results.resolve()])
    chosen = {
        "data": prepared(configured("DATA_DIR", "data")),
        "config": [Path(".config"), Path(".config.old"), Path("defconfig")],
        "venv": [Path(".venv")],
        "results": [results],
    }
    paths = [path for kind in arguments if kind != "caches" for path in chosen[kind]]
    for path in paths:
        reason = refusal(path, protected)
        if reason and (path.exists() or path.is_symlink()):
            print(f"not removed: {path}: {reason}")
        elif not reason:
            remove(path)
    if "caches" in arguments:
        excluded = [results.resolve(), Path(".venv").resolve(), Path(".git").resolve()]
        for path in caches(excluded):
            remove(path)
    return 0


if __name__ == "__main__":
    kinds = sys.argv[1:]
    sys.exit(
        main([*kinds, "results"] if "venv" in kinds and make_variables().get("RESULTS") == "yes" else kinds)
    )
