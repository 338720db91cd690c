"""`make clean` and `make mrproper`: remove what can be made again. Results go only when asked for by name.

    python -m scripts.dev.clean WHAT ...    of caches, data, config, venv, results

Nothing outside this folder is removed, no link is followed out of it, and of the data folder goes only what
`make data` put there: own texts beside it stay.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

CACHES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
SOURCES = (".git", "bench", "defconfigs", "gpt2", "kconfig", "pages", "ra", "scripts", "study", "tests")
# A corpus, its lock, what a run that was killed left of it; HellaSwag as downloaded.
PREPARED = re.compile(
    r"\.?\w+-[0-9a-f]{12}(\.lock|\.\d+\.tmp)?|hellaswag_val\.jsonl|\.hellaswag_val\.jsonl\.\w+"
)
WHAT = ("caches", "data", "config", "venv", "results")


def configured(symbol: str, default: str) -> Path:
    """The path that .config names, or Kconfig's usual one where there is no .config."""
    config = Path(".config")
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    found = re.search(rf'^CONFIG_{symbol}="(.+)"$', text, re.MULTILINE)
    return Path(found.group(1) if found else default)


def caches(kept: list[Path]) -> list[Path]:
    """The tools' caches in this folder, not in `kept`."""
    found: list[Path] = []
    for folder, names, _ in os.walk("."):
        found += [Path(folder, name) for name in names if name in CACHES]
        names[:] = [n for n in names if n not in CACHES and Path(folder, n).resolve() not in kept]
    return found


def prepared(directory: Path) -> list[Path]:
    """What `make data` made in the data folder; the folder itself where it holds nothing else."""
    if not directory.is_dir():
        return []
    named = configured("HELLASWAG_FILE", "").resolve()
    entries = list(directory.iterdir())
    made = [path for path in entries if PREPARED.fullmatch(path.name) and path.resolve() != named]
    return [directory] if len(made) == len(entries) else made


def refusal(path: Path, kept: list[Path]) -> str | None:
    """Why this path is not removed, or None."""
    here, there = Path.cwd().resolve(), path.resolve()
    if there == here or not there.is_relative_to(here):
        return f"outside this folder ({there})" if there != here else "this folder itself"
    for other in kept:
        if there.is_relative_to(other) or other.is_relative_to(there):
            return f"{os.path.relpath(other)} stays"
    return None


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    unknown = [what for what in arguments if what not in WHAT]
    if unknown or not arguments:
        print(f"error: nothing known as {unknown}; right: some of {', '.join(WHAT)}", file=sys.stderr)
        return 1
    results = configured("RESULTS_DIR", "results")
    sources = [Path(name).resolve() for name in SOURCES]
    kept = sources + ([] if "results" in arguments else [results.resolve()])
    chosen = {
        "data": prepared(configured("DATA_DIR", "data")),
        "config": [Path(".config"), Path(".config.old"), Path("defconfig")],
        "venv": [Path(".venv")],
        "results": [results],
    }
    paths = [path for what in arguments if what != "caches" for path in chosen[what]]
    for path in paths:
        reason = refusal(path, kept)
        if reason and (path.exists() or path.is_symlink()):
            print(f"left alone: {path}: {reason}")
        elif not reason:
            remove(path)
    if "caches" in arguments:
        apart = [results.resolve(), Path(".venv").resolve(), Path(".git").resolve()]
        for path in caches(apart):
            remove(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
