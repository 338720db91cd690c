"""`make clean` and `make mrproper`: remove what can be made again. Results go only when asked for by name."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

CACHES = ("**/__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")


def configured(symbol: str, default: str) -> Path:
    """The folder that .config names, or Kconfig's usual one where there is no .config."""
    config = Path(".config")
    found = (
        re.search(rf'^CONFIG_{symbol}="(.+)"$', config.read_text(), re.MULTILINE) if config.exists() else None
    )
    return Path(found.group(1) if found else default)


def chosen(what: str) -> list[Path]:
    if what == "caches":
        return [path for pattern in CACHES for path in Path().glob(pattern) if ".venv" not in path.parts]
    return {
        "data": [configured("DATA_DIR", "data")],
        "config": [Path(".config"), Path(".config.old"), Path("defconfig")],
        "venv": [Path(".venv")],
        "results": [configured("RESULTS_DIR", "results")],
    }[what]


def inside(path: Path) -> bool:
    """Only what lies in this folder is removed: a DATA_DIR elsewhere may hold what others use."""
    return path.resolve().is_relative_to(Path.cwd()) and path.resolve() != Path.cwd()


def main(arguments: list[str]) -> None:
    for path in [path for what in arguments for path in chosen(what)]:
        if not inside(path):
            print(f"left alone, as it is outside this folder: {path}")
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
