"""The checkout: its tracked files, and a folder with links to its parts, where commands write nothing into it."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = (
    "Kconfig",
    "gpt2",
    "ra",
    "grpo",
    "runtime",
    "study",
    "referee",
    "scripts",
    "defconfigs",
)


def link_project(folder: Path) -> None:
    """Link every part of the project into an existing folder."""
    for part in PARTS:
        (folder / part).symlink_to(ROOT / part)


def tracked_files() -> list[str]:
    """Return the paths of the files that git tracks and that exist."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).exists()]
