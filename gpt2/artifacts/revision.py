"""Which revision of the code is running, as far as git can tell."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Revision:
    """The commit's full hash, and whether tracked files differ from it; both None outside a git checkout."""

    commit: str | None
    dirty: bool | None


def revision(root: Path = ROOT) -> Revision:
    """Ask git about the checkout at `root`; a missing git or checkout is no error."""

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip()

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return Revision(commit, None if changes is None else bool(changes))
